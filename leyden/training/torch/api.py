"""The engine's HTTP API: docs/wire.md, "Engine API". Shapes are vLLM's where vLLM has them."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyden.errors import LeydenError
from leyden.training.torch.decoder_weights import WeightsError, from_folder
from leyden.training.torch.engine import Engine, EngineDead, NotFinite, QueueFull
from leyden.training.torch.loading import LoadedModel, decoder_of
from leyden.training.torch.requests import Answer, Params, visible_text

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "min_p": (0, None),
    "best_of": (1, None),
    "stream": (False, None),
    "echo": (False, None),
    "use_beam_search": (False, None),
    "min_tokens": (0, None),
    "allowed_token_ids": ([], None),
    "bad_words": ([], None),
}
"""Fields that would change what is sampled or sent, with the values at which they don't. Others are refused."""


class ApiError(Exception):
    """Answered as a status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CompletionRequest(BaseModel):
    """POST /v1/completions. Unknown fields are ignored unless they would change the sampling."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: list[int] | str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    n: int = Field(1, ge=1, le=256)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = True
    request_id: str | None = Field(None, max_length=200)


class AbortRequest(BaseModel):
    request_id: str


class LoadRequest(BaseModel):
    path: str
    version: int = Field(ge=0)


class EngineApi:
    """Routes over one engine. `key` None leaves the API open (loopback only, see the server)."""

    def __init__(self, engine: Engine, model: LoadedModel, name: str, key: str | None, timeout: float) -> None:
        self._engine = engine
        self._model = model
        self._name = name
        self._key = key.encode() if key else None
        self._timeout = timeout
        self._decode = decoder_of(model.tokenizer)
        self._tickets: dict[str, set[int]] = {}
        self._loading = asyncio.Lock()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/abort", self._guarded(self._abort), methods=["POST"]),
                Route("/v1/load_weights", self._guarded(self._load_weights), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ]
        )

    def _guarded(self, handler: Any) -> Any:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ApiError as e:
                return _error(e.status, str(e))
            except ValidationError as e:
                return _error(400, "; ".join(_explain(fault) for fault in e.errors()))
            except QueueFull as e:
                return _error(503, str(e))
            except (EngineDead, NotFinite) as e:
                return _error(500, str(e))
            except WeightsError as e:
                return _error(422, str(e))
            except LeydenError as e:
                return _error(400, str(e))

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode(), self._key):
            raise ApiError(401, "this engine needs its key, as Authorization: Bearer KEY")

    async def _completions(self, request: Request) -> Response:
        body = CompletionRequest.model_validate_json(await request.body())
        prompt, params = self._understand(body)
        request_id = body.request_id or f"cmpl-{uuid.uuid4().hex}"
        ticket, futures = self._engine.submit(prompt, params, body.n)
        self._tickets.setdefault(request_id, set()).add(ticket)
        try:
            answers = await self._wait(request, ticket, futures)
        finally:
            tickets = self._tickets[request_id]
            tickets.discard(ticket)
            if not tickets:
                del self._tickets[request_id]
        if answers is None:
            return Response(status_code=499)
        return _json(self._answer(body, request_id, prompt, answers))

    async def _wait(self, request: Request, ticket: int, futures: list[Future[Answer]]) -> list[Answer] | None:
        """The answers; None when the client left first, which ends the request."""
        finished = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            done, _ = await asyncio.wait((finished, gone), timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if finished in done:
                return finished.result()
            self._engine.abort(ticket)
            if gone not in done:
                raise ApiError(504, f"the request took longer than {self._timeout:.0f} s and was ended")
            return None
        finally:
            gone.cancel()
            finished.cancel()

    def _understand(self, body: CompletionRequest) -> tuple[list[int], Params]:
        if body.model not in (None, self._name):
            raise ApiError(404, f"there is no model {body.model!r} here; this engine serves {self._name!r}")
        for field, value in (body.model_extra or {}).items():
            if field in _NEUTRAL and value not in _NEUTRAL[field]:
                raise ApiError(400, f"{field}={value!r} isn't supported by this engine")
        if (body.logprobs or 0) > 0 or (body.prompt_logprobs or 0) > 0:
            raise ApiError(400, "only the sampled tokens' log-probs can be had: use logprobs 0 and prompt_logprobs 0")
        stop = tuple(s for s in ([body.stop] if isinstance(body.stop, str) else body.stop or []) if s)
        if (stop or isinstance(body.prompt, str)) and self._model.tokenizer is None:
            raise ApiError(400, "this model's folder holds no tokenizer: send token ids, and stop_token_ids for stop")
        prompt = body.prompt
        if isinstance(prompt, str):
            assert self._model.tokenizer is not None
            prompt = list(self._model.tokenizer(prompt)["input_ids"])
        room = self._room(prompt)
        stops = self._model.stop_token_ids if body.stop_token_ids is None else frozenset(body.stop_token_ids)
        params = Params(
            max_tokens=room if body.max_tokens is None else min(body.max_tokens, room),
            temperature=body.temperature,
            top_k=max(0, body.top_k),
            top_p=body.top_p,
            seed=body.seed,
            stop_token_ids=frozenset() if body.ignore_eos else stops,
            stop=stop,
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        return prompt, params

    def _room(self, prompt: list[int]) -> int:
        """Tokens that fit behind the prompt."""
        vocab, limit = self._model.vocab_size, self._model.sizes.max_model_len
        if not prompt:
            raise ApiError(400, "the prompt is empty: send at least one token id")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab:
            raise ApiError(400, f"token id {low if low < 0 else high} isn't in the vocabulary of {vocab} tokens")
        if len(prompt) >= limit:
            cause = ""
            if limit == self._model.sizes.kv_tokens:
                cause = f" (the KV cache holds {limit} tokens in all: raise kv_cache_tokens)"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens{cause}, and the prompt has {len(prompt)}: "
                "there is no room to answer",
            )
        return limit - len(prompt)

    def _answer(
        self, body: CompletionRequest, request_id: str, prompt: list[int], answers: list[Answer]
    ) -> dict[str, Any]:
        choices = [self._choice(body, i, prompt, answer) for i, answer in enumerate(answers)]
        sampled = sum(len(answer.token_ids) for answer in answers)
        return {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
                "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
            },
            "weight_version": max((a.versions[-1] for a in answers if a.versions), default=self._engine.version),
        }

    def _choice(self, body: CompletionRequest, index: int, prompt: list[int], answer: Answer) -> dict[str, Any]:
        ids = answer.token_ids
        text = visible_text(self._decode(ids), answer.stop_reason) if self._decode else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "logprobs": None if body.logprobs is None else {"token_logprobs": answer.logprobs},
            "token_versions": answer.versions,
        }
        if body.logprobs is not None and self._model.tokenizer is not None:
            choice["logprobs"]["tokens"] = [f"token_id:{i}" for i in ids]
        if body.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [None, *answer.prompt_logprobs]
        return choice

    async def _abort(self, request: Request) -> Response:
        body = AbortRequest.model_validate_json(await request.body())
        tickets = self._tickets.get(body.request_id)
        if not tickets:
            raise ApiError(404, f"no request {body.request_id!r} is running")
        for ticket in tickets:
            self._engine.abort(ticket)
        return _json({"request_id": body.request_id, "aborted": len(tickets)})

    async def _load_weights(self, request: Request) -> Response:
        body = LoadRequest.model_validate_json(await request.body())
        started = time.monotonic()
        async with self._loading:
            await asyncio.to_thread(self._load, Path(body.path), body.version)
        return _json({"version": body.version, "seconds": round(time.monotonic() - started, 3)})

    def _load(self, folder: Path, version: int) -> None:
        if not folder.is_dir():
            raise ApiError(400, f"there is no folder {folder}")
        self._engine.load_weights(from_folder(folder), version)

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._name,
            "object": "model",
            "owned_by": "leyden",
            "max_model_len": self._model.sizes.max_model_len,
            "weight_version": self._engine.version,
        }
        return _json({"object": "list", "data": [card]})

    async def _metrics(self, request: Request) -> Response:
        stats: dict[str, Any] = dict(self._engine.stats())
        stats |= {
            "model": self._name,
            "fast_decoder": self._model.fast,
            "max_model_len": self._model.sizes.max_model_len,
            "kv_cache_tokens": self._model.sizes.kv_tokens,
        }
        return _json(stats)

    async def _health(self, request: Request) -> Response:
        if self._engine.failure is not None:
            return _error(503, self._engine.failure)
        return _json({"status": "ok", "weight_version": self._engine.version})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}, "detail": message}, status_code=status)


def _explain(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part not in ("list[int]", "str", "list[str]"))
    return f"{where}: {fault['msg']}" if where else f"the body isn't valid: {json.dumps(fault['msg'])}"

"""The embedded engine: one thread that runs a model step by step for everybody who waits.

Other threads hand requests, aborts and new weights in; the engine's thread takes them between steps. If that thread
ever fails, every waiting request learns why and the engine stays dead.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from leyden.errors import LeydenError
from leyden.training.torch.decoder import Runner
from leyden.training.torch.decoder_weights import TensorSource
from leyden.training.torch.kv import BlockPool, PrefixTree
from leyden.training.torch.requests import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Answer, Params, stopped_by
from leyden.training.torch.sampling import chosen_logprobs, sample
from leyden.training.torch.scheduler import Chunk, Scheduler, Sequence

_LOGIT_ROWS = 128
"""Rows of prompt logits held at once."""


class EngineDead(LeydenError):
    """The engine's thread has failed; the message says why."""


class QueueFull(LeydenError):
    """As many requests wait as may."""


class NotFinite(LeydenError):
    """The model's logits for a request weren't finite."""


@dataclass(eq=False)
class _Job:
    ticket: int
    sequence: Sequence
    params: Params
    future: Future[Answer]
    rng: random.Random
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return self.sequence.tokens[self.sequence.prompt_length :]


class Engine:
    """Continues token ids with `runner`. `decode` turns ids into text, for stop strings.

    Args:
        n_blocks: size of the KV cache, in blocks of `kv.BLOCK` tokens.
        max_batch: sequences that run together.
        max_waiting: sequences that may wait beside those.
        on_death: called once, from the engine's thread, when it fails.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        n_blocks: int,
        max_batch: int,
        max_waiting: int = 4096,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        pool = BlockPool(n_blocks)
        self.runner = runner
        self.scheduler = Scheduler(pool, PrefixTree(pool, enabled=runner.shares_prefixes), max_batch)
        self.version = version
        self.failure: str | None = None
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.steps = 0
        self._decode = decode
        self._on_death = on_death
        self._max_waiting = max_waiting + max_batch
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: dict[int, _Job] = {}
        self._open = 0
        self._next = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def token_capacity(self) -> int:
        """The longest sequence that fits into the KV cache."""
        return self.scheduler.token_capacity

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30) -> None:
        """End everything that runs as aborted, then the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, prompt: list[int], params: Params, n: int = 1) -> tuple[int, list[Future[Answer]]]:
        """Queue `n` continuations of one prompt. Returns a ticket for `abort`, and their futures.

        `params.max_tokens` must leave the sequence within `token_capacity`. Choices of one seeded request draw from
        seeds of their own; the first draws as it would alone.

        Raises:
            QueueFull: when too many wait already.
            EngineDead: when the engine has failed or is stopping.
        """
        futures: list[Future[Answer]] = []
        with self._wake:
            if self.failure is not None or self._stopping:
                raise EngineDead(self.failure or "the engine is stopping")
            if self._open + n > self._max_waiting:
                raise QueueFull(f"the engine's queue is full: {self._open} sequences run or wait already")
            self._open += n
            ticket = self._next
            for index in range(n):
                future: Future[Answer] = Future()
                # A future that runs can't be cancelled under the engine: leaving is `abort`'s business.
                future.set_running_or_notify_cancel()
                seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(62)
                rng = random.Random(seed if index == 0 else f"{seed}/{index}")
                own = params if index == 0 else replace(params, prompt_logprobs=False)
                sequence = Sequence(self._next, list(prompt), reuse=not own.prompt_logprobs)
                job = _Job(ticket, sequence, own, future, rng)
                self._next += 1
                futures.append(future)
                self._inbox.append(lambda job=job: self._enter(job))
            self._wake.notify()
        return ticket, futures

    def abort(self, ticket: int) -> None:
        """End a request before the next step; its futures get what was sampled, with finish reason `abort`."""
        self._post(lambda: self._abort(lambda job: job.ticket == ticket))

    def abort_all(self) -> None:
        self._post(lambda: self._abort(lambda job: True))

    def load_weights(self, source: TensorSource, version: int, timeout: float = 600) -> None:
        """Check and pack new weights on the caller's thread, then swap them in between two steps.

        Raises:
            WeightsError: naming the tensor at fault; the old weights stay.
            EngineDead: when the engine has failed.
            TimeoutError: when no step boundary came within `timeout` seconds.
        """
        prepared = self.runner.prepare(source)
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()

        def swap() -> None:
            try:
                self.runner.swap(prepared)
                for sequence in self.scheduler.new_weights():
                    self._jobs[sequence.key].prompt_logprobs.clear()
                self.version = version
            except BaseException as e:
                done.set_exception(EngineDead(_sentence(e)))
                raise
            done.set_result(None)

        self._post(swap)
        deadline = time.monotonic() + timeout
        while self.failure is not None or not done.done():
            if self.failure is not None or self._stopping:
                raise EngineDead(self.failure or "the engine is stopping")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine came to no step boundary within {timeout:.0f} s")
            try:
                done.exception(timeout=0.5)
            except TimeoutError:
                continue
        done.result()

    def stats(self) -> dict[str, int]:
        """Counters and gauges; read without a lock, each one right by itself."""
        pool = self.scheduler.pool
        return {
            "running": len(self.scheduler.running),
            "waiting": max(0, self._open - len(self.scheduler.running)),
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "finished": self.finished,
            "aborted": self.aborted,
            "preemptions": self.scheduler.preemptions,
            "steps": self.steps,
            "kv_blocks": pool.n_blocks,
            "kv_blocks_used": pool.n_blocks - pool.free,
            "kv_blocks_cached": pool.reclaimable,
            "weight_version": self.version,
        }

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self.failure is not None:
                raise EngineDead(self.failure)
            self._inbox.append(action)
            self._wake.notify()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as e:
            self._die(e)

    def _turn(self) -> bool:
        with self._wake:
            while not self._inbox and not self._jobs and not self._stopping:
                self._wake.wait(timeout=1)
            actions, stopping = list(self._inbox), self._stopping
            self._inbox.clear()
        for action in actions:
            action()
        if stopping:
            self._abort(lambda job: True)
            return False
        if self._jobs:
            self._step()
        return True

    def _enter(self, job: _Job) -> None:
        self._jobs[job.sequence.key] = job
        try:
            self.scheduler.add(job.sequence)
        except ValueError as e:
            self._close(job)
            job.future.set_exception(LeydenError(str(e)))

    def _step(self) -> None:
        plan = self.scheduler.plan()
        self._drop_released()
        if not plan.chunks:
            if not self.scheduler.running and self.scheduler.waiting:
                raise RuntimeError("requests wait, none runs and none can be admitted")
            return
        order, features = self.runner.forward(plan)
        self.steps += 1
        rows: list[int] = []
        sampling: list[_Job] = []
        row = 0
        for chunk in order:
            job = self._jobs[chunk.sequence.key]
            if job.params.prompt_logprobs and chunk.start < job.sequence.prompt_length - 1:
                self._score_prompt(job, chunk, features[row : row + chunk.count])
            row += chunk.count
            self.scheduler.commit(chunk)
            if not chunk.samples:
                continue
            if job.params.max_tokens == 0:
                self._finish(job, FINISH_LENGTH, None)
            else:
                rows.append(row - 1)
                sampling.append(job)
        if sampling:
            self._sample(sampling, features if len(rows) == row else features[rows])
        self._drop_released()

    def _sample(self, jobs: list[_Job], features: torch.Tensor) -> None:
        tokens, logprobs = sample(
            self.runner.logits(features),
            [job.params.temperature for job in jobs],
            [job.params.top_k for job in jobs],
            [job.params.top_p for job in jobs],
            [job.rng.random() for job in jobs],
        )
        for job, token, logprob in zip(jobs, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._fail(job, NotFinite("the model's logits for this request aren't finite: check its weights"))
                continue
            job.sequence.tokens.append(token)
            job.logprobs.append(logprob)
            job.versions.append(self.version)
            self.generated_tokens += 1
            sampled = len(job.logprobs)
            window = job.sequence.tokens[-min(sampled, 4096) :] if job.params.stop else [token]
            stop = stopped_by(window, job.params, self._decode)
            if stop is not None:
                self._finish(job, FINISH_STOP, stop)
            elif sampled >= job.params.max_tokens:
                self._finish(job, FINISH_LENGTH, None)

    def _score_prompt(self, job: _Job, chunk: Chunk, features: torch.Tensor) -> None:
        """Append the log-probabilities of the prompt tokens that follow the chunk's tokens."""
        prompt = job.sequence.tokens[: job.sequence.prompt_length]
        targets = prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
        # After a preemption the prompt is read again; what has been scored stays as it was.
        skip = max(0, len(job.prompt_logprobs) - chunk.start)
        for at in range(skip, len(targets), _LOGIT_ROWS):
            some = torch.tensor(targets[at : at + _LOGIT_ROWS], device=features.device)
            scored = chosen_logprobs(self.runner.logits(features[at : at + len(some)]), some).tolist()
            if not all(map(math.isfinite, scored)):
                scored = [value if math.isfinite(value) else math.nan for value in scored]
            job.prompt_logprobs.extend(scored)

    def _abort(self, chosen: Callable[[_Job], bool]) -> None:
        for job in [job for job in self._jobs.values() if chosen(job)]:
            self.aborted += 1
            self._finish(job, FINISH_ABORT, None)
        self._drop_released()

    def _finish(self, job: _Job, reason: str, stop_reason: int | str | None) -> None:
        self.scheduler.finish(job.sequence)
        cached = job.sequence.cached or 0
        self.finished += 1
        self.prompt_tokens += job.sequence.prompt_length
        self.cached_prompt_tokens += cached
        self._close(job)
        scores = job.prompt_logprobs if job.params.prompt_logprobs else None
        job.future.set_result(Answer(job.sampled, job.logprobs, job.versions, reason, stop_reason, cached, scores))

    def _fail(self, job: _Job, error: Exception) -> None:
        self.scheduler.finish(job.sequence)
        self._close(job)
        job.future.set_exception(error)

    def _close(self, job: _Job) -> None:
        del self._jobs[job.sequence.key]
        with self._wake:
            self._open -= 1

    def _drop_released(self) -> None:
        for key in self.scheduler.released:
            self.runner.release(key)
        self.scheduler.released.clear()

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self.failure = _sentence(error)
            # Requests still in the inbox become jobs, so that they are told as well; other actions have no one waiting
            # longer than their own timeout.
            pending = list(self._inbox)
            self._inbox.clear()
        for action in pending:
            try:
                action()
            except Exception:  # a scheduler in an unknown state may refuse; what matters is who gets told
                continue
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(EngineDead(self.failure))
        self._jobs.clear()
        if self._on_death is not None:
            self._on_death(self.failure)


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"the engine has stopped: {type(error).__name__}{': ' + text[0] if text else ''}"

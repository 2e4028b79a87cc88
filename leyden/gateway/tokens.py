"""The tokenizer of a model folder, as renderers want it, with a memory for long texts."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from leyden.errors import PreflightError

Ids = npt.NDArray[np.int32]

LONG_TEXT = 1000
"""Characters from which a text is remembered. Encoding takes a microsecond for four of them."""
SHORT_TEXT, SHORT_TEXTS = 32, 4096
"""Texts up to this length are remembered, so many of them: the markers that renderers and parsers encode every time."""
MEMORY_BYTES = 16 * 2**20


class IdsCache:
    """Token ids by key, the least recently used dropped when they and their keys outgrow `limit` bytes. Thread-safe."""

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[Ids, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(self, key: Hashable) -> Ids | None:
        with self._lock:
            found = self._held.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, ids: Ids, key_bytes: int) -> None:
        """Keep `ids`, which must not be changed afterwards."""
        size = ids.nbytes + key_bytes
        if size > self._limit:
            return
        with self._lock:
            old = self._held.pop(key, None)
            self._bytes += size - (old[1] if old else 0)
            self._held[key] = (ids, size)
            while self._bytes > self._limit:
                self._bytes -= self._held.popitem(last=False)[1][1]


class Codec:
    """Implements renderers.base.Tokenizer over a Hugging Face tokenizer; what it doesn't define is the tokenizer's own.

    It isn't callable on purpose: renderers then spare the work of saying which character each token came from.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.unk_token_id: int | None = tokenizer.unk_token_id  # Parsers ask for it at every answer.
        self.cache = IdsCache()
        self._short: dict[str, list[int]] = {}
        self._tokens: dict[str, Any] = {}
        self._backend = _exact_backend(tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if add_special_tokens:
            return self.tokenizer.encode(text)
        if len(text) <= SHORT_TEXT:
            short = self._short.get(text)
            if short is None:
                short = self._encode(text)
                if len(self._short) < SHORT_TEXTS:
                    self._short[text] = short
            return list(short)
        if len(text) < LONG_TEXT:
            return self._encode(text)
        known = self.cache.get(text)
        if known is not None:
            return known.tolist()
        ids = self._encode(text)
        self.cache.put(text, np.asarray(ids, np.int32), 2 * len(text))
        return ids

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """As the tokenizer does; single tokens, which parsers ask for at every answer, are remembered."""
        if not isinstance(tokens, str):
            return self.tokenizer.convert_tokens_to_ids(tokens)
        if tokens not in self._tokens:
            if len(self._tokens) >= SHORT_TEXTS:
                return self.tokenizer.convert_tokens_to_ids(tokens)
            self._tokens[tokens] = self.tokenizer.convert_tokens_to_ids(tokens)
        return self._tokens[tokens]

    def encode_parts(self, text: str, boundary: re.Pattern[str]) -> list[int]:
        """Encode piece by piece, where `boundary` matches special tokens: long pieces, such as a system prompt with
        its tools, are then remembered across conversations that go on differently."""
        ids: list[int] = []
        for piece in boundary.split(text):
            if piece:
                ids += self.encode(piece)
        return ids

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **more: Any) -> str:
        if self._backend is not None and not isinstance(token_ids, int) and not more:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **more)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be a whole character."""
        text = self.decode([token])
        if "\ufffd" not in text:
            return text.encode()
        written = self.tokenizer.convert_ids_to_tokens(token)
        single = _BYTE_TOKEN.fullmatch(written or "")
        if single is not None:
            return bytes([int(single[1], 16)])
        if written and all(c in _BYTE_OF for c in written):
            return bytes(_BYTE_OF[c] for c in written)
        return text.encode()

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            return _fast_ids(self._backend, text)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _bytes_by_character() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others as characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _bytes_by_character()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SAMPLE = "Hello  wörld 你好\n\n def f(x): 12345 🌍 \t{'a': 1} don't , it 's \u200d e\u0301 \ufffd"


def _exact_backend(tokenizer: Any) -> Any | None:
    """The tokenizer's Rust core, which takes half the time for short texts, where both say the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    for text in (_SAMPLE, f" {_SAMPLE}", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if _fast_ids(backend, text) != ids:
            return None
        if backend.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids, skip_special_tokens=False):
            return None
    return backend


def _fast_ids(backend: Any, text: str) -> list[int]:
    # Without saying which characters each token came from: a quarter less work.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def load_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer of a model folder; reads nothing but that folder.

    Raises:
        PreflightError: with one sentence.
    """
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise PreflightError(f"the model folder {folder} holds no tokenizer (tokenizer.json); is the path right?")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True)
    except Exception as e:  # transformers raises many kinds; to the person starting the gateway they are one.
        raise PreflightError(f"can't load the tokenizer of {folder}: {' '.join(str(e).split())}") from e
    tokenizer.model_max_length = int(1e30)  # Prompts are measured against the engine's limit, with an error of our own.
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer takes 0.5 s to load; for a plain tokenizer.json, the class that it would give is used at once."""
    try:
        declared = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        declared = {}
    plain = declared.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    if plain and "auto_map" not in declared and (folder / "tokenizer.json").is_file():
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer

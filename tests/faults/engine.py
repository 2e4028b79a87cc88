"""`python -m tests.faults.engine MODEL_FOLDER LOG READY`: an engine process whose every answer is unlike any other.

Each answer is written to LOG (a JSON line: text, prompt ids, response ids) before it is given, to compare with later.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.gateway.scripted_engine import Reply, ScriptedEngine


class RecordingEngine(ScriptedEngine):
    def __init__(self, tokenizer: Any, log: Path) -> None:
        super().__init__(tokenizer)
        self._log = log.open("a", buffering=1)
        self._random = random.Random(0)

    @property
    def default(self) -> Reply:
        return Reply(f"answer {self._random.getrandbits(64):x}", delay=self._random.choice([0, 0.01, 0.05, 0.2]))

    @default.setter
    def default(self, value: Reply) -> None:
        """Answers are made as they are needed."""

    def _answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        self.requests.clear()
        self.headers.clear()
        answer = super()._answer(body, reply)
        line = {"text": reply.text, "prompt": body["prompt"], "ids": answer["choices"][0]["token_ids"]}
        self._log.write(json.dumps(line) + "\n")
        return answer


class _Tokenizer:
    """The part of a tokenizer that an engine needs."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


async def main(folder: Path, log: Path, ready: Path) -> None:
    engine = RecordingEngine(_Tokenizer(folder), log)
    await engine.start()
    await asyncio.to_thread(ready.write_text, engine.endpoint)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:4])))

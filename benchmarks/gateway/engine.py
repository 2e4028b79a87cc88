"""A fake engine that costs next to nothing: `python -m benchmarks.gateway.engine TOKENS HOLD_SECONDS`.

Answers completions (token ids in) and chat completions (as vLLM does, prompt ids of the same length out) with the same
TOKENS sampled ids and their log-probs. Prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

from benchmarks.gateway.http import Message

PROMPT = 500


def canned(tokens: int) -> tuple[bytes, bytes]:
    """The bodies for completions and chat; {P} and {T} stand for the prompt's tokens and all tokens."""
    ids = [1000 + i for i in range(tokens)]
    values = [-0.5 - i / 1000 for i in range(tokens)]
    usage = {"prompt_tokens": "{P}", "completion_tokens": tokens, "total_tokens": "{T}"}
    choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": {"token_logprobs": values}}
    text = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    content = [{"token": "x", "logprob": v, "bytes": [120], "top_logprobs": []} for v in values]
    message = {"role": "assistant", "content": "x" * 4 * tokens}
    spoken = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": PROMPT, "completion_tokens": tokens, "total_tokens": PROMPT + tokens}
    chat = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [spoken]}
    chat |= {"usage": usage, "prompt_token_ids": list(range(PROMPT))}
    return json.dumps(text).encode(), json.dumps(chat).encode()


class Engine(asyncio.Protocol):
    def __init__(self, answers: tuple[bytes, bytes], tokens: int, hold: float) -> None:
        self._text, self._chat = answers
        self._tokens, self._hold = tokens, hold
        self._message = Message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        whole = self._message.feed(data)
        if whole is None:
            return
        head, body = whole
        if b"/chat/completions" in head.split(b"\r\n", 1)[0]:
            answer = self._chat
        else:
            start = body.find(b'"prompt":[')
            count = body.count(b",", start, body.find(b"]", start)) + 1
            answer = self._text.replace(b'"{P}"', b"%d" % count).replace(b'"{T}"', b"%d" % (count + self._tokens))
        if self._hold:
            asyncio.get_running_loop().call_later(self._hold, self._send, answer)
        else:
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
        self._transport.write(head + answer)


async def main(tokens: int, hold: float) -> None:
    answers = canned(tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(answers, tokens, hold), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))

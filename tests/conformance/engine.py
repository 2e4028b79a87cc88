"""An engine that plays a model: it reads the decoded prompt, decides which turn it is, and answers in real token ids.

Turn 1 is text and one tool call, turn 2 two calls at once, turn 3 the end. What it writes is awkward on purpose:
blanks at the end, odd spacing and escapes in arguments, reasoning, characters of several bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from aiohttp import web

END = "<|im_end|>"
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_SHELLS = (
    "Bash",
    "bash",
    "exec_command",
    "shell",
    "shell_command",
    "run_shell_command",
    "exec",
    "terminal",
    "execute_bash",
    "calculate",
    "add",
)
_ENDINGS = ("final_answer", "finish")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class PlayedModel:
    """Serves the completions API on a free port of loopback.

    `seen` counts calls; `answered` counts those whose prompt ends with the right results of turn 2's tool calls.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self.context = context
        self.seen = 0
        self.answered = 0
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> PlayedModel:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen += 1
        prompt = self._tokenizer.decode(body["prompt"], skip_special_tokens=False)
        self.answered += results_came_back(prompt)
        ids = self._tokenizer.encode(answer(prompt) + END, add_special_tokens=False)[: body.get("max_tokens")]
        whole = ids[-1] == self._tokenizer.convert_tokens_to_ids(END)
        # Log-probs of the distribution at the temperature asked for, which is what the gateway's probe looks for.
        top = {"a": -0.25, "b": -0.25 - 2 / (body.get("temperature") or 1)}
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if whole else "length",
            "token_ids": ids,
            "logprobs": {
                "token_logprobs": [-0.25 - i / 1000 for i in range(len(ids))],
                "top_logprobs": [top] * len(ids),
            },
            "token_versions": [self.seen % 3] * len(ids),
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return web.json_response({"choices": [choice], "usage": usage, "weight_version": 0})


def answer(prompt: str) -> str:
    """What the model says to this prompt."""
    tools = _tools(prompt)
    turn = prompt.count("<|im_start|>assistant") - 1
    if not tools:
        return "<think>\na title\n</think>\n\nAdding numbers"
    chosen = next((tools[name] for name in _SHELLS if name in tools), None) or next(iter(tools.values()))
    if turn == 0:
        return f"<think>\nFirst é one.\n</think>\n\nLet me look. 你🌍  \n{_call(chosen, 1)}"
    if turn == 1:
        return f"<think>\nNow two.\n</think>\n\n{_call(chosen, 2)}\n{_call(chosen, 3)}"
    ending = next((tools[name] for name in _ENDINGS if name in tools), None)
    if ending is not None:
        return f"<think>\nDone.\n</think>\n\n{_call(ending, turn + 2)}"
    if SUBMIT in prompt:
        return f"<think>\nDone.\n</think>\n\n{_call(chosen, turn + 2, SUBMIT)}"
    return "<think>\nThat is all.\n</think>\n\nIt worked: naïve 你🌍.  "


def results_came_back(prompt: str) -> bool:
    """Whether what follows the newest assistant turn is what the tools give for turn 2's two calls."""
    *_, newest, _ = ["", *prompt.split("<|im_start|>assistant")]
    results = newest.partition(END)[2].replace(END, "\n")
    # A shell's results aren't in its commands, so an error that quotes the command doesn't pass for one.
    echoed = all(re.search(rf"\b{n} (é|\\u00e9)", results) for n in (4, 6))
    return echoed or all(re.search(rf"^{n}$", results, re.MULTILINE) for n in (4, 6))


def _tools(prompt: str) -> dict[str, dict[str, Any]]:
    found = _TOOLS.search(prompt)
    out: dict[str, dict[str, Any]] = {}
    for line in found.group(1).splitlines() if found else ():
        function = json.loads(line)["function"]
        out[function["name"]] = function
    return out


def _call(function: dict[str, Any], number: int, command: str | None = None) -> str:
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    given = {name: _value(name, properties.get(name) or {}, number, command) for name in required}
    # Spaces around colons and escaped characters: valid, and not how any library would write it.
    text = json.dumps(given, ensure_ascii=True, separators=(" ,  ", " :  "))
    return f'<tool_call>\n{{"name" : {json.dumps(function["name"])},   "arguments": {text}}}\n</tool_call>'


def _value(name: str, schema: dict[str, Any], number: int, command: str | None) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return number
    if kind == "boolean":
        return False
    if kind == "array":
        return ["bash", "-lc", command or f"expr {number} + {number} | sed 's|$| é|'"]
    if kind == "object":
        return {}
    if name in ("command", "cmd", "code"):
        return command or f"expr {number} + {number} | sed 's|$| é|'"
    return f"{number}+{number}" if name == "expression" else f"step {number} é"

"""Calls the hooks of a user's file, in a process of its own: `python hook_process.py FILE`.

A script, so that the user's code gets nothing of Leyden's. One JSON object a line comes in (`hook`, `args`),
one goes out (`result` or `error`). First goes out which hooks there are. What hooks print goes to standard error.
"""

import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

NAMES = ("on_enqueue", "on_succeeded", "on_failed")


def load(path: str) -> dict[str, Callable[..., Any]]:
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    spec = importlib.util.spec_from_file_location("leyden_user_hooks", path)
    assert spec is not None and spec.loader is not None, f"{path} isn't a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in NAMES if callable(getattr(module, name, None))}


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        result = work()
        if inspect.isawaitable(result):
            import asyncio

            async def finish() -> Any:
                return await result

            result = asyncio.run(finish())
        json.dumps(result)
    except BaseException as e:
        traceback.print_exc()
        return {"error": f"{type(e).__name__}: {e}"}
    return {"result": result}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, hooks = sys.argv[1], {}

    def start() -> list[str]:
        hooks.update(load(path))
        return sorted(hooks)

    answer = attempt(start)
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        call = json.loads(line)
        answer = attempt(lambda call=call: hooks[call["hook"]](*call["args"]))


if __name__ == "__main__":
    main()

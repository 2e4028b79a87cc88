"""Runs a grader that is a function: `python run_function.py FOLDER module:function`.

Executed as a script, so that the grader's interpreter imports nothing of Leyden. FOLDER takes the place of this file's
folder on the import path. The function, plain or async, is given those of these that its parameters name:

    task        the task row
    workspace   pathlib.Path of the folder that the agent worked in, which is the current one too
    log         what the agent printed, as far as it was kept
    exit_code   the agent's; -n for signal n

It returns the reward: a number, or a mapping with a number under `reward` and whatever else is to be kept with it. None
means that it posted its reward itself.
"""

import sys


def main() -> int:
    sys.path[0] = sys.argv[1]
    path = sys.argv[2]
    del sys.argv[1:]

    import asyncio
    import importlib
    import inspect
    import json
    import os
    from collections.abc import Awaitable, Mapping
    from pathlib import Path
    from typing import Any

    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    given = {
        "task": lambda: json.loads(Path(os.environ["LEYDEN_TASK_FILE"]).read_bytes()),
        "workspace": Path.cwd,
        "log": lambda: Path(os.environ["LEYDEN_AGENT_LOG"]).read_text("utf-8", "replace"),
        "exit_code": lambda: int(os.environ["LEYDEN_AGENT_EXIT_CODE"]),
    }
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name for p in parameters}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        wanted |= given.keys()
    result: Any = function(**{name: value() for name, value in given.items() if name in wanted})
    if inspect.isawaitable(result):

        async def finish(later: Awaitable[Any]) -> Any:
            return await later

        result = asyncio.run(finish(result))
    if result is None:
        return 0
    said: dict[str, Any] = dict(result) if isinstance(result, Mapping) else {"reward": result}
    reward: Any = said.get("reward")
    # What NumPy and PyTorch call numbers are ones too. A text or a yes isn't.
    if isinstance(reward, bool | str | bytes) or not hasattr(reward, "__float__"):
        raise TypeError(f"{path} gave {reward!r} as the reward, which isn't a number")
    said["reward"] = float(reward)
    sys.stdout.flush()
    print(json.dumps(said, default=repr))
    return 0


if __name__ == "__main__":
    sys.exit(main())

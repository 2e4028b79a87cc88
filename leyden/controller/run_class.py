"""Runs an Agent Lightning agent class: `python run_class.py FOLDER module:Class`.

Executed as a script, so that the agent's interpreter imports nothing of Leyden. The class is called without arguments
and its `run()`, plain or async, is the agent. FOLDER takes the place of this file's folder on the import path.
"""

import sys


def main() -> int:
    sys.path[0] = sys.argv[1]
    path = sys.argv[2]
    del sys.argv[1:]

    import asyncio
    import importlib
    import inspect
    import traceback

    try:
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        loaded = getattr(importlib.import_module(module), name)
        if not isinstance(loaded, type):
            raise TypeError(f"{path} is not a class")
        result = loaded().run()  # pyright: ignore[reportAttributeAccessIssue]

        async def finish() -> None:
            await result

        if inspect.isawaitable(result):
            asyncio.run(finish())
        return 0
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""A client that costs next to nothing: `python -m benchmarks.gateway.load HOST PORT CONNECTIONS < requests`.

Reads JSON lines of {"rollout": [request, …]} (latin-1 text, ready to be written to the socket). Each connection takes a
rollout, makes its calls one after another, then takes the next. Prints {"calls", "failed", "seconds", "latencies"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque

import uvloop

from benchmarks.gateway.http import Connection


async def main(host: str, port: int, connections: int) -> None:
    rollouts = deque([[r.encode("latin-1") for r in json.loads(line)["rollout"]] for line in sys.stdin])
    latencies: list[float] = []
    failed = 0
    loop = asyncio.get_running_loop()
    made = [(await loop.create_connection(Connection, host, port))[1] for _ in range(connections)]

    async def work(connection: Connection) -> None:
        nonlocal failed
        while rollouts:
            for request in rollouts.popleft():
                begun = time.perf_counter()
                status, _ = await asyncio.wait_for(connection.ask(request), 240)
                latencies.append(time.perf_counter() - begun)
                failed += status != 200

    begun = time.perf_counter()
    await asyncio.gather(*(work(c) for c in made))
    seconds = time.perf_counter() - begun
    print(json.dumps({"calls": len(latencies), "failed": failed, "seconds": seconds, "latencies": latencies}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

"""A parent for the controller that outlives it, so that no agent does.

The kernel kills an agent's first process when its controller dies, but not what that process forked. The guard is a
subreaper above the controller: when the controller is gone, for whatever reason, everything that it left becomes the
guard's child and is ended. When the guard is killed instead, the controller is told with SIGTERM and stops by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from leyden.controller.cgroups import own_groups, remove_groups
from leyden.controller.processes import become_subreaper, descendants, die_with_parent, kill, reap

_GIVE_UP_SECONDS = 5.0


def guarded(body: Callable[[], int]) -> int:
    """Run `body` in a child process and return its exit code (128 + n for signal n), leaving none of its descendants.

    Call it before any thread or event loop exists. SIGTERM and SIGINT are passed on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    become_subreaper()
    me = os.getpid()
    passed_on = (signal.SIGTERM, signal.SIGINT)
    # Blocked until both sides have their handlers, so that none is lost or taken by the wrong side.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        die_with_parent(me, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os._exit(_run(body))
    handlers = {s: signal.signal(s, lambda signum, _: kill(child, signum)) for s in passed_on}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        _, status = os.waitpid(child, 0)
        _end_descendants()
        remove_groups(own_groups(), child)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run(body: Callable[[], int]) -> int:
    try:
        code = body()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _end_descendants() -> None:
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    empty = 0
    while empty < 2 and time.monotonic() < deadline:
        below = descendants(os.getpid())
        for pid in below:
            kill(pid, signal.SIGKILL)
        for pid in below:
            reap(pid)
        empty = 0 if below else empty + 1
        if below:
            time.sleep(0.005)

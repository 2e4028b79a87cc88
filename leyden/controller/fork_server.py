"""A Python process that has imported what agents need, and forks into them: `python fork_server.py CHANNEL MODULE…`.

A script, run by the agents' interpreter. CHANNEL is the number of a Unix socket (packets) to the controller. First
this process says `ok`, or why it may not be forked. Then, for each packet with an agent's standard output, standard
error and a file that says what it is to be, it forks twice and tells the agent's process id. When the controller knows
the agent, it says so, and the process in between ends: that makes the agent the controller's own child, as if it had
started it.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ADOPTED_WITHIN = 10.0
"""Seconds."""

OK = "ok"

libc = ctypes.CDLL(None, use_errno=True)


def unsafe() -> "str | None":
    """Why a fork of this process wouldn't be a good one."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the preloaded modules left {threads - 1} threads running, which a fork loses"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preloaded modules initialised CUDA, which doesn't survive a fork"
    with open(f"/proc/self/task/{os.getpid()}/children") as below:
        if below.read().split():
            return "the preloaded modules started processes"
    return None


def preload(modules: "list[str]") -> "str | None":
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as e:
            return f"can't import {name}: {type(e).__name__}: {e}"
    return unsafe()


def serve(channel: socket.socket) -> "dict[str, Any] | None":
    """Fork agents. Returns in each of them, with what it was asked to be; None when the controller has gone."""
    controller = os.getppid()
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 16, 3)
        if not message:
            return None
        told, tell = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(go)
            agent = os.fork()
            if agent == 0:
                os.setsid()
                os.write(tell, b"%d" % os.getpid())
                for fd in (told, tell, wait, channel.detach()):
                    os.close(fd)
                return become_agent(controller, *fds)
            if os.read(wait, 1) != b"1":
                os.kill(agent, signal.SIGKILL)
            os._exit(0)
        channel.send(os.read(told, 32))
        # Without the word that the controller knows the agent, the one in between ends it.
        if channel.recv(16):
            os.write(go, b"1")
        for fd in (*fds, told, tell, wait, go):
            os.close(fd)
        os.waitpid(between, 0)


def become_agent(controller: int, stdout: int, stderr: int, wanted_fd: int) -> "dict[str, Any]":
    """In a new agent: wait to be the controller's child, then be what `wanted_fd` says."""
    deadline = time.monotonic() + ADOPTED_WITHIN
    while os.getppid() != controller:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != controller:
        os._exit(1)
    # Read here and not in the server, whose memory every later agent inherits: it holds this one's keys.
    with os.fdopen(wanted_fd, "rb") as file:
        file.seek(0)
        wanted: dict[str, Any] = json.loads(file.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, place)
    for fd in {nothing, stdout, stderr}:
        os.close(fd)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    # Forks that draw the same numbers would be the same agent. `random` sees to itself.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
    return wanted


def run(wanted: "dict[str, Any]") -> None:
    """Be the program, as the interpreter would have been with this command line."""
    kind, what = wanted["kind"], wanted["what"]
    sys.argv[:] = wanted["argv"]
    importlib.invalidate_caches()
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        # Underscored, but what `python -m` itself calls.
        runpy._run_module_as_main(what)  # pyright: ignore[reportAttributeAccessIssue]
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "file":
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
        main.__file__ = what
        try:
            with open(what, "rb") as file:
                source = file.read()
        except OSError as e:
            print(f"{sys.executable}: can't open file {what!r}: [Errno {e.errno}] {e.strerror}", file=sys.stderr)
            sys.exit(2)
    else:
        sys.path.insert(0, "")
        what, source = "<string>", what
    sys.modules["__main__"] = main
    exec(compile(source, what, "exec", dont_inherit=True), main.__dict__)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    del sys.path[0]
    why = preload(sys.argv[2:])
    channel.send((why or OK)[:1000].encode())
    if why is not None:
        return
    gc.collect()
    gc.freeze()
    wanted = serve(channel)
    if wanted is None:
        return
    try:
        run(wanted)
    except SystemExit:
        raise
    except BaseException as e:
        # Without the lines of this file.
        trace = e.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(e), e.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main()

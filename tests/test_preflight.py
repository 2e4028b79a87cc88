"""Checks before a run: each fault is one sentence that names the thing and the fix."""

import json
import socket
import struct
from pathlib import Path

import pytest

from leyden import preflight
from leyden.config import RunConfig
from leyden.errors import PreflightError
from leyden.models import resolve_model


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps({k: {"dtype": "F32", "shape": v, "data_offsets": [0, 0]} for k, v in shapes.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def config(**training: object) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "t", "model": "m", "agent": {"command": "true"}, "data": {"train": "x"}, "training": training}
    )


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    safetensors(tmp_path / "model-1.safetensors", {"a": [2, 3], "b": [4]})
    safetensors(tmp_path / "model-2.safetensors", {"c": []})
    assert preflight.count_parameters(tmp_path) == 11


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"nope"])
def test_broken_weights_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PreflightError, match=r"model\.safetensors isn't a readable safetensors file"):
        preflight.count_parameters(tmp_path)


def test_port_in_use_is_named() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"gateway can't listen on 127.0.0.1:{port}.*gateway\.port="):
            preflight.pick_port("127.0.0.1", port, "gateway")
    assert preflight.pick_port("127.0.0.1", 0, "gateway") > 0


def test_too_little_memory_says_how_much_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: 4_000_000_000)
    with pytest.raises(PreflightError, match=r"1000 M parameters.*needs about 25\.5 GB.*4\.0 GB is free.*LoRA"):
        preflight.check_memory(config(), 1_000_000_000)
    preflight.check_memory(config(), 50_000_000)


def test_too_little_disk_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("U", (), {"free": 1_000_000_000})())
    with pytest.raises(PreflightError, match=r"has 1\.0 GB for this run, its checkpoints need 4\.5 GB"):
        preflight.check_output(tmp_path, 100_000_000, 2)


def test_unwritable_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="can't write the run's folder"):
        preflight.check_output(tmp_path / "file" / "run", 1, 1)


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PreflightError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("smollm2-135m")
    with pytest.raises(PreflightError, match="no such folder"):
        resolve_model("./nowhere")
    with pytest.raises(PreflightError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PreflightError, match="has no tokenizer files"):
        resolve_model(str(tmp_path))
    with pytest.raises(PreflightError, match="'no-one/nothing' isn't in the local Hugging Face cache"):
        resolve_model("no-one/nothing")

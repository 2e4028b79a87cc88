"""The base install: gateway, controller and client work without torch, and nothing that they need pulls it in."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

from packaging.requirements import Requirement

WITHOUT_TORCH = """
import sys
for name in ("torch", "peft", "safetensors", "gguf", "matplotlib", "tensorboard"):
    sys.modules[name] = None
import leyden.client, leyden.cli, leyden.controller.main, leyden.gateway.app, leyden.preflight, leyden.supervisor
from leyden.gateway.renderer import ModelRenderer
"""


def closure(name: str) -> set[str]:
    """Distributions that installing `name` without extras brings, as far as they are installed here."""
    found: set[str] = set()
    todo = [name]
    while todo:
        current = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if current in found:
            continue
        found.add(current)
        try:
            requires = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in requires:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def test_base_install_does_not_pull_torch() -> None:
    needed = closure("leyden")
    assert {"fastapi", "renderers", "transformers"} <= needed
    assert not needed & {"torch", "peft", "gguf", "matplotlib", "tensorboard", "triton"}


def test_gateway_controller_and_client_import_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

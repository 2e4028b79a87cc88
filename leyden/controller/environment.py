"""The environment of agents and graders, as docs/wire.md lists it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_OURS = ("LEYDEN_", "AGL_", "OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_GEMINI_", "GOOGLE_GENAI_")
_SECRET = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})


def inherited(parent: Mapping[str, str], gateway_url: str) -> dict[str, str]:
    """The controller's own environment without what an agent must not see: keys, and settings of other model services.

    PATH starts with the folder of the interpreter that runs Leyden, so that `python` is that one. With a proxy in the
    environment, the gateway's host is exempt from it.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if not name.upper().startswith(_OURS) and not name.upper().endswith(_SECRET)
    }
    here = str(Path(sys.executable).parent)
    path = kept.get("PATH", os.defpath)
    kept["PATH"] = path if path.split(os.pathsep)[0] == here else f"{here}{os.pathsep}{path}"
    host = urlsplit(gateway_url).hostname
    if host and any(name.upper() in _PROXIES for name in kept):
        exempt = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), host]))
        kept |= {"NO_PROXY": exempt, "no_proxy": exempt}
    return kept


def event_url(gateway_url: str, rollout_id: str, attempt_id: str) -> str:
    return f"{gateway_url}/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"


def agent_environment(
    gateway_url: str, rollout_id: str, attempt_id: str, key: str, model: str | None
) -> dict[str, str]:
    """What an agent is told. Base URLs need nothing but the key, which names rollout and attempt."""
    events = event_url(gateway_url, rollout_id, attempt_id)
    told = {
        "OPENAI_BASE_URL": f"{gateway_url}/openai/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": f"{gateway_url}/anthropic",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "GOOGLE_GEMINI_BASE_URL": f"{gateway_url}/gemini",
        "GEMINI_API_KEY": key,
        "LEYDEN_ROLLOUT_ID": rollout_id,
        "LEYDEN_ATTEMPT_ID": attempt_id,
        "LEYDEN_EVENT_URL": events,
        "LEYDEN_KEY": key,
        "AGL_OPENAI_BASE_URL": f"{gateway_url}/openai/v1",
        "AGL_EVENT_URL": events,
        "AGL_KEY": key,
    }
    if model is not None:
        told["LEYDEN_MODEL"] = model
    return told


def grader_environment(
    gateway_url: str, rollout_id: str, attempt_id: str, key: str, task_file: Path, agent_log: Path, exit_code: int
) -> dict[str, str]:
    return {
        "LEYDEN_ROLLOUT_ID": rollout_id,
        "LEYDEN_ATTEMPT_ID": attempt_id,
        "LEYDEN_EVENT_URL": event_url(gateway_url, rollout_id, attempt_id),
        "LEYDEN_KEY": key,
        "LEYDEN_TASK_FILE": str(task_file),
        "LEYDEN_AGENT_LOG": str(agent_log),
        "LEYDEN_AGENT_EXIT_CODE": str(exit_code),
    }


def markers(rollout_id: str, attempt_id: str) -> frozenset[bytes]:
    """Entries of the environment by which a process is known to belong to an attempt."""
    return frozenset({f"LEYDEN_ROLLOUT_ID={rollout_id}".encode(), f"LEYDEN_ATTEMPT_ID={attempt_id}".encode()})

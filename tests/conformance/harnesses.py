"""What `make conformance` runs: how each harness is installed, started and judged."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.install import Npm, Python

DRIVERS = Path(__file__).parent / "drivers"
CONTEXT = 131072
TASK = "Use the tools to answer: first one call, then two calls at once, then say what you found."
MODEL = "rl-model"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run happens: its key, the gateway's address, a home and a working directory of its own."""

    gateway: str
    key: str
    home: Path
    work: Path
    installed: Path

    @property
    def openai(self) -> str:
        return f"{self.gateway}/openai/v1"

    @property
    def anthropic(self) -> str:
        return f"{self.gateway}/anthropic"

    @property
    def gemini(self) -> str:
        return f"{self.gateway}/gemini"


@dataclass(frozen=True, slots=True)
class Start:
    """A command and what it needs in its environment."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """`rows` is how many rows a run of it makes in `bridge` mode; more than one needs a reason."""

    name: str
    install: str
    start: Callable[[Place], Start]
    light: bool = False
    heavy: bool = False
    rows: int = 1
    reason: str = ""
    calls: int = 3
    """Calls of the agent itself; title calls come on top."""
    seconds: float = 180


INSTALLS: dict[str, Npm | Python] = {
    "claude-code": Npm(("@anthropic-ai/claude-code@2.1.332",), ("claude", "--version")),
    "codex": Npm(("@openai/codex@0.171.0",), ("codex", "--version")),
    "opencode": Npm(("opencode-ai@1.18.33",), ("opencode", "--version")),
    "agents-sdk": Python(("openai-agents==0.24.0",), ("python", "-c", "import agents")),
    "autogen": Python(
        ("autogen-agentchat==0.7.5", "autogen-ext[openai,mcp]==0.7.5", "mcp-server-calculator==0.2.1", "mcp<2"),
        ("python", "-c", "import autogen_ext.tools.mcp, mcp_server_calculator"),
    ),
    "langgraph": Python(
        ("langgraph==1.2.24", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
        ("python", "-c", "import langgraph, langchain_openai, langchain_anthropic"),
    ),
    "mini-swe-agent": Python(
        tuple(
            "litellm==1.110.2 typer rich jinja2 pyyaml python-dotenv platformdirs prompt_toolkit tenacity requests"
            " textual".split()
        ),
        ("mini", "--help"),
        bare=("mini-swe-agent==2.4.6",),
    ),
    "smolagents": Python(("smolagents[openai]==1.26.0",), ("python", "-c", "import smolagents")),
    "ai-sdk": Npm(
        (
            "ai@7.0.173",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/anthropic@4.0.105",
            "zod@4",
        )
    ),
    "gemini-cli": Npm(("@google/gemini-cli@0.61.0",), ("gemini", "--version")),
    "google-genai": Python(("google-genai==3.6.1",), ("python", "-c", "from google import genai")),
    "openhands": Python(
        ("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
        ("python", "-c", "import openhands.sdk, openhands.tools"),
        version="3.12",
    ),
    "openclaw": Npm(("openclaw@2026.9.2",), ("openclaw", "--version")),
    "hermes": Python(("hermes-agent==0.19.0",), ("hermes", "--version")),
}


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _driver(name: str, *arguments: str) -> Callable[[Place], Start]:
    """A program of ours around an SDK: the few lines that its users write themselves."""

    def start(place: Place) -> Start:
        env = {"BASE_URL": place.openai, "ANTHROPIC_BASE": place.anthropic, "KEY": place.key, "TASK": TASK}
        env |= {"GEMINI_BASE": place.gemini, "OPENAI_BASE_URL": place.openai, "OPENAI_API_KEY": place.key}
        quiet = {
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LANGSMITH_TRACING": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        script = DRIVERS / name
        if script.suffix == ".mjs":
            # Node looks for packages beside the script.
            script = _write(place.installed / name, script.read_text())
        program = "node" if script.suffix == ".mjs" else "python"
        return Start([program, str(script), *arguments], env | quiet | {"DO_NOT_TRACK": "1"})

    return start


def _claude_code(place: Place) -> Start:
    env = {
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": place.anthropic,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    return Start(["claude", "-p", TASK, "--dangerously-skip-permissions"], env)


def _codex(place: Place) -> Start:
    home = place.home / "codex"
    _write(
        home / "config.toml",
        f'model = "{MODEL}"\nmodel_provider = "gw"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f"check_for_update_on_startup = false\nmodel_context_window = {CONTEXT}\n"
        f"model_auto_compact_token_limit = {CONTEXT - 8192}\n[analytics]\nenabled = false\n"
        f'[model_providers.gw]\nname = "gw"\nbase_url = "{place.openai}"\nenv_key = "GW_KEY"\nwire_api = "responses"\n',
    )
    return Start(["codex", "exec", "--skip-git-repo-check", TASK], {"CODEX_HOME": str(home), "GW_KEY": place.key})


def _opencode(place: Place) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": place.openai, "apiKey": place.key},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}, "tool_call": True}},
    }
    config = {"autoupdate": False, "share": "disabled", "model": f"gw/{MODEL}", "provider": {"gw": provider}}
    path = _write(place.home / "oc.json", json.dumps(config))
    off = {f"OPENCODE_DISABLE_{w}": "1" for w in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")}
    return Start(["opencode", "run", TASK], {"OPENCODE_CONFIG": str(path), **off})


def _mini(place: Place) -> Start:
    env = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": place.key,
        "OPENAI_BASE_URL": place.openai,
        "OPENAI_API_BASE": place.openai,
    }
    command = ["mini", "-m", f"openai/{MODEL}", "-t", TASK, "-y", "--exit-immediately", "-o", "trajectory.json"]
    return Start(command, env)


def _openclaw(place: Place) -> Start:
    model = {
        "id": MODEL,
        "name": "rl",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": CONTEXT,
        "maxTokens": 4096,
    }
    gw = {"baseUrl": place.openai, "apiKey": place.key, "api": "openai-completions", "models": [model]}
    defaults = {"model": {"primary": f"gw/{MODEL}"}, "workspace": str(place.work), "skipBootstrap": True}
    config = {"models": {"mode": "merge", "providers": {"gw": gw}}, "agents": {"defaults": defaults}}
    state = place.home / "openclaw"
    _write(state / "openclaw.json", json.dumps(config))
    command = ["openclaw", "agent", "--local", "--session-id", "s1", "--message", TASK, "--json"]
    return Start(command, {"OPENCLAW_STATE_DIR": str(state)})


def _hermes(place: Place) -> Start:
    home = place.home / "hermes"
    model = {"default": MODEL, "provider": "custom", "base_url": place.openai, "api_key": place.key}
    _write(home / "config.yaml", json.dumps({"model": {**model, "context_length": CONTEXT}}))
    return Start(["hermes", "chat", "-Q", "--yolo", "-q", TASK], {"HERMES_HOME": str(home), "HERMES_ACCEPT_HOOKS": "1"})


def _gemini_cli(place: Place) -> Start:
    settings = {
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
    }
    _write(place.home / ".gemini" / "settings.json", json.dumps(settings))
    env = {"GOOGLE_GEMINI_BASE_URL": place.gemini, "GEMINI_API_KEY": place.key, "GEMINI_CLI_TRUST_WORKSPACE": "true"}
    return Start(["gemini", "--yolo", "-m", MODEL, "-p", TASK], env)


HARNESSES: list[Harness] = [
    Harness(name="Claude Code", install="claude-code", start=_claude_code, light=True),
    Harness(name="Codex", install="codex", start=_codex, light=True),
    Harness(name="OpenCode", install="opencode", start=_opencode, light=True),
    Harness(
        name="OpenAI Agents SDK (Responses)",
        install="agents-sdk",
        start=_driver("agents_sdk.py", "responses"),
        light=True,
    ),
    Harness(
        name="OpenAI Agents SDK (previous id)",
        install="agents-sdk",
        start=_driver("agents_sdk.py", "previous"),
        light=True,
    ),
    Harness(name="OpenAI Agents SDK (chat)", install="agents-sdk", start=_driver("agents_sdk.py", "chat"), light=True),
    Harness(name="AutoGen + MCP", install="autogen", start=_driver("autogen_mcp.py"), light=True),
    Harness(name="LangGraph (chat)", install="langgraph", start=_driver("langgraph_agent.py", "chat"), light=True),
    Harness(
        name="LangGraph (Responses)", install="langgraph", start=_driver("langgraph_agent.py", "responses"), light=True
    ),
    Harness(
        name="LangGraph (Anthropic)", install="langgraph", start=_driver("langgraph_agent.py", "anthropic"), light=True
    ),
    Harness(name="mini-swe-agent", install="mini-swe-agent", start=_mini),
    Harness(
        name="smolagents",
        install="smolagents",
        start=_driver("smol.py"),
        rows=3,
        reason="it writes its own turns anew, as text",
    ),
    Harness(name="Vercel AI SDK (chat)", install="ai-sdk", start=_driver("ai_sdk.mjs", "chat")),
    Harness(name="Vercel AI SDK (Responses)", install="ai-sdk", start=_driver("ai_sdk.mjs", "responses")),
    Harness(name="Vercel AI SDK (Anthropic)", install="ai-sdk", start=_driver("ai_sdk.mjs", "anthropic")),
    Harness(name="Gemini CLI", install="gemini-cli", start=_gemini_cli, heavy=True),
    Harness(name="Google Gen AI SDK", install="google-genai", start=_driver("google_genai.py", "plain")),
    Harness(name="Google Gen AI SDK (stream)", install="google-genai", start=_driver("google_genai.py", "stream")),
    Harness(name="OpenHands SDK", install="openhands", start=_driver("openhands_sdk.py"), heavy=True),
    Harness(name="OpenClaw", install="openclaw", start=_openclaw, heavy=True),
    Harness(name="Hermes", install="hermes", start=_hermes, heavy=True),
]


def shown(start: Start) -> str:
    """The command as a person would type it, without keys."""
    return shlex.join(os.path.basename(start.command[0]) if i == 0 else w for i, w in enumerate(start.command))

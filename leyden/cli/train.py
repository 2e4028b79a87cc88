"""`leyden train`: gateway, engine, controller and trainer under one supervisor; and the trainer process itself."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Annotated

import aiohttp
import orjson
import typer
from rich.console import Console

from leyden import preflight
from leyden.client import LeydenClient
from leyden.config import RunConfig, dump_run, load_run
from leyden.errors import ConfigError, GatewayError, PreflightError, RunError
from leyden.models import resolve_model
from leyden.supervisor import Supervisor

_READY_SECONDS = 180
_KEPT = "everything recorded so far is kept: the same command with --resume goes on"


def train(
    run_file: Annotated[Path, typer.Argument(help="the run file (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="settings, such as training.steps=20")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on at the last finished step")] = False,
    gateway: Annotated[
        str | None,
        typer.Option(help="use this gateway and its controllers instead of starting them; key in LEYDEN_ADMIN_KEY"),
    ] = None,
) -> None:
    """Train: starts everything the run needs on this machine, or attaches to a gateway."""
    config = load_run(run_file, overrides)
    run_dir = Path(config.output_dir or Path("runs") / config.name).resolve()
    console = Console(stderr=True, soft_wrap=True)
    model = check(config, run_dir, run_file.resolve().parent, resume=resume, remote=gateway is not None)
    with _locked(run_dir):
        text = dump_run(config)
        (run_dir / "run.yaml").write_text(text)
        console.print(f"[dim]{text}[/dim]", highlight=False)
        try:
            asyncio.run(_supervise(config, run_dir, run_file.resolve().parent, model, resume=resume, gateway=gateway))
        except RunError as e:
            raise RunError(f"{e}\n{_KEPT}") from e
        except KeyboardInterrupt:
            print(f"interrupted; {_KEPT}", file=sys.stderr)
            raise typer.Exit(130) from None


def check(config: RunConfig, run_dir: Path, base_dir: Path, *, resume: bool, remote: bool) -> Path:
    """Everything that can be known to fail before anything starts. Returns the model's folder.

    Raises:
        PreflightError, ConfigError: one sentence naming the thing and the fix.
    """
    from leyden.controller.commands import check_command, check_function
    from leyden.controller.sandbox import check_sandbox
    from leyden.training.tasks import load_run_tasks

    if resume and not (run_dir / "run.yaml").exists():
        raise PreflightError(
            f"there is nothing to resume in {run_dir}: check output_dir and name, or leave --resume out"
        )
    if not resume and (run_dir / "metrics.jsonl").exists():
        raise PreflightError(
            f"{run_dir} already holds a run: add --resume to go on with it, or set output_dir=… for a new one"
        )
    if remote and not os.environ.get("LEYDEN_ADMIN_KEY"):
        raise PreflightError("--gateway needs that gateway's admin key in LEYDEN_ADMIN_KEY")
    if not remote:
        where = Path(config.agent.directory) if config.agent.directory else base_dir
        check_command(config.agent.command, where, "agent")
        if config.grader is not None and config.grader.function is not None:
            check_function(config.grader.function, base_dir, "grader")
        elif config.grader is not None:
            check_command(config.grader.command, base_dir, "grader")
        if any(spec is not None and spec.sandbox != "none" for spec in (config.agent, config.grader)):
            check_sandbox()
    load_run_tasks(config)
    model = resolve_model(config.model, base_dir)
    parameters = preflight.count_parameters(model)
    preflight.check_memory(config, parameters)
    preflight.check_output(run_dir, parameters, config.training.keep_checkpoints)
    return model


async def _supervise(
    config: RunConfig, run_dir: Path, base_dir: Path, model: Path, *, resume: bool, gateway: str | None
) -> None:
    keys = _keys(run_dir)
    if gateway is not None:
        # That gateway knows the key it was started with, if any, and no key of this run's.
        keys = {"admin": os.environ["LEYDEN_ADMIN_KEY"], "engine": os.environ.get("LEYDEN_ENGINE_KEY", "")}
    admin = keys["admin"]
    # Threads that spin while they wait make whoever shares the cores several times slower (docs/decisions.md).
    quiet = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    env = {
        **os.environ,
        **quiet,
        "LEYDEN_ADMIN_KEY": admin,
        "LEYDEN_ENGINE_KEY": keys["engine"],
        "PYTHONUNBUFFERED": "1",
    }
    leyden = [sys.executable, "-m", "leyden"]
    engine_port = preflight.pick_port(config.engine.host, config.engine.port, "engine")
    engine_url = f"http://{config.engine.host}:{engine_port}"
    supervisor = Supervisor(run_dir / "logs")
    remote = gateway is not None
    try:
        if gateway is None:
            host = config.gateway.host
            port = preflight.pick_port(host, config.gateway.port, "gateway")
            reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            gateway = f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"
            await supervisor.start(
                "gateway",
                [
                    *leyden,
                    "gateway",
                    *_flags(
                        host=host,
                        port=port,
                        store=run_dir / "store.sqlite",
                        model=model,
                        served_model_name=config.name,
                        request_timeout_seconds=config.gateway.request_timeout_seconds,
                        keepalive_seconds=config.gateway.keepalive_seconds,
                        replay_grace_seconds=config.gateway.replay_grace_seconds,
                        retention_days=config.gateway.retention_days,
                    ),
                ],
                env=env,
            )
        argv = [
            *leyden,
            "engine",
            *_flags(
                model=model,
                served_model_name=config.name,
                host=config.engine.host,
                port=engine_port,
                threads=config.engine.threads,
                max_batch=config.engine.max_batch,
                max_model_len=config.engine.max_model_len,
                kv_cache_tokens=config.engine.kv_cache_tokens,
                device=config.training.device,
            ),
        ]
        await supervisor.start("engine", argv, env={k: v for k, v in env.items() if k != "LEYDEN_ADMIN_KEY"})
        where, engine_key = gateway, keys["engine"]
        probes: dict[str, Callable[[], Awaitable[bool]]] = {"engine": lambda: _engine_ready(engine_url, engine_key)}
        if remote:
            if not await _gateway_ready(where, admin):
                raise PreflightError(f"can't reach the gateway at {where}: start it with `leyden gateway`")
        else:
            ready = {"gateway": lambda: _gateway_ready(where, admin)}
            await supervisor.wait_ready(ready, timeout=_READY_SECONDS)
        async with LeydenClient(where, admin) as client:
            # An engine of an interrupted run is gone; calls wait until the trainer has registered the new one.
            await client.delete_models()
            if config.engines:
                await client.register_models([*config.engines])
        if not remote:
            await supervisor.start(
                "controller",
                [
                    *leyden,
                    "controller",
                    *_flags(
                        gateway=gateway,
                        controller_id="local",
                        base_dir=base_dir,
                        work_dir=run_dir / "rollouts",
                        hide=run_dir,
                        concurrency=config.controller.concurrency,
                        lease_seconds=config.controller.lease_seconds,
                        log_bytes=config.controller.log_bytes,
                        keep_workspaces=config.controller.keep_workspaces,
                    ),
                ],
                env={k: v for k, v in env.items() if k != "LEYDEN_ENGINE_KEY"},
            )
        await supervisor.wait_ready(probes, timeout=_READY_SECONDS)
        _note_address(run_dir, gateway)
        argv = [*leyden, "trainer", *_flags(run_dir=run_dir, gateway=gateway, engine=engine_url, model=model)]
        argv += ["--resume"] if resume else []
        if code := await supervisor.run_foreground("trainer", argv, env=env | {"TQDM_DISABLE": "1"}):
            raise typer.Exit(code)
    finally:
        await supervisor.stop()


def trainer(
    run_dir: Annotated[Path, typer.Option()],
    gateway: Annotated[str, typer.Option()],
    engine: Annotated[str, typer.Option()],
    model: Annotated[Path, typer.Option()],
    resume: Annotated[bool, typer.Option("--resume")] = False,
) -> None:
    """The trainer process, as `leyden train` starts it."""
    from leyden.training.loop import run_trainer

    config = load_run(run_dir / "run.yaml")
    admin, engine_key = os.environ.pop("LEYDEN_ADMIN_KEY", ""), os.environ.pop("LEYDEN_ENGINE_KEY", "")
    run_trainer(config, run_dir, model, gateway, admin, engine, engine_key, resume=resume)


def _flags(**values: object) -> list[str]:
    """Command-line flags for the values that are set."""
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


async def _gateway_ready(url: str, key: str) -> bool:
    try:
        async with LeydenClient(url, key, timeout=5, patience=0) as client:
            await client.stats()
    except GatewayError as e:
        if e.status in (401, 403):
            raise PreflightError(f"the gateway at {url} doesn't take the key in LEYDEN_ADMIN_KEY") from e
        return False
    return True


async def _engine_ready(url: str, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(f"{url}/health") as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _keys(run_dir: Path) -> dict[str, str]:
    """This run's admin and engine keys, made once, readable by the owner alone."""
    path = run_dir / "keys.json"
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        keys = {"admin": f"ley-admin-{secrets.token_urlsafe(24)}", "engine": f"ley-engine-{secrets.token_urlsafe(24)}"}
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"{path} is damaged; delete it, new keys are made") from e
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(orjson.dumps(keys))
    return keys


def _note_address(run_dir: Path, gateway: str) -> None:
    """Where a running run's gateway is, for people who want to talk to it."""
    (run_dir / "gateway.json").write_bytes(orjson.dumps({"url": gateway, "supervisor_pid": os.getpid()}))


def _locked(run_dir: Path) -> IO[str]:
    """Keeps a second `leyden train` out of the folder. The lock goes with the process, however it ends."""
    handle = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise PreflightError(f"another `leyden train` is using {run_dir}: wait for it, or set output_dir=…") from None
    return handle

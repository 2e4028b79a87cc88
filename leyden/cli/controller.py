"""`leyden controller`: a controller alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer


def controller(
    gateway: Annotated[str, typer.Option(help="the gateway's URL; key in LEYDEN_ADMIN_KEY")],
    controller_id: Annotated[str | None, typer.Option(help="default: this host's name")] = None,
    base_dir: Annotated[Path, typer.Option(help="where relative commands of agents and graders are found")] = Path("."),
    work_dir: Annotated[Path, typer.Option(help="gets workspaces and logs")] = Path("leyden-work"),
    agent_url: Annotated[str | None, typer.Option(help="the gateway as agents reach it, when that differs")] = None,
    hide: Annotated[Path | None, typer.Option(help="a folder that no sandbox shows, besides work_dir")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="agents running at once")] = 16,
    lease_seconds: Annotated[float, typer.Option(min=1.5)] = 30,
    log_bytes: Annotated[int, typer.Option(min=1000, help="kept of each attempt's log")] = 1_000_000,
    keep_workspaces: Annotated[str, typer.Option(help="all, failed or none")] = "failed",
) -> None:
    """Run a controller alone: claims rollouts from a gateway and runs their agents and graders here."""
    from pydantic import ValidationError

    from leyden.config import ControllerConfig
    from leyden.controller.main import ControllerOptions, serve
    from leyden.errors import ConfigError

    try:
        config = ControllerConfig.model_validate(
            {
                "concurrency": concurrency,
                "lease_seconds": lease_seconds,
                "log_bytes": log_bytes,
                "keep_workspaces": keep_workspaces,
            }
        )
    except ValidationError as e:
        raise ConfigError(f"{e.errors()[0]['loc'][0]}: {e.errors()[0]['msg']}") from e
    options = ControllerOptions(
        gateway_url=gateway,
        work_dir=work_dir.resolve(),
        base_dir=base_dir.resolve(),
        controller_id=controller_id or socket.gethostname(),
        agent_url=agent_url,
        hidden=(hide.resolve(),) if hide else (),
        config=config,
    )
    raise typer.Exit(serve(options))

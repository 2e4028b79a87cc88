"""`leyden gateway`: the gateway alone."""

from __future__ import annotations

from typing import Annotated

import typer


def gateway(
    store: Annotated[
        str, typer.Option(help="SQLite file, made when absent; or postgresql://… for several gateways")
    ] = "gateway.sqlite",
    model: Annotated[
        str, typer.Option(help="the served model, for its tokenizer: folder, Hugging Face id, or name")
    ] = "",
    served_model_name: Annotated[str | None, typer.Option(help="name that engines are registered under")] = None,
    host: Annotated[str, typer.Option(help="anything but loopback needs LEYDEN_ADMIN_KEY")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8700,
    request_timeout_seconds: Annotated[float, typer.Option(min=0.1)] = 600,
    keepalive_seconds: Annotated[float, typer.Option(min=0.1)] = 10,
    replay_grace_seconds: Annotated[float, typer.Option(min=0)] = 10,
    retention_days: Annotated[
        float | None, typer.Option(min=0, help="delete what ended so long ago, end what nobody touched; default: never")
    ] = None,
) -> None:
    """Run the gateway alone.

    Keys: LEYDEN_ADMIN_KEY (else one is made and kept beside a SQLite store, or in leyden-gateway.key here with a
    PostgreSQL one; gateways that share a store need the same), LEYDEN_ENGINE_KEY.
    """
    from leyden.gateway.lean import start_lean

    start_lean()
    from leyden.errors import ConfigError
    from leyden.gateway.app import run_gateway
    from leyden.gateway.options import GatewayOptions
    from leyden.models import resolve_model

    if not model:
        raise ConfigError("--model is missing: the gateway needs the served model's tokenizer and chat template")
    folder = resolve_model(model)
    options = GatewayOptions(
        store=store,
        model_folder=folder,
        model_name=served_model_name or folder.name,
        host=host,
        port=port,
        request_timeout_seconds=request_timeout_seconds,
        keepalive_seconds=keepalive_seconds,
        replay_grace_seconds=replay_grace_seconds,
        retention_days=retention_days,
    )
    raise typer.Exit(run_gateway(options))

"""`leyden engine`: the embedded engine alone."""

from __future__ import annotations

from typing import Annotated

import typer


def engine(
    model: Annotated[str, typer.Option(help="folder, Hugging Face id, or smollm2-135m-instruct")],
    served_model_name: Annotated[str | None, typer.Option(help="default: the folder's name")] = None,
    host: Annotated[str, typer.Option(help="anything but loopback needs LEYDEN_ENGINE_KEY")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one")] = 8701,
    threads: Annotated[int | None, typer.Option(min=1, help="default: all cores")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="sequences decoded together")] = 64,
    max_model_len: Annotated[int | None, typer.Option(min=16)] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=16, help="default: from free memory")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Serve a model, token ids in, token ids out (the routes are in docs/wire.md)."""
    from leyden.models import resolve_model
    from leyden.training.torch.server import EngineOptions, run_engine

    options = EngineOptions(
        model=str(resolve_model(model)),
        served_model_name=served_model_name,
        host=host,
        port=port,
        threads=threads,
        max_batch=max_batch,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        device=device,
    )
    raise typer.Exit(run_engine(options))

"""The `leyden` command. One module a command; each imports what it needs only when it runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from leyden.errors import LeydenError

app = typer.Typer(
    name="leyden",
    help="Trains the model behind any AI agent by reinforcement learning while the agent runs unchanged.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

P = ParamSpec("P")
T = TypeVar("T")


def explained(command: Callable[P, T]) -> Callable[P, T]:
    """Print a LeydenError as one `error:` line and exit with its code, and a Ctrl-C without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except LeydenError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
            raise typer.Exit(e.exit_code) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            raise typer.Exit(130) from None

    return run


def _add_all() -> None:
    from leyden.cli import audit, controller, engine, export, gateway, inspect, logs, renderer, rows, train

    app.command("train")(explained(train.train))
    app.command("gateway")(explained(gateway.gateway))
    app.command("controller")(explained(controller.controller))
    app.command("engine")(explained(engine.engine))
    app.command("rollouts")(explained(inspect.rollouts))
    app.command("show")(explained(inspect.show))
    app.command("logs")(explained(logs.logs))
    app.command("audit")(explained(audit.audit))
    renderers = typer.Typer(help="How a model's conversations become tokens.", no_args_is_help=True)
    renderers.command("check")(explained(renderer.check))
    renderers.callback()(lambda: None)  # With a callback a single command keeps its name.
    app.add_typer(renderers, name="renderer")
    app.command("export")(explained(export.export))
    training_rows = typer.Typer(help="Training rows, made again from the record.", no_args_is_help=True)
    training_rows.command("rebuild")(explained(rows.rebuild))
    training_rows.callback()(lambda: None)
    app.add_typer(training_rows, name="rows")
    app.command("trainer", hidden=True)(explained(train.trainer))


def _add_gateway() -> None:
    from leyden.cli import gateway

    app.command("gateway")(explained(gateway.gateway))


app.callback()(lambda: None)
# A gateway that was killed has to be back at once: it doesn't load what the other commands need (0.3 s).
_add_gateway() if sys.argv[1:2] == ["gateway"] else _add_all()

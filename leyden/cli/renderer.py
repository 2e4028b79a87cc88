"""`leyden renderer check`: does the gateway render, parse and continue this model's conversations token for token?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from leyden.gateway.certify import Tally


def check(
    model: Annotated[str, typer.Argument(help="a model folder, a Hugging Face id, or smollm2-135m-instruct")],
    conversations: Annotated[int, typer.Option(min=1, help="random conversations to check")] = 200,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Certify a model's renderer on the CPU with random conversations. Fails when anything differs."""
    from leyden.gateway.certify import certify
    from leyden.gateway.renderer import ModelRenderer
    from leyden.models import resolve_model

    renderer = ModelRenderer(resolve_model(model, Path.cwd()))
    report = certify(renderer, conversations, seed)
    known = renderer.known
    continued = ", ".join(sorted(known.roles)) or "nothing"
    print(f"family {known.name}: recorded tokens are continued after messages of {continued}")
    if known.forgets:
        print(f"the template drops earlier reasoning after messages of {', '.join(sorted(known.forgets))}")
    if not known.prints_tools:
        print("the template knows no tools: they are printed in the Hermes form, which no template can confirm")
    for name, tally in report.tallies.items():
        print(f"{name:9} checked={tally.checked} failed={tally.failed} refused={tally.refused}")
        _print_failure(tally)
    counts = " ".join(f"{name}_failed={t.failed}" for name, t in report.tallies.items())
    print(f"renderer check: model={model} family={report.family} conversations={report.conversations} {counts}")
    certified = not report.failed() and report.tallies["bridge"].checked and report.tallies["parse"].checked
    raise typer.Exit(0 if certified else 1)


def _print_failure(tally: Tally) -> None:
    if tally.smallest is None or tally.difference is None:
        return
    difference = tally.difference
    print(f"  {difference.what} differs at token {difference.index}; the smallest conversation that shows it:")
    for message in tally.smallest.messages:
        print(f"    {json.dumps(message, ensure_ascii=False)}")
    if tally.smallest.tools:
        print(f"    tools: {json.dumps(tally.smallest.tools, ensure_ascii=False)}")
    print(f"  expected …{difference.expected!r}\n  got      …{difference.got!r}")

"""`leyden rollouts`, `leyden show`: what happened in a run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyden.cli.reader import find_run, open_reader
from leyden.errors import LeydenError
from leyden.schema import CallRecord, Rollout, RolloutState

Run = Annotated[Path | None, typer.Option("--run", help="the run's folder; default: the newest under runs/")]
Gateway = Annotated[str | None, typer.Option(help="ask this gateway instead; key in LEYDEN_ADMIN_KEY")]


def rollouts(
    run: Run = None,
    gateway: Gateway = None,
    state: Annotated[list[RolloutState] | None, typer.Option(help="only these states")] = None,
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    train: Annotated[bool | None, typer.Option("--train/--heldout", help="only these")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    cursor: Annotated[str | None, typer.Option(help="go on where the previous page ended")] = None,
) -> None:
    """List rollouts, newest first."""

    async def work() -> None:
        async with open_reader(run, gateway) as reader:
            states = [str(s) for s in state] if state else None
            page = await reader.page(state_in=states, step=step, is_train=train, limit=limit, cursor=cursor)
        console = Console(soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        for name in ("rollout", "state", "outcome"):
            table.add_column(name, no_wrap=True)
        table.add_column("reward", justify="right")
        table.add_column("calls", justify="right")
        table.add_column("seconds", justify="right")
        table.add_column("task")
        for r in page.items:
            status = r.status
            table.add_row(
                r.rollout_id,
                status.state,
                status.outcome or "",
                "" if status.reward is None else f"{status.reward:.3g}",
                str(status.calls),
                f"{status.updated_at - status.created_at:.1f}",
                escape(str(r.metadata.task_id or "")),
            )
        console.print(table)
        counts = ", ".join(f"{n} {s}" for s, n in page.by_state.items() if n)
        more = f"; next page: --cursor {page.next_cursor}" if page.next_cursor else ""
        console.print(f"{len(page.items)} of {page.total} ({counts or 'none'}){more}", highlight=False)

    asyncio.run(work())


def show(
    rollout: Annotated[str, typer.Argument(help="the rollout's id")],
    run: Run = None,
    gateway: Gateway = None,
    tokens: Annotated[bool, typer.Option(help="each sampled token with its log-prob")] = True,
) -> None:
    """Show one rollout: its attempts, calls, tokens with log-probs, reward, the end of its log."""
    asyncio.run(_show(rollout, run, gateway, tokens))


async def _show(rollout: str, run: Path | None, gateway: str | None, tokens: bool) -> None:
    async with open_reader(run, gateway) as reader:
        detail = await reader.rollout(rollout)
        trajectory = await reader.trajectory(rollout, content=True)
        tokenizer = _tokenizer(find_run(run)) if tokens and gateway is None else None
    console = Console(soft_wrap=True, highlight=False)
    _header(console, detail.rollout)
    for a in detail.attempt_details:
        ended = f"{a.ended_at - a.started_at:.1f} s" if a.ended_at else "running"
        how = f"exit {a.exit_code}" if a.exit_code is not None else f"signal {a.signal}" if a.signal else ""
        facts = [f"attempt {a.attempt_id}", a.outcome or "open", ended, how, f"{a.calls} calls"]
        facts += [f"{a.late_writes} late writes refused"] if a.late_writes else []
        console.print("  " + ", ".join(f for f in facts if f) + (f": {escape(a.reason)}" if a.reason else ""))
    seen: dict[str, int] = {}
    for number, call in enumerate(trajectory.calls, 1):
        _call(console, number, call, seen, tokenizer, tokens)
    log = next((a.log_tail for a in reversed(detail.attempt_details) if a.log_tail), None)
    if log:
        console.print("\n[bold]end of the log[/bold]")
        console.print(escape(log.rstrip()))


def _header(console: Console, rollout: Rollout) -> None:
    status = rollout.status
    kind = "training" if rollout.is_train else "held-out"
    console.print(f"[bold]{escape(rollout.rollout_id)}[/bold]  {kind}, task {escape(str(rollout.metadata.task_id))}")
    outcome = f", {status.outcome}" if status.outcome else ""
    reward = "none" if status.reward is None else f"{status.reward:.6g}"
    console.print(f"  {status.state}{outcome}, reward {reward}, created {time.ctime(status.created_at)}")
    if status.error_message:
        console.print(f"  {escape(status.error_message)}")
    console.print(f"  input {escape(str(rollout.input))}")


def _call(
    console: Console, number: int, call: CallRecord, seen: dict[str, int], tokenizer: object | None, tokens: bool
) -> None:
    prompt = np.frombuffer(call.prompt_ids, "<i4")
    response = np.frombuffer(call.response_ids, "<i4")
    logprobs = np.frombuffer(call.logprobs, "<f4")
    versions = sorted(set(np.frombuffer(call.versions, "<i4").tolist()))
    facts = [
        f"{len(prompt)} + {len(response)} tokens",
        f"policy version {', '.join(map(str, versions)) or '?'}",
        f"finish {call.finish_reason}",
        f"{call.ended_at - call.started_at:.2f} s",
        f"continues call {call.parent[:8]}" if call.parent else "",
        f"break: {call.break_reason} at token {call.break_index}" if call.break_reason else "",
        "" if call.delivered else "not delivered",
        f"not trained: {call.untrainable}" if call.untrainable else "",
        f"reward {call.reward:.6g}" if call.reward is not None else "",
    ]
    console.print(f"\n[bold]call {number}[/bold] {call.call_id[:8]}  " + escape(", ".join(f for f in facts if f)))
    messages = (call.request or {}).get("messages") or []
    known = seen.get(call.parent, 0) if call.parent else 0
    # The parent's answer comes back as one message: only what is new is shown.
    for message in messages[known + 1 if known else 0 :]:
        console.print(f"  [dim]{message.get('role')}:[/dim] {escape(_text(message))}")
    seen[call.call_id] = len(messages)
    if call.response is not None:
        console.print(f"  [dim]answer:[/dim] {escape(_text(call.response))}")
    if tokens and len(response):
        words = [_word(tokenizer, i) for i in response.tolist()]
        pairs = [f"{w} {p:.4f}" for w, p in zip(words, logprobs.tolist(), strict=False)]
        console.print("  [dim]tokens with log-prob:[/dim] " + escape(" | ".join(pairs)))


def _text(message: dict[str, object]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    return text + (f" {calls}" if calls else "")


def _word(tokenizer: object | None, token: int) -> str:
    return repr(tokenizer.decode([token], skip_special_tokens=False)) if tokenizer is not None else str(token)  # type: ignore[attr-defined]


def _tokenizer(run_dir: Path) -> object | None:
    """The run's tokenizer, or None when its model isn't at hand any more: ids are shown then."""
    try:
        model = yaml.safe_load((run_dir / "run.yaml").read_text())["model"]
        from leyden.models import resolve_model

        folder = resolve_model(model)
    except (OSError, KeyError, TypeError, LeydenError):
        return None
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None

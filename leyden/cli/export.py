"""`leyden export`: what was recorded, as Parquet files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import orjson
import typer

from leyden.cli.reader import Reader, all_rollouts, open_reader
from leyden.errors import ConfigError
from leyden.schema import CallRecord, Rollout

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS_AT_ONCE = 1_000_000
CALLS_AT_ONCE = 2_000
"""Calls, or their tokens, that are held before they are written: they decide how much memory an export takes."""

Run = Annotated[Path | None, typer.Option("--run", help="the run's folder; default: the newest under runs/")]
Gateway = Annotated[str | None, typer.Option(help="ask this gateway instead; key in LEYDEN_ADMIN_KEY")]
StoreOption = Annotated[
    str | None, typer.Option("--store", help="read this store instead: postgresql://…, or a file that no gateway uses")
]


def export(
    out: Annotated[Path, typer.Argument(help="folder for rollouts.parquet and calls.parquet")],
    run: Run = None,
    gateway: Gateway = None,
    store: StoreOption = None,
    content: Annotated[bool, typer.Option(help="with messages, tools and raw requests")] = True,
) -> None:
    """Write all rollouts, and the calls of their last attempts with ids and log-probs, as Parquet files."""

    async def work() -> tuple[int, int]:
        async with open_reader(run, gateway, store) as reader:
            return await write(reader, out, content=content)

    rollouts, calls = asyncio.run(work())
    print(f"export: rollouts={rollouts} calls={calls} folder={out}")


async def write(reader: Reader, out: Path, *, content: bool) -> tuple[int, int]:
    """Write both files, a part at a time. Returns the numbers of rollouts and calls."""
    with _Files(out) as files:
        async for rollout in all_rollouts(reader):
            found = None
            if rollout.status.last_attempt_id is not None:
                found = await reader.trajectory(rollout.rollout_id, content=content)
            files.add(rollout, found.calls if found is not None else [])
            if files.full():
                await asyncio.to_thread(files.flush)
    return files.counts


class _Files:
    """Both files, under their names once they are complete."""

    def __init__(self, out: Path) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError as e:
            raise ConfigError("an export needs pyarrow: pip install 'leyden[export]'") from e
        out.mkdir(parents=True, exist_ok=True)
        self._paths = [out / "rollouts.parquet", out / "calls.parquet"]
        self._schemas = [_rollout_schema(), _call_schema()]
        self._writers = [
            pq.ParquetWriter(f"{path}.part", schema, compression="zstd")
            for path, schema in zip(self._paths, self._schemas, strict=True)
        ]
        self._rollouts: list[dict[str, Any]] = []
        self._calls: list[tuple[str, CallRecord]] = []
        self._tokens = 0
        self.counts = (0, 0)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()
        for path, writer in zip(self._paths, self._writers, strict=True):
            writer.close()
            part = path.with_name(path.name + ".part")
            part.replace(path) if kind is None else part.unlink()

    def add(self, rollout: Rollout, calls: Sequence[CallRecord]) -> None:
        self._rollouts.append(_rollout_row(rollout))
        self._calls += [(rollout.rollout_id, c) for c in calls]
        self._tokens += sum(len(c.prompt_ids) + len(c.response_ids) for c in calls) // 4

    def full(self) -> bool:
        return self._tokens > TOKENS_AT_ONCE or max(len(self._calls), len(self._rollouts)) > CALLS_AT_ONCE

    def flush(self) -> None:
        import pyarrow as pa

        self._writers[0].write_batch(pa.RecordBatch.from_pylist(self._rollouts, schema=self._schemas[0]))
        self._writers[1].write_batch(_call_batch(self._calls, self._schemas[1]))
        self.counts = (self.counts[0] + len(self._rollouts), self.counts[1] + len(self._calls))
        self._rollouts, self._calls, self._tokens = [], [], 0


def _rollout_schema() -> pa.Schema:
    import pyarrow as pa

    text = "rollout_id run group task_id state outcome error_message attempt_id input metadata config".split()
    return pa.schema(
        [(name, pa.string()) for name in text]
        + [("step", pa.int64()), ("is_train", pa.bool_()), ("reward", pa.float64()), ("calls", pa.int64())]
        + [("created_at", pa.float64()), ("updated_at", pa.float64())]
    )


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    status, metadata = rollout.status, rollout.metadata
    return {
        "rollout_id": rollout.rollout_id,
        "run": metadata.run,
        "step": metadata.step,
        "group": metadata.group,
        "task_id": metadata.task_id,
        "is_train": rollout.is_train,
        "state": str(status.state),
        "outcome": str(status.outcome) if status.outcome else None,
        "error_message": status.error_message,
        "reward": status.reward,
        "calls": status.calls,
        "attempt_id": status.last_attempt_id,
        "input": _json(rollout.input),
        "metadata": metadata.model_dump_json(exclude_none=True),
        "config": rollout.config.model_dump_json(),
        "created_at": status.created_at,
        "updated_at": status.updated_at,
    }


_ARRAYS = {"prompt_ids": "<i4", "response_ids": "<i4", "logprobs": "<f4", "versions": "<i4"}
_JSON_FIELDS = ("requested", "effective", "request", "response", "raw")


def _call_schema() -> pa.Schema:
    import pyarrow as pa

    kinds: dict[str, Any] = {
        "call_id attempt_id dialect finish_reason parent break_reason untrainable": pa.string(),
        "engine kind routed_format": pa.string(),
        "seq break_index": pa.int64(),
        "reward started_at ended_at": pa.float64(),
        "delivered": pa.bool_(),
        "routed_experts": pa.binary(),
        "images": pa.list_(pa.string()),
        "prompt_ids response_ids versions": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        " ".join(_JSON_FIELDS): pa.string(),
    }
    return pa.schema(
        [("rollout_id", pa.string())] + [(name, kind) for names, kind in kinds.items() for name in names.split()]
    )


def _call_batch(calls: Sequence[tuple[str, CallRecord]], schema: pa.Schema) -> pa.RecordBatch:
    """Calls as columns; the arrays without a Python object for each token."""
    import pyarrow as pa

    columns = []
    for field in schema:
        get: Callable[[CallRecord], Any] = lambda call, name=field.name: getattr(call, name)  # noqa: E731
        if field.name == "rollout_id":
            columns.append(pa.array([rollout_id for rollout_id, _ in calls], field.type))
        elif field.name in _ARRAYS:
            parts = [np.frombuffer(get(c), _ARRAYS[field.name]) for _, c in calls]
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            values = np.concatenate(parts) if parts else np.empty(0, _ARRAYS[field.name])
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=field.type))
        elif field.name in _JSON_FIELDS:
            columns.append(pa.array([_json(get(c)) for _, c in calls], field.type))
        else:
            columns.append(pa.array([get(c) for _, c in calls], field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()

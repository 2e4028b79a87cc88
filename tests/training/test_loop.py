"""The loop end to end on a tiny model with a gateway and an engine in memory."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from leyden.client import LeydenClient
from leyden.config import RunConfig
from leyden.errors import RunError
from leyden.schema import Outcome
from leyden.training import loop as loop_module
from leyden.training.checkpoint import checkpoints, latest
from leyden.training.loop import Summary, train
from leyden.training.metrics import read_records
from leyden.training.torch.audit import audit_calls
from leyden.training.torch.policy import Policy
from tests.tiny import make_tiny_model
from tests.training.fakes import Crash, FakeEngine, FakeGateway


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), with_weights=True)


class Bench:
    """A run's parts; `go` starts a trainer process's worth of work."""

    def __init__(self, model: Path, folder: Path, **training: Any) -> None:
        self.model, self.run_dir = model, folder / "run"
        self.engine = FakeEngine(model)
        self.gateway = FakeGateway(self.engine)
        (folder / "train.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
        (folder / "heldout.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(10, 13)))
        validation = training.pop("validation", {})
        self.config = RunConfig.model_validate(
            {
                "name": "demo",
                "model": str(model),
                "agent": {"command": "agent"},
                "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
                "training": {
                    "steps": 4,
                    "tasks_per_step": 2,
                    "rollouts_per_task": 4,
                    "learning_rate": 3e-3,
                    "threads": 1,
                    "device": "cpu",
                    "micro_batch_tokens": 40,
                    **training,
                },
                "validation": validation,
            }
        )
        self.output = io.StringIO()

    async def go(self, resume: bool = False) -> Summary:
        console = Console(file=self.output, width=200)
        client = cast(LeydenClient, self.gateway)
        return await train(self.config, client, self.engine, self.run_dir, resume, console, model=self.model)

    def restart_engine(self) -> None:
        self.engine = FakeEngine(self.model)
        self.gateway.engine = self.engine

    def numbers(self) -> list[tuple[Any, ...]]:
        """What must be equal between runs, bit for bit."""
        return [
            (r["kind"], r["step"], r["version"], r["reward_mean"], r.get("losses"), r.get("grad_norm"))
            for r in read_records(self.run_dir)
        ]


@torch.no_grad()
def expected_reward(engine: FakeEngine) -> float:
    """Probability of a rewarded first token, over all prompts: the reward without the noise of sampling."""
    prompts = torch.tensor([[1, 7, 30 + n] for n in range(13)])
    return float(engine.model(input_ids=prompts).logits[:, -1].softmax(-1)[:, :140].sum(-1).mean())


async def test_a_run_learns_and_leaves_everything_behind(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=6, learning_rate=2e-2, validation={"every": 3})
    summary = await bench.go()
    records = read_records(bench.run_dir)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("validation", 0),
        *[("step", s) for s in range(3)],
        ("validation", 3),
        *[("step", s) for s in range(3, 6)],
        ("validation", 6),
    ]
    steps = [r for r in records if r["kind"] == "step"]
    assert expected_reward(bench.engine) > expected_reward(FakeEngine(model)) + 0.05
    assert summary.heldout_before is not None and summary.heldout_after is not None
    # On policy the stored log-probs are the policy's own.
    assert all(r["ratio_max"] == pytest.approx(1, abs=1e-4) and r["max_age"] == 0 for r in steps)
    assert all(r["trained_tokens"] == 8 * 5 and r["rows"] == 8 for r in steps)
    assert bench.gateway.registered == list(range(7)) and summary.version == 6
    assert sorted(p.name for p in (bench.run_dir / "weights").iterdir()) == ["v6"]
    assert [c.state.step for c in checkpoints(bench.run_dir)] == [5, 6]
    assert summary.curve is not None and summary.curve.stat().st_size > 5000
    assert any((bench.run_dir / "tensorboard").iterdir())
    assert summary.checkpoint is not None
    exported = AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    served = dict(bench.engine.model.named_parameters())
    assert all(torch.equal(p, served[n]) for n, p in exported.named_parameters())
    text = bench.output.getvalue()
    assert "held-out after 6 steps" in text and str(summary.checkpoint) in text
    assert all(not r.is_train for n, r in bench.gateway.rollouts.items() if ".val" in n)
    assert set(bench.gateway.rollouts) >= {"demo.00000.000.000", "demo.00005.001.003", "demo.val00003.0002"}


@pytest.fixture(scope="session")
async def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    bench = Bench(model, tmp_path_factory.mktemp("reference"))
    await bench.go()
    return bench.numbers()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("where", "nth"),
    [
        *(("create", 1), ("create", 2), ("create", 4), ("terminal", 0), ("trajectory", 9), ("trajectory", 30)),
        *(("register", 0), ("register", 2), ("load", 3), ("save", 0), ("save", 1), ("update", 2)),
    ],
)
async def test_a_crashed_run_goes_on_with_the_numbers_of_one_that_was_not(
    model: Path, tmp_path: Path, reference: list[tuple[Any, ...]], where: str, nth: int, every: int, monkeypatch
) -> None:
    bench = Bench(model, tmp_path, checkpoint_every=every)
    counts: dict[str, int] = {}

    def crash(name: str) -> None:
        if name == where:
            counts[name] = counts.get(name, 0) + 1
            if counts[name] == nth + 1:
                raise Crash

    def crashing(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            crash(name)
            return real(*args, **kwargs)

        return call

    bench.gateway.before = crash
    bench.engine.fault = lambda _: crash("load")
    monkeypatch.setattr(Policy, "save", crashing("save", Policy.save))
    monkeypatch.setattr(Policy, "update", crashing("update", Policy.update))
    if where == "terminal":
        # Finished rollouts are known from their creation; only what is still running is waited for.
        bench.gateway.hold = lambda _: True
    with pytest.raises(Crash):
        await bench.go()
    bench.gateway.before = lambda _: None
    if where == "terminal":
        bench.gateway.hold = lambda _: False
        bench.gateway.rollouts.clear()
    bench.restart_engine()
    summary = await bench.go(resume=True)
    assert bench.numbers() == reference
    assert summary.steps == 4 and summary.version == 4
    assert [c.state.step for c in checkpoints(bench.run_dir)][-1] == 4
    assert not list((bench.run_dir / "checkpoints").glob("tmp-*"))


async def test_replayed_steps_get_rollouts_of_their_own(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, checkpoint_every=2)
    seen = 0

    def crash(name: str) -> None:
        nonlocal seen
        seen += name == "create"
        # Validation, then steps 0 to 3: the crash comes while step 3 is being created; step 2 was done and is lost.
        if name == "create" and seen == 5:
            raise Crash

    bench.gateway.before = crash
    with pytest.raises(Crash):
        await bench.go()
    bench.gateway.before = lambda _: None
    await bench.go(resume=True)
    names = [n for n in bench.gateway.rollouts if n.removesuffix(".r1").endswith(".000.000")]
    taken_up, again = ["00000.000.000", "00001.000.000", "00002.000.000"], ["00002.000.000.r1", "00003.000.000.r1"]
    assert names == [f"demo.{s}" for s in [*taken_up, *again]]
    assert [r["step"] for r in read_records(bench.run_dir) if r["kind"] == "step"] == [0, 1, 2, 3]


async def test_resuming_a_finished_run_only_reports(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1)
    first = await bench.go()
    count = len(bench.gateway.rollouts)
    again = await bench.go(resume=True)
    assert "is finished" in bench.output.getvalue() and len(bench.gateway.rollouts) == count
    assert (again.heldout_after, again.checkpoint) == (first.heldout_after, first.checkpoint)
    with pytest.raises(RunError, match="--resume"):
        await bench.go()


async def test_resume_without_anything_starts_fresh_and_names_can_not_be_reused(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1)
    await bench.go(resume=True)
    assert "nothing to resume" in bench.output.getvalue()
    (tmp_path / "other").mkdir()
    other = Bench(model, tmp_path / "other", steps=1)
    other.gateway.rollouts = bench.gateway.rollouts
    with pytest.raises(RunError, match="another name"):
        await other.go()


async def test_a_step_without_rows_is_skipped_and_says_why(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1)
    bench.gateway.untrainable = "usage mismatch: 3 for 2"
    summary = await bench.go()
    (step,) = [r for r in read_records(bench.run_dir) if r["kind"] == "step"]
    assert step["skipped"] == "no trainable call among 8 rollouts (16 usage mismatch)"
    assert step["dropped"] == {"usage mismatch": 16} and len(step["drop_report"]) == 8
    assert (summary.version, summary.steps) == (0, 1) and bench.gateway.registered == [0]


async def test_equal_rewards_everywhere_make_a_step_without_an_update(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=2)
    bench.gateway.reward = lambda *_: 0.2
    summary = await bench.go()
    steps = [r for r in read_records(bench.run_dir) if r["kind"] == "step"]
    assert [s["skipped"] for s in steps] == ["every group's rewards are equal (2 of 2 groups)"] * 2
    assert (summary.version, summary.steps) == (0, 2) and latest(bench.run_dir) is not None


async def test_a_nan_reward_is_left_out_by_name(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1)
    scored = bench.gateway.reward
    bench.gateway.reward = lambda c, r: math.nan if c.rollout_id == "demo.00000.001.002" else scored(c, r)
    await bench.go()
    (step,) = [r for r in read_records(bench.run_dir) if r["kind"] == "step"]
    assert step["refused_rewards"] == ["demo.00000.001.002"] and step["excluded"] == {"non_finite_reward": 1}
    assert step["rows"] == 7 and step["optimizer_steps"] == 1 and math.isfinite(step["loss"])
    assert "demo.00000.001.002 isn't a finite number" in bench.output.getvalue()


async def test_infra_failures_stay_out_of_baseline_and_loss(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1)
    bench.gateway.outcome = lambda c: (
        (Outcome.INFRA, "node lost")
        if c.rollout_id and c.rollout_id.endswith("0.000") and c.is_train
        else (Outcome.OK, None)
    )
    await bench.go()
    (step,) = [r for r in read_records(bench.run_dir) if r["kind"] == "step"]
    assert step["excluded"] == {"infra": 1} and step["rows"] == 7 and step["rewarded"] == 7


@pytest.mark.parametrize(
    ("outcome", "share", "message"),
    [
        (
            Outcome.AGENT_ERROR,
            1.0,
            r"step 0: all 8 rollouts failed, mostly: exit code \d: boom \(example: leyden show demo",
        ),
        (
            Outcome.INFRA,
            0.75,
            r"step 0: 75% of 8 rollouts ended by infrastructure failures \(limit 50%\), mostly: exit",
        ),
    ],
)
async def test_a_step_that_failed_stops_the_run_with_the_reason(
    model: Path, tmp_path: Path, outcome: Outcome, share: float, message: str
) -> None:
    bench = Bench(model, tmp_path, steps=1)

    def scripted(c: Any) -> tuple[Outcome, str | None]:
        sample = int(c.rollout_id.split(".")[-1])
        return (outcome, f"exit code {sample}: boom") if c.is_train and sample < 4 * share else (Outcome.OK, None)

    bench.gateway.outcome = scripted
    with pytest.raises(RunError, match=message):
        await bench.go()


async def test_a_stuck_run_says_what_it_waits_for(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=1, stuck_after_seconds=0.3, validation={"tasks": 0})
    bench.gateway.hold = lambda c: bool(c.rollout_id and c.rollout_id.endswith("001.003"))
    with pytest.raises(RunError) as e:
        await bench.go()
    assert str(e.value) == (
        "no rollout has ended for 0 s while 1 are awaited (1 running); the oldest running one is demo.00000.001.003, "
        "attempt 0 held by controller box-1 (leyden show demo.00000.001.003)"
    )


async def test_an_engine_that_serves_something_else_stops_the_run(model: Path, tmp_path: Path) -> None:
    """The known trap: a reload that answers well and leaves a tied head behind."""
    bench = Bench(model, tmp_path)
    bench.engine.spoil = 0.1
    with pytest.raises(RunError, match="doesn't serve the published weights of version 1"):
        await bench.go()
    assert bench.gateway.registered == [0]


async def test_an_engine_that_came_back_with_old_weights_gets_the_current_ones(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=3)

    def restart(name: str) -> None:
        if name == "register" and len(bench.gateway.registered) == 2:
            state = AutoModelForCausalLM.from_pretrained(model).state_dict()
            bench.engine.model.load_state_dict(state)
            bench.engine.weights_version = 0

    bench.gateway.before = restart
    await bench.go()
    assert "publishing again" in bench.output.getvalue()
    assert all(r["max_age"] == 0 for r in read_records(bench.run_dir) if r["kind"] == "step")


async def test_a_full_disk_is_named_and_keeps_the_last_checkpoint(model: Path, tmp_path: Path, monkeypatch) -> None:
    bench = Bench(model, tmp_path, steps=2)
    real = loop_module.save_checkpoint

    def full(run_dir: Path, state: Any, write: Any, **kwargs: Any) -> Path:
        if state.step == 2:

            def write(folder: Path) -> None:
                (folder / "part").write_text("x")
                raise OSError(28, "No space left on device")

        return real(run_dir, state, write, **kwargs)

    monkeypatch.setattr(loop_module, "save_checkpoint", full)
    with pytest.raises(RunError, match=r"the disk is full: a checkpoint needs about .* in .*checkpoints"):
        await bench.go()
    assert [c.state.step for c in checkpoints(bench.run_dir)] == [1]
    assert not list((bench.run_dir / "checkpoints").glob("tmp-*"))
    monkeypatch.undo()
    assert (await bench.go(resume=True)).steps == 2


async def test_the_audit_finds_what_was_tampered_with(model: Path, tmp_path: Path) -> None:
    bench = Bench(model, tmp_path, steps=2, validation={"tasks": 0})
    await bench.go()
    (bench.run_dir / "run.yaml").write_text(json.dumps(bench.config.model_dump(mode="json")))
    client = cast(LeydenClient, bench.gateway)
    report = await audit_calls(client, "demo", bench.run_dir, 12)
    assert report.calls == 12 and report.max_difference < 1e-4 and set(report.calls_by_version) == {0, 1}
    victim = bench.gateway.records["demo.00001.000.000"].calls[0]
    victim.logprobs = b"\x00" * len(victim.logprobs)
    report = await audit_calls(client, "demo", bench.run_dir, 32)
    assert report.worst_call == victim.call_id and report.worst_rollout == "demo.00001.000.000"
    assert report.max_difference > 1

"""The whole product: `leyden train` on a tiny random model with real agents and graders, and its bad endings."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)

AGENT = """
import os
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": os.environ["QUESTION"]}]
for _ in range(2):
    reply = client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=0)
    text = reply.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
    with open("answer.txt", "a") as f:
        f.write(text)
assert not [name for name in os.environ if "ADMIN" in name or "ENGINE" in name], "a key of Leyden's leaked"
print("agent done")
"""

GRADER = """
import json, os
task = json.load(open(os.environ["LEYDEN_TASK_FILE"]))
assert task["question"].startswith("Is it"), task
assert "agent done" in open(os.environ["LEYDEN_AGENT_LOG"]).read()
text = open("answer.txt").read()
print("graded", task["id"])
print(sum(c.isalpha() for c in text) / max(len(text), 1))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), with_weights=True)


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    """A user's folder: agent, grader, tasks, run file."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grade.py").write_text(GRADER)
    for name, first in (("train", 0), ("heldout", 100)):
        rows = [{"id": f"t{first + i}", "question": f"Is it {first + i}?"} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = {
        "name": "tiny",
        "model": str(model),
        "output_dir": str(tmp_path / "out"),
        "agent": {"command": ["python", "agent.py"], "env": {"QUESTION": "{{ input.question }}"}},
        "grader": {"command": ["python", "grade.py"]},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "training": {"steps": 2, "tasks_per_step": 2, "rollouts_per_task": 4, "learning_rate": 1e-3},
        "validation": {"tasks": 2},
        "controller": {"concurrency": 4, "lease_seconds": 5},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def leyden(project: Path, *args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden", *args]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=timeout)


def train(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return leyden(project, "train", "run.yaml", *args)


def steps(project: Path) -> list[int]:
    return [r["step"] for r in records(project)]


def records(project: Path) -> list[dict]:
    """The metrics of finished steps. A line that is still being written isn't one."""
    text = (project / "out" / "metrics.jsonl").read_text()
    found = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [r for r in found if r["kind"] == "step"]


def leftovers(project: Path) -> list[str]:
    """Command lines of processes that still have to do with the project."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        text = " ".join(process.info["cmdline"] or []) + str((process.info["environ"] or {}).get("PWD", ""))
        if str(project) in text and process.pid != os.getpid():
            found.append(text)
    return found


def test_a_run_trains_and_can_be_looked_at(project: Path) -> None:
    done = train(project)
    assert done.returncode == 0, done.stderr[-3000:]
    out = project / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["heldout_tasks"] == 2
    assert 0 <= summary["heldout_before"] <= 1 and 0 <= summary["heldout_after"] <= 1
    assert steps(project) == [0, 1]
    assert (out / "curve.png").stat().st_size > 1000
    assert list((out / "tensorboard").iterdir())
    assert yaml.safe_load((out / "run.yaml").read_text())["training"]["steps"] == 2
    assert (out / "keys.json").stat().st_mode & 0o077 == 0
    assert not leftovers(project)

    listed = leyden(project, "rollouts", "--run", "out")
    assert listed.returncode == 0, listed.stderr
    assert "20" in listed.stdout  # 2 × 8 training rollouts + 2 × 2 held-out
    rollout = "tiny.00000.000.000"
    assert rollout in leyden(project, "rollouts", "--run", "out", "--step", "0").stdout
    shown = leyden(project, "show", rollout, "--run", "out")
    assert shown.returncode == 0, shown.stderr
    for word in ("reward", "log-prob", "Is it", "agent done", "version"):
        assert word in shown.stdout, f"{word!r} missing in:\n{shown.stdout}"
    assert "graded" in leyden(project, "logs", rollout, "--run", "out").stdout

    audited = leyden(project, "audit", "--calls", "10", "--run", "out")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    figures = dict(pair.split("=") for pair in audited.stdout.splitlines()[-1].removeprefix("audit: ").split())
    assert int(figures["calls"]) == 10
    assert float(figures["max_dlogp"]) <= 1e-3

    again = train(project)
    assert again.returncode != 0
    assert "already holds a run" in again.stderr and "--resume" in again.stderr


def test_kill_of_the_whole_tree_then_resume(project: Path) -> None:
    command = [sys.executable, "-m", "leyden", "train", "run.yaml", "training.steps=4"]
    run = subprocess.Popen(
        command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not ((project / "out" / "metrics.jsonl").exists() and len(steps(project)) >= 2):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    tree = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in tree:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    run.wait(10)
    finished = records(project)

    done = train(project, "training.steps=4", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming at step" in done.stdout
    assert steps(project) == [0, 1, 2, 3]
    # A step is recorded before its checkpoint: the kill may have come between the two.
    assert records(project)[: len(finished) - 1] == finished[:-1]
    assert not leftovers(project)


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ({"training.stepz": "3"}, ["unknown key 'training.stepz'", "'steps'"], 2),
        ({"model": "./nowhere"}, ["'./nowhere'", "no such folder"], 3),
        ({"agent.command": "[no-such-program, x]"}, ["no-such-program", "not found"], 3),
        ({"data.train": "absent.jsonl"}, ["absent.jsonl"], 2),
        ({"data.heldout": "train.jsonl"}, ["held-out"], 2),
    ],
)
def test_what_can_be_known_before_is_said_before(
    project: Path, change: dict[str, str], words: list[str], code: int
) -> None:
    done = train(project, *[f"{k}={v}" for k, v in change.items()])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (project / "out" / "store.sqlite").exists()


def test_a_port_in_use_is_named(project: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        done = train(project, f"gateway.port={s.getsockname()[1]}")
    assert done.returncode == 3
    assert f"127.0.0.1:{s.getsockname()[1] if s.fileno() >= 0 else ''}" in done.stderr and "gateway.port" in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("agent.py", "print('hello')", ["made no model call"]),
        ("agent.py", "raise SystemExit('cannot go on')", ["the agent exited with code 1", "cannot go on"]),
        ("grade.py", "print('well done')", ["grader", "no number", "well done"]),
        ("grade.py", "print('nan')", ["grader", "nan"]),
    ],
)
def test_agents_and_graders_that_fail_end_the_run_in_a_sentence(
    project: Path, file: str, content: str, words: list[str]
) -> None:
    (project / file).write_text(content)
    done = train(project, "validation.tasks=0", "training.rollouts_per_task=2", "retry.infra=1")
    assert done.returncode == 4, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last
    assert "leyden show tiny." in last
    shown = leyden(project, "show", "tiny.00000.000.000", "--run", "out")
    assert shown.returncode == 0 and words[0] in shown.stdout
    assert not leftovers(project)


def test_gateway_and_controller_alone_serve_a_trainer(project: Path, model: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    env = {**os.environ, "LEYDEN_ADMIN_KEY": "the-key", "LEYDEN_ENGINE_KEY": "the-engine-key"}
    parts = [
        ["gateway", "--port", url.rpartition(":")[2], "--model", str(model), "--served-model-name", "tiny"],
        ["controller", "--gateway", url, "--base-dir", str(project)],
    ]
    running = [
        subprocess.Popen([sys.executable, "-m", "leyden", *part], cwd=project, env=env, stderr=subprocess.DEVNULL)
        for part in parts
    ]
    try:
        command = [sys.executable, "-m", "leyden", "train", "run.yaml", "training.steps=1", "--gateway", url]
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=240)
            if done.returncode == 0 or "can't reach the gateway" not in done.stderr or time.monotonic() > deadline:
                break
        assert done.returncode == 0, done.stderr[-2000:]
        assert steps(project) == [0]
        listed = subprocess.run(
            [sys.executable, "-m", "leyden", "rollouts", "--gateway", url], env=env, capture_output=True, text=True
        )
        assert "12 succeeded" in listed.stdout
    finally:
        for process in reversed(running):
            process.terminate()
        codes = [process.wait(30) for process in running]
    assert codes == [0, 0]
    assert not leftovers(project)

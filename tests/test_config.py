"""The run file: what is accepted, what is refused and in which words."""

from pathlib import Path

import pytest
import yaml

from leyden.config import apply_overrides, dump_run, load_run
from leyden.errors import ConfigError

MINIMAL = """
name: demo
model: smollm2-135m-instruct
agent:
  command: [python, agent.py]
data:
  train: tasks.jsonl
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_minimal_file_gets_defaults_and_absolute_paths(run_file: Path) -> None:
    config = load_run(run_file)
    assert config.training.tasks_per_step == 8
    assert config.data.train == str(run_file.parent / "tasks.jsonl")
    assert config.gateway.host == "127.0.0.1"


def test_printed_back_file_loads_to_the_same_run(run_file: Path, tmp_path: Path) -> None:
    config = load_run(run_file, ["training.lora.rank=4", "training.learning_rate=1e-5"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_run(config))
    assert load_run(again) == config
    assert config.training.learning_rate == 1e-5
    assert config.training.lora is not None and config.training.lora.rank == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainning.steps=3", ["'trainning'", "'training'"]),
        ("training.step=3", ["'training.step'", "'steps'"]),
        ("training.lora.rnk=3", ["'training.lora.rnk'", "'rank'"]),
        ("sampling.temprature=1", ["'sampling.temprature'", "'temperature'"]),
        ("grader.comand=x", ["'grader.comand'", "'command'"]),
        ("capture.routes=[{mach: x, model: demo}]", ["'capture.routes.0.mach'", "'match'"]),
        ("capture.routes=[{match: x, model: frozen}]", ["'frozen'", "no engine serves", "demo"]),
        ("engines=[{model: x, endpont: y}]", ["'engines.0.endpont'", "'endpoint'"]),
        ("training.steps=many", ["training.steps", "'many'"]),
        ("training.steps=-1", ["training.steps", "greater than or equal to 0"]),
        ("sampling.temperature=0", ["sampling.temperature=0", "nothing to learn"]),
        ("training.rollouts_per_task=1", ["rollouts_per_task=1", "min_group=2"]),
        ("agent=5", ["agent"]),
        ("training.steps", ["key=value"]),
        ("=3", ["key=value"]),
        ("model.name=x", ["'model'", "not a section"]),
        ("name=../up", ["name"]),
    ],
)
def test_mistakes_are_named_with_the_nearest_right_key(run_file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        load_run(run_file, [override])
    for word in words:
        assert word in str(e.value)


def test_held_out_rollouts_are_sampled_like_the_others_but_greedily(run_file: Path) -> None:
    config = load_run(run_file, ["sampling.max_tokens=16", "sampling.temperature=0.7"])
    assert (config.validation.sampling.max_tokens, config.validation.sampling.temperature) == (16, 0.0)
    config = load_run(run_file, ["sampling.max_tokens=16", "validation.sampling.temperature=0.5"])
    assert (config.validation.sampling.max_tokens, config.validation.sampling.temperature) == (16, 0.5)
    config = load_run(run_file, ["sampling.max_tokens=16", "validation.sampling.max_tokens=32"])
    assert (config.validation.sampling.max_tokens, config.validation.sampling.temperature) == (32, 0.0)


def test_missing_key_is_named(run_file: Path) -> None:
    run_file.write_text(MINIMAL.replace("model: smollm2-135m-instruct\n", ""))
    with pytest.raises(ConfigError, match="missing key 'model'"):
        load_run(run_file)


@pytest.mark.parametrize(("text", "words"), [("a: [", "isn't valid YAML"), ("- a", "mapping"), ("", "mapping")])
def test_files_that_are_no_run_files(run_file: Path, text: str, words: str) -> None:
    run_file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_run(run_file)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_run(tmp_path / "nowhere.yaml")


def test_later_override_wins_and_the_original_is_untouched() -> None:
    raw = {"a": {"b": 1}}
    assert apply_overrides(raw, ["a.b=2", "a.b=3", "c.d=x=y"]) == {"a": {"b": 3}, "c": {"d": "x=y"}}
    assert raw == {"a": {"b": 1}}


def test_shipped_run_files_are_valid() -> None:
    files = list(Path(__file__).parent.parent.glob("examples/*/run.yaml"))
    assert files
    for file in files:
        load_run(file)
        assert yaml.safe_load(file.read_text())["name"] == file.parent.name

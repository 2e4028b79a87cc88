"""Templates, where commands are found, logs: the parts that need no controller."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.controller.commands import Command, Unusable, build_command, build_env, check_command, env_from_map, render
from leyden.controller.environment import inherited
from leyden.controller.logfile import TAIL_BYTES, BoundedLog, log_path
from leyden.errors import PreflightError

PATH = "/usr/bin:/bin"
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def build(command: list[str] | str, task: object, base: Path = Path("/nowhere")) -> Command:
    return build_command(command, task, name="agent.command", base=base, directory=None, path=PATH)


@settings(max_examples=40, deadline=None)
@given(texts)
def test_a_task_field_never_becomes_shell_syntax(value: str) -> None:
    command = build("printf '%s' {{ input.x }} | cat", {"x": value})
    assert command.shell
    assert subprocess.run(command.argv, capture_output=True, check=True).stdout == value.encode()


@pytest.mark.parametrize("quoted", ['"{{ input.x }}"', "'{{ input.x }}'", "a{{ input.x }}b", '"a {{ input.x }}"'])
def test_also_not_inside_quotes(quoted: str, tmp_path: Path) -> None:
    evil = f"$(touch {tmp_path}/x); touch {tmp_path}/x; `touch {tmp_path}/x` ' \" ; touch {tmp_path}/x #"
    subprocess.run(build(f"echo {quoted} >/dev/null", {"x": evil}).argv, check=True)
    assert list(tmp_path.iterdir()) == []


@given(texts)
def test_a_task_field_is_one_argument(value: str) -> None:
    assert build(["echo", "{{ input.x }}"], {"x": value}).argv[1:] == [value]
    assert build("echo a{{ input['x'] }}b", {"x": value}).argv[1:] == [f"a{value}b"]


def test_templates_reach_into_the_task_and_not_out_of_the_sandbox() -> None:
    task = {"a": [{"b": "c"}], "n": 3}
    assert render("{{ input.a[0].b }}{{ input.n + 1 }}{% if input.n > 2 %}!{% endif %}\n", task, "x") == "c4!\n"
    with pytest.raises(Unusable, match=r"the template of agent\.env\.E failed"):
        build_env({"E": "{{ input.__class__.__mro__[1].__subclasses__() }}"}, {}, "agent.env")
    with pytest.raises(Unusable, match=r"the template of x failed \(TemplateSyntaxError"):
        render("{{ input.", {}, "x")


@pytest.mark.parametrize(
    "template,field", [("{{ input.zap }}", "zap"), ("{{ input.a.zap.b }}", "zap"), ("{{ zap }}", "zap")]
)
@pytest.mark.parametrize("shell", ["", " | cat"])
def test_a_missing_field_is_named_with_its_template(template: str, field: str, shell: str) -> None:
    with pytest.raises(Unusable) as e:
        build(f"echo {template}{shell}", {"a": {}})
    assert f"the task has no field '{field}', which the template of agent.command" in str(e.value)
    assert template in str(e.value)


def test_an_empty_command_is_refused() -> None:
    for command in ([], "", "  "):
        with pytest.raises(Unusable, match=r"agent\.command is empty"):
            build(command, {})


def test_a_command_is_checked_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    for good in (["python", "agent.py"], "python agent.py {{ input.q }}", ["{{ input.x }}"], "cd nowhere && run | it"):
        check_command(good, tmp_path, "agent")
    bad: dict[str, list[str] | str] = {
        "agent.command: command not found: 'no-such-x'": "no-such-x --y",
        "agent.command: command not found: './run.sh'": ["./run.sh"],
        "agent.command: there is no file 'gent.py'": ["python3", "gent.py"],
        "agent.command is empty": [],
    }
    for text, command in bad.items():
        with pytest.raises(PreflightError) as e:
            check_command(command, tmp_path, "agent")
        assert str(e.value).startswith(text)


def test_env_map_paths() -> None:
    task = {"a": {"b": ["x", {"c": None}]}, "é": "ü"}
    env_map = {"A": "input.a.b.0", "B": "input.a.b.1", "C": "plain", "D": "input", "E": "inputs.a", "F": "input.é"}
    assert env_from_map(task, env_map) == {
        "A": "x",
        "B": '{"c": null}',
        "C": "plain",
        "D": '{"a": {"b": ["x", {"c": null}]}, "é": "ü"}',
        "E": "inputs.a",
        "F": "ü",
    }
    for path in ("input.zap", "input.a.b.2", "input.a.b.x", "input.é.0", "input."):
        with pytest.raises(Unusable, match="the task has no field"):
            env_from_map(task, {"A": path})


def test_the_gateway_is_exempt_from_an_inherited_proxy() -> None:
    env = inherited({"PATH": PATH, "https_proxy": "http://p", "no_proxy": "a,b"}, "http://10.0.0.7:8000")
    assert env["NO_PROXY"] == env["no_proxy"] == "a,b,10.0.0.7"
    assert "NO_PROXY" not in inherited({"PATH": PATH}, "http://10.0.0.7:8000")


@settings(deadline=None)
@given(st.lists(st.binary(max_size=900), max_size=12))
def test_a_log_keeps_head_and_tail_and_says_what_it_cut(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "log"
    log = BoundedLog(path, 1000)
    for part in parts:
        log.write(part)
    log.close()
    whole, kept = b"".join(parts), path.read_bytes()
    if len(whole) <= 1000:
        assert kept == whole
    else:
        assert kept == whole[:500] + f"\n[… {len(whole) - 1000} bytes left out here …]\n".encode() + whole[-500:]


@given(st.integers(0, 3))
def test_a_tail_starts_at_a_character(tmp_path_factory: pytest.TempPathFactory, shift: int) -> None:
    log = BoundedLog(tmp_path_factory.getbasetemp() / "log", 1000)
    log.write(b"x" * shift + "😀".encode() * 3000 + b"x" * shift)
    tail = log.tail()
    log.close()
    assert set(tail) <= {"😀", "x"} and TAIL_BYTES - 4 < len(tail.encode()) <= TAIL_BYTES


def test_a_log_path_stays_in_its_folder(tmp_path: Path) -> None:
    for rollout_id in ("..", ".", "a/../../b", "/etc", "ok:1.2"):
        path = log_path(tmp_path, rollout_id, "0")
        assert path.resolve().is_relative_to(tmp_path) and path.parent.parent == tmp_path


def test_a_word_too_long_for_a_file_name_is_no_file(tmp_path: Path) -> None:
    code = "x" * 5000
    command = build_command(["echo", code], {}, name="agent.command", base=tmp_path, directory=None, path="/bin")
    assert command.argv[1:] == [code]

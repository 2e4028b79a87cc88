"""From a run's command and environment, with templates of task fields, to what is executed.

How names in a command are found (`base` is the run file's folder):

- `argv[0]` with a slash is relative to the working folder that the run gave (`agent.directory`), else to `base`.
  Without a slash it is looked up on PATH which starts with the folder of Leyden's own interpreter, then there.
- Without `agent.directory` the process runs in a fresh workspace; so that files of the run are still found, every other
  item that names an existing file in `base` is made absolute. Items with a template in them never are: a task's text
  must not turn into a path.
- A string without shell syntax is the same as the list of its words. Any other string is run by `/bin/sh -c` as it is,
  and relative paths in it are seen from the working folder.

A task field never becomes shell syntax: in a shell string each `{{ … }}` is handed over as a positional parameter,
which the shell doesn't parse again. Outside quotes it is exactly one word.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, UndefinedError, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

from leyden.errors import PreflightError

FUNCTION_RUNNER = Path(__file__).with_name("run_function.py")
_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_WORD = re.compile(r"(?:\{\{.*?\}\}|\S)+", re.DOTALL)
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`\\\"'*?\[\]#~!{}\n]")
_ASSIGNMENT = re.compile(r"\s*\w+=")
_PARAMETERS = "__leyden_parameters__"
_ATTRIBUTE = re.compile(r"has no (?:attribute|element) '?(.+?)'?$|^'(.+?)' is undefined$")


class Unusable(Exception):
    """The command or its environment can't be made for this task. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is executed. `shown` is how a person knows it, `files` are the run's own that the run file names in it."""

    argv: list[str]
    shown: str
    shell: bool = False
    files: tuple[Path, ...] = ()


def build_command(
    command: list[str] | str, task: Any, *, name: str, base: Path, directory: Path | None, path: str
) -> Command:
    """The command for a task. `name` is its key in the run file, `path` the PATH that its environment will have.

    Raises:
        Unusable: a template names a field that the task lacks, or the command isn't found.
    """
    words = _words(command)
    if words is None:
        assert isinstance(command, str)
        parameters: list[str] = []
        text = render(command, task, name, parameters)
        return Command(["/bin/sh", "-c", text, "sh", *parameters], command, shell=True)
    if not words:
        raise Unusable(f"{name} is empty: give the program to run")
    argv = [render(item, task, f"{name}[{i}]") for i, item in enumerate(words)]
    program = _find_program(argv[0], directory or base, path)
    if program is None:
        raise Unusable(f"{name}: command not found: {argv[0]!r}")
    files: list[Path] = []
    if not _is_template(words[0]) and Path(program).is_relative_to(directory or base):
        files.append(Path(program))
    for i, item in enumerate(words[1:], start=1):
        if not _is_template(item) and os.path.isfile(base / item):
            files.append(base / item)
            if directory is None:
                argv[i] = str(base / item)
    return Command([program, *argv[1:]], " ".join(words), files=tuple(files))


def check_command(command: list[str] | str, directory: Path, name: str) -> None:
    """Whether a run's command can be found, before anything runs. Only what is the same for every task is looked at.

    `directory` is where relative names are found, `name` whose command it is.

    Raises:
        PreflightError: naming what isn't there.
    """
    words = _words(command)
    if words is None:
        return
    if not words:
        raise PreflightError(f"{name}.command is empty: give the program to run")
    program = words[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if not _is_template(program) and _find_program(program, directory.resolve(), path) is None:
        raise PreflightError(f"{name}.command: command not found: {program!r} (looked on PATH and in {directory})")
    script = words[1] if len(words) > 1 and Path(program).name.startswith("python") else ""
    if script.endswith(".py") and not _is_template(script) and not (directory / script).is_file():
        raise PreflightError(f"{name}.command: there is no file {script!r} in {directory}")


def class_command(agent_class: str, base: Path) -> Command:
    """The command that runs an Agent Lightning agent class (`module.Class` or `module:Class`) found from `base`."""
    runner = Path(__file__).with_name("run_class.py")
    return Command([sys.executable, str(runner), str(base), agent_class], agent_class)


def function_command(function: str, base: Path) -> Command:
    """The command that runs a grader `module:function` found from `base`."""
    top = base / function.partition(":")[0].partition(".")[0]
    files = tuple(p for p in (top, top.with_name(f"{top.name}.py")) if p.exists())
    return Command([sys.executable, str(FUNCTION_RUNNER), str(base), function], function, files=files)


def check_function(function: str, base: Path, name: str) -> None:
    """Whether the module of a grader `module:function` can be found, before anything runs.

    Raises:
        PreflightError: naming the module.
    """
    top = function.partition(":")[0].partition(".")[0]
    if not any((base / file).exists() for file in (top, f"{top}.py")) and find_spec(top) is None:
        raise PreflightError(f"{name}.function: there is no module {top!r} in {base.resolve()}, and none is installed")


def build_env(env: Mapping[str, str], task: Any, name: str) -> dict[str, str]:
    """The run's own environment for a task.

    Raises:
        Unusable: a template names a field that the task lacks, or a name is one of Leyden's.
    """
    for key in env:
        if key.startswith("LEYDEN_"):
            raise Unusable(f"{name}.{key}: names that begin with LEYDEN_ are Leyden's own, choose another")
    return {key: render(value, task, f"{name}.{key}") for key, value in env.items()}


def env_from_map(task: Any, env_map: Mapping[str, str]) -> dict[str, str]:
    """Agent Lightning's `env_map`: `input.a.b.0` paths are looked up; any other text is meant literally.

    Values that aren't text are written as JSON.

    Raises:
        Unusable: a path that the task doesn't have.
    """
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in ((name, _at_path(task, path)) for name, path in env_map.items())
    }


def render(text: str, task: Any, name: str, parameters: list[str] | None = None) -> str:
    """`text` as a sandboxed Jinja template over `input`, the task row. `name` says where it stands in the run file.

    With `parameters`, values are appended to it and `"${n}"` is written in their place.

    Raises:
        Unusable: naming the missing field and the template.
    """
    if not _is_template(text):
        return text
    try:
        return _template(text, parameters is not None).render({"input": task, _PARAMETERS: parameters})
    except UndefinedError as e:
        found = _ATTRIBUTE.search(str(e))
        field = repr(found[1] or found[2]) if found else str(e)
        raise Unusable(f"the task has no field {field}, which the template of {name} needs: {text!r}") from e
    except Exception as e:
        raise Unusable(f"the template of {name} failed ({type(e).__name__}: {e}): {text!r}") from e


def _words(command: list[str] | str) -> list[str] | None:
    """A command's items; None when it needs a shell."""
    if isinstance(command, list):
        return command
    if _SHELL_SYNTAX.search(_EXPRESSION.sub("", command)) or _ASSIGNMENT.match(command):
        return None
    return _WORD.findall(command)


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text or "{#" in text


@lru_cache(maxsize=256)
def _template(text: str, shell: bool) -> Template:
    return (_SHELL if shell else _PLAIN).from_string(text)


@pass_context
def _as_parameter(context: Context, value: Any) -> str:
    parameters: list[str] = context[_PARAMETERS]
    # str() of an undefined value raises, as it has to.
    parameters.append(str(value))
    return f'"${{{len(parameters)}}}"'


_PLAIN = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_SHELL = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_as_parameter)


def _find_program(program: str, folder: Path, path: str) -> str | None:
    if os.sep in program:
        found = folder / program
        return str(found) if found.is_file() else None
    found = shutil.which(program, path=path)
    if found is None and program in ("python", "python3"):
        return sys.executable
    if found is None and program and os.access(folder / program, os.X_OK) and (folder / program).is_file():
        return str(folder / program)
    return found


def _at_path(task: Any, path: str) -> Any:
    if path == "input":
        return task
    if not path.startswith("input."):
        return path
    value = task
    for part in path.split(".")[1:]:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise Unusable(f"the task has no field {part!r}, which the path {path!r} in local.env_map needs")
    return value

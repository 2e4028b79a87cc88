"""The local backend: agents and graders as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import orjson

from leyden.controller import sandbox
from leyden.controller.bridge import Enclosure
from leyden.controller.cgroups import Cgroups
from leyden.controller.commands import (
    FUNCTION_RUNNER,
    Command,
    Unusable,
    build_command,
    build_env,
    class_command,
    env_from_map,
    function_command,
)
from leyden.controller.environment import agent_environment, grader_environment, inherited, markers
from leyden.controller.folders import make_empty, remove_tree, write_private
from leyden.controller.limits import MB, Confinement
from leyden.controller.logfile import BoundedLog, LastLine, Pump, file_name, log_path
from leyden.controller.processes import Exited, Leader, ProcessTable
from leyden.controller.reconcile import StepEnd, StepKind
from leyden.controller.sandbox import SandboxError, View
from leyden.controller.seeds import Seeds
from leyden.controller.uploads import Uploads
from leyden.controller.warm import WarmStarter
from leyden.schema import AgentSpec, Claim, GraderSpec, ResourceLimits, WorkspaceSpec

NO_SEED = WorkspaceSpec()

CLASS_RUNNER_IMPORTS = ("asyncio", "inspect")
"""What run_class.py imports."""

GRACE: dict[StepKind, float] = {"exited": 0.0, "timeout": 1.0, "stopped": 0.5, "limit": 0.0}
"""Seconds between TERM and KILL. What an agent left running when it exited gets none; all is gone within 2 s."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """`base_dir` is the run file's folder; `gateway_url` is what agents are told, without a slash at the end."""

    gateway_url: str
    base_dir: Path
    work_dir: Path
    log_bytes: int = 1_000_000
    hidden: tuple[Path, ...] = ()
    """Folders of Leyden's that no sandbox shows, besides `work_dir`."""

    @property
    def logs_dir(self) -> Path:
        return self.work_dir / "logs"


@dataclass(frozen=True, slots=True)
class _Step:
    """What is run for an agent or a grader."""

    name: Literal["agent", "grader"]
    command: Command
    env: dict[str, str]
    cwd: Path
    log: Path
    limits: ResourceLimits
    view: View | None = None
    """What it sees, in a sandbox."""
    preload: list[str] = field(default_factory=list)
    shared_env: dict[str, str] = field(default_factory=dict)
    """The part of `env` that every agent of the run has."""


class LocalBackend:
    """Runs the steps of attempts. Each returns only when none of its processes is left."""

    def __init__(self, options: LocalOptions, table: ProcessTable, uploads: Uploads | None = None) -> None:
        self._options = options
        self._uploads = uploads
        self._table = table
        self._groups = Cgroups()
        self._named = False
        self._warm = WarmStarter(table)
        self._base = options.base_dir.resolve()
        self._work = options.work_dir.resolve()
        self._seeds = Seeds(table, self._base, self._work / "seeds", self._inherited(False))

    async def run_agent(self, claim: Claim, model: str | None, seconds: float, stop: asyncio.Event) -> StepEnd:
        """Run the claimed attempt's agent for at most `seconds`, or until `stop`."""
        rollout = claim.rollout
        config = rollout.config
        try:
            sandboxed = config.agent is not None and config.agent.sandbox != "none"
            env = self._inherited(sandboxed) | agent_environment(
                self._options.gateway_url, rollout.rollout_id, claim.attempt_id, claim.agent_key, model
            )
            if config.agent:
                env |= build_env(config.agent.env, rollout.input, "agent.env")
            if config.local:
                env |= env_from_map(rollout.input, config.local.env_map)
            workspace = self._make_workspace(claim)
            if config.agent and config.agent.workspace != NO_SEED:
                await self._seeds.fill(config.agent.workspace, rollout.input, workspace, stop)
            cwd, view = workspace, None
            if config.agent:
                directory = self._base / config.agent.directory if config.agent.directory else None
                command = build_command(
                    config.agent.command,
                    rollout.input,
                    name="agent.command",
                    base=self._base,
                    directory=directory,
                    path=env["PATH"],
                )
                cwd = directory or workspace
                if sandboxed:
                    view = self._view("agent", config.agent, command, claim, cwd)
            elif config.local and config.local.agent_class:
                # Agent Lightning's agents run where their code is.
                command, cwd = class_command(config.local.agent_class, self._base), self._base
            else:
                raise Unusable("the rollout's config has neither agent.command nor local.agent_class")
        except Unusable as e:
            return StepEnd("not_started", reason=str(e))
        except OSError as e:
            return StepEnd("not_started", reason=f"can't make the attempt's workspace: {e}")
        log = log_path(self._options.logs_dir, rollout.rollout_id, claim.attempt_id)
        limits = config.agent.limits if config.agent else ResourceLimits()
        step = _Step("agent", command, env, cwd, log, limits, view)
        if preload := (config.agent or config.local or AgentSpec(command="")).preload:
            raw = config.agent.env if config.agent else {}
            shared = self._inherited(False) | {name: text for name, text in raw.items() if env[name] == text}
            if view is not None:
                self._warm.refuse("they run in a sandbox", preload)
            else:
                preload = preload if config.agent else [*preload, *CLASS_RUNNER_IMPORTS]
                step = replace(step, preload=preload, shared_env=shared)
        return await self._run(claim, step, seconds, stop)

    async def run_grader(self, claim: Claim, agent: StepEnd, seconds: float, stop: asyncio.Event) -> StepEnd:
        """Run the claimed attempt's grader in the workspace that the agent left."""
        rollout = claim.rollout
        spec = rollout.config.grader
        if spec is None or claim.grader_key is None:
            return StepEnd("not_started", reason="the gateway gave no key for the grader")
        task_file = self._task_file(claim)
        log = log_path(self._options.logs_dir, rollout.rollout_id, claim.attempt_id)
        try:
            sandboxed = spec.sandbox != "none"
            env = self._inherited(sandboxed) | grader_environment(
                self._options.gateway_url,
                rollout.rollout_id,
                claim.attempt_id,
                claim.grader_key,
                task_file,
                log.resolve(),
                agent.code if agent.code is not None else -(agent.signal or 0),
            )
            env |= build_env(spec.env, rollout.input, "grader.env")
            given = (task_file, log.resolve())
            if spec.function is not None:
                command = function_command(spec.function, self._base)
                given = (*given, FUNCTION_RUNNER)
            else:
                command = build_command(
                    spec.command,
                    rollout.input,
                    name="grader.command",
                    base=self._base,
                    directory=None,
                    path=env["PATH"],
                )
            workspace = self.workspace(claim)
            view = self._view("grader", spec, command, claim, workspace, given) if sandboxed else None
            write_private(task_file, orjson.dumps(rollout.input))
        except Unusable as e:
            return StepEnd("not_started", reason=str(e))
        except OSError as e:
            return StepEnd("not_started", reason=f"can't write the grader's task file: {e}")
        try:
            grader_log = log.with_suffix(".grader.log")
            step = _Step("grader", command, env, workspace, grader_log, spec.limits, view)
            return await self._run(claim, step, seconds, stop)
        finally:
            task_file.unlink(missing_ok=True)

    async def clean(self, claim: Claim, *, keep_workspace: bool) -> None:
        """Delete what the attempt left on disk, logs excepted."""
        workspace = self.workspace(claim)
        if keep_workspace or not workspace.exists():
            return
        try:
            workspace.rmdir()
        except OSError:
            await asyncio.to_thread(remove_tree, workspace)

    def workspace(self, claim: Claim) -> Path:
        """The attempt's own folder."""
        name = f"{file_name(claim.rollout.rollout_id)}.{file_name(claim.attempt_id)}"
        return self._work / "workspaces" / name

    def tidy(self) -> None:
        """Reap what ended by itself. Call now and then."""
        self._table.tidy()
        self._groups.tidy()

    def close(self) -> None:
        """End what outlives attempts."""
        self._warm.close()

    def _inherited(self, sandboxed: bool) -> dict[str, str]:
        kept = inherited(os.environ, self._options.gateway_url)
        return sandbox.environment(kept) if sandboxed else kept

    def _view(
        self,
        name: str,
        spec: AgentSpec | GraderSpec,
        command: Command,
        claim: Claim,
        cwd: Path,
        given: tuple[Path, ...] = (),
    ) -> View:
        """What a step in a sandbox sees.

        Raises:
            Unusable: what it needs isn't there or can't be shown.
        """
        workspace = self.workspace(claim)
        hidden = (self._work, sandbox.own_package(), *(p.resolve() for p in self._options.hidden))
        readable = [*sandbox.interpreter(), *command.files, *([cwd] if cwd != workspace else [])]
        for i, item in enumerate(spec.readable):
            path = self._base / os.path.expanduser(item)
            if not path.exists():
                raise Unusable(f"{name}.readable[{i}]: there is no file or folder {str(path)!r}")
            if any(path.resolve().is_relative_to(h) for h in hidden):
                raise Unusable(f"{name}.readable[{i}]: {str(path)!r} is one of Leyden's own, which no sandbox shows")
            readable += [path, path.resolve()]
        disk = None if spec.limits.disk_mb is None else spec.limits.disk_mb * MB
        view = View(workspace, tuple(readable), hidden, given, disk)
        program = Path(command.argv[0])
        if not view.shows(program):
            raise Unusable(
                f"{name}.command: the sandbox doesn't show {str(program.resolve())!r}: add the folder that it was "
                f"installed in to {name}.readable"
            )
        return view

    def _make_workspace(self, claim: Claim) -> Path:
        workspace = self.workspace(claim)
        make_empty(workspace)
        return workspace

    def _task_file(self, claim: Claim) -> Path:
        return self._work / "tasks" / f"{self.workspace(claim).name}.json"

    async def _run(self, claim: Claim, step: _Step, seconds: float, stop: asyncio.Event) -> StepEnd:
        try:
            log = BoundedLog(step.log, self._options.log_bytes)
        except OSError as e:
            return StepEnd("not_started", reason=f"can't write the {step.name}'s log: {e}")
        if self._uploads is not None:
            self._uploads.opened(claim.rollout.rollout_id, claim.attempt_id, step.name, step.log)
        output = LastLine()
        # An agent's output stays in order through one pipe. A grader's standard output is its answer.
        pumps: list[Pump] = []
        try:
            pumps.append(Pump(lambda data: (log.write(data), output.write(data))[0]))
            if step.name == "grader":
                pumps.append(Pump(log.write))
        except OSError as e:
            for pump in pumps:
                pump.close()
            self._close(log, step)
            return StepEnd("not_started", reason=f"can't make a pipe for the {step.name}'s output: {e}")
        confinement = Confinement(step.limits, self._groups, self.workspace(claim))
        marks = markers(claim.rollout.rollout_id, claim.attempt_id)
        tree = self._table.add(marks, group=confinement.group, wrapped=step.view is not None)
        exited: Exited | None = None
        process: Leader | None = None
        watching: asyncio.Task[str] | None = None
        enclosure: Enclosure | None = None
        ended: StepKind = "stopped"
        reason: str | None = None

        def start(argv: list[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
            return self._table.start(
                tree,
                argv,
                env=step.env,
                cwd=step.cwd,
                stdout=pumps[0].write_end,
                stderr=pumps[-1].write_end,
                pass_fds=pass_fds,
                enter=confinement.enter if confinement.needed else None,
            )

        try:
            if not stop.is_set():
                try:
                    if step.view is not None:
                        enclosure = Enclosure(self._options.gateway_url)
                        process = await enclosure.start(self._bwrap(step, step.view), start)
                    if step.preload:
                        process = process or await self._warm.start(
                            tree,
                            step.command,
                            step.preload,
                            shared_env=step.shared_env,
                            env=step.env,
                            cwd=step.cwd,
                            stdout=pumps[0].write_end,
                            stderr=pumps[-1].write_end,
                            enter=confinement.enter,
                        )
                    process = process or start(step.command.argv)
                except (OSError, ValueError, subprocess.SubprocessError) as e:
                    reason = _cannot_start(step.name, step.command, step.cwd, e)
                except SandboxError as e:
                    # What bwrap said comes through the pump.
                    await asyncio.sleep(0.05)
                    said = f" ({log.last_line()})" if log.last_line() else ""
                    reason = f"can't make the {step.name}'s sandbox: {e}{said}"
                if process is None:
                    log.write(f"leyden: {reason}\n".encode())
                    await self._table.end(tree)
                    return StepEnd("not_started", reason=reason, tail=log.tail())
                for pump in pumps:
                    pump.close_write_end()
                exited = Exited(process.pid)
                if confinement.watched:
                    watching = asyncio.create_task(confinement.watch(lambda: self._table.members(tree)))
                ended = await exited.wait(seconds, stop, watching)
                if ended == "limit" and watching is not None:
                    reason = watching.result()
            await self._table.end(tree, grace=GRACE[ended])
            code = process.returncode if process is not None else None
            if step.view is not None and code is not None and code > 128:
                # bwrap passes a signal on as a shell does.
                code = 128 - code
            if ended == "exited" and code is not None:
                ended, reason = confinement.judge(code)
        finally:
            # Here after a cancellation too, when nothing may be awaited any more.
            self._table.abandon(tree)
            confinement.close()
            if enclosure is not None:
                enclosure.close()
            if watching is not None:
                watching.cancel()
            if exited is not None:
                exited.close()
            for pump in pumps:
                pump.close()
            self._close(log, step)
        if step.view is not None and code == 1 and log.last_line().startswith("bwrap: "):
            ended, reason = "not_started", f"can't make the {step.name}'s sandbox: {log.last_line()}"
        return StepEnd(
            ended,
            code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            reason=reason,
            shell=step.command.shell,
            last_line=log.last_line(),
            output=output.text(),
            tail=log.tail(),
        )

    def _close(self, log: BoundedLog, step: _Step) -> None:
        log.close()
        if self._uploads is not None:
            self._uploads.closed(step.log)

    def _bwrap(self, step: _Step, view: View) -> Callable[[list[str]], list[str]]:
        """Makes the command of a step's sandbox from further options of bwrap's."""
        bwrap, names = sandbox.find_bwrap(), self._work / "sandbox"
        if not self._named:
            sandbox.write_names(names, self._options.gateway_url)
            self._named = True
        return lambda options: [bwrap, *sandbox.arguments(view, names, step.cwd, step.command.argv, options=options)]


def _cannot_start(step: str, command: Command, cwd: Path, error: Exception) -> str:
    if not cwd.is_dir():
        return f"can't start the {step}: its folder {str(cwd)!r} doesn't exist"
    why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return f"can't start the {step}'s command {command.shown!r}: {why}"

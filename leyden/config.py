"""The run file: one YAML document, validated here, with `key=value` overrides.

Every section is a pydantic model that forbids unknown keys; `load_run` turns pydantic's complaints into one sentence
each, with the nearest right name. Relative paths in a run file are relative to that file.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leyden.errors import ConfigError, nearest
from leyden.schema import AgentSpec, CaptureConfig, EngineModel, GraderSpec, RetryPolicy, Sampling


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class DataConfig(Section):
    """Where tasks come from: a `.jsonl`/`.json` file of rows, or `file.py:function` called as `function(seed)`."""

    train: str
    heldout: str | None = None
    shuffle: bool = True


class LoraConfig(Section):
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class LossConfig(Section):
    """Clipped policy-gradient loss. Under `rollout_mean` a rollout's weight doesn't depend on how it became rows."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    normalisation: Literal["rollout_mean", "token_mean"] = "rollout_mean"


class TrainingConfig(Section):
    """One step: `tasks_per_step` × `rollouts_per_task` rollouts, then one optimizer step an epoch over their rows."""

    backend: Literal["torch"] = "torch"
    steps: int = Field(default=10, ge=0)
    tasks_per_step: int = Field(default=8, ge=1)
    rollouts_per_task: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, ge=1, description="passes over a step's rows, each ending in an optimizer step")
    lora: LoraConfig | None = None
    algorithm: Literal["grpo"] = "grpo"
    advantage_std: bool = Field(default=True, description="divide by the group's standard deviation")
    loss: LossConfig = LossConfig()
    micro_batch_tokens: int = Field(
        default=4096, ge=16, description="padded tokens per forward pass; gradients accumulate"
    )
    max_row_tokens: int = Field(default=8192, ge=16, description="longer rows are dropped, counted and named")
    agent_error: Literal["reward", "drop"] = Field(
        default="reward", description="failed agents train on failure_reward, or not at all"
    )
    timeout: Literal["reward", "drop"] = "reward"
    failure_reward: float = 0.0
    min_group: int = Field(default=2, ge=1, description="smaller groups of valid rollouts aren't trained")
    max_infra_share: float = Field(
        default=0.5, ge=0, le=1, description="a step with a larger share of infra failures stops the run"
    )
    checkpoint_every: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    stuck_after_seconds: float = Field(
        default=900, gt=0, description="no rollout ended for so long: the run stops and says on what"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the update; default: all cores")
    device: Literal["auto", "cpu", "cuda"] = "auto"


class ValidationConfig(Section):
    """Held-out rollouts, never trained: before the first step, after the last, and every `every` steps (0: not)."""

    tasks: int = Field(default=100, ge=0, description="first rows of the held-out set; 0 turns validation off")
    every: int = Field(default=0, ge=0)
    sampling: Sampling = Field(default=Sampling(temperature=0.0), description="default: the run's, at temperature 0")


class EngineConfig(Section):
    """The embedded engine. `host` is also the address that a gateway elsewhere reaches it by."""

    host: str = "127.0.0.1"
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=64, ge=1, description="sequences decoded together")
    max_model_len: int | None = Field(default=None, ge=16, description="default: the model's own, at most 8192")
    kv_cache_tokens: int | None = Field(default=None, ge=16, description="default: from free memory")
    port: int = Field(default=0, ge=0, le=65535, description="0 picks a free one")


class OtherEngine(EngineModel):
    """An engine that was started elsewhere, such as a frozen model's."""

    model_config = ConfigDict(extra="forbid")


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 picks a free one")
    request_timeout_seconds: float = Field(default=600, gt=0, description="longest wait for one model call")
    keepalive_seconds: float = Field(default=10, gt=0)
    replay_grace_seconds: float = Field(default=10, ge=0)
    retention_days: float | None = Field(default=None, gt=0, description="rollouts that ended so long ago are deleted")


class HooksConfig(Section):
    """Functions of the user's, called when rollouts are queued and end (leyden/hooks.py)."""

    file: str = Field(description="a Python file with on_enqueue, on_succeeded, on_failed, or some of them")
    timeout_seconds: float = Field(default=10, gt=0, description="longest that one call may take")


class ControllerConfig(Section):
    concurrency: int = Field(default=16, ge=1, description="agents running at once")
    lease_seconds: float = Field(default=30, gt=1)
    log_bytes: int = Field(default=1_000_000, ge=1000, description="kept per attempt, head and tail")
    keep_workspaces: Literal["all", "failed", "none"] = "failed"


class RunConfig(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    model: str = Field(description="Hugging Face id, local folder, or smollm2-135m-instruct")
    seed: int = 0
    output_dir: str | None = Field(default=None, description="default: runs/NAME beside where the command was started")
    agent: AgentSpec
    grader: GraderSpec | None = None
    retry: RetryPolicy = RetryPolicy()
    hooks: HooksConfig | None = None
    data: DataConfig
    sampling: Sampling = Sampling()
    capture: CaptureConfig = CaptureConfig()
    engines: list[OtherEngine] = Field(
        default=[], description="engines beside the trained one, for capture.routes to lead to"
    )
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    controller: ControllerConfig = ControllerConfig()

    @model_validator(mode="before")
    @classmethod
    def _validation_sampling(cls, raw: Any) -> Any:
        """Held-out rollouts are sampled like the others but greedily, where the run file doesn't say otherwise."""
        if not isinstance(raw, dict):
            return raw
        sampling, validation = raw.get("sampling") or {}, raw.get("validation") or {}
        own = validation.get("sampling") if isinstance(validation, dict) else None
        if not isinstance(sampling, dict) or not isinstance(validation, dict) or not isinstance(own or {}, dict):
            return raw
        known = {k: v for k, v in sampling.items() if k in Sampling.model_fields}
        return raw | {"validation": validation | {"sampling": known | {"temperature": 0.0} | (own or {})}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.training.rollouts_per_task < self.training.min_group:
            raise ValueError(
                f"training.rollouts_per_task={self.training.rollouts_per_task} is below training.min_group="
                f"{self.training.min_group}: no group could ever train"
            )
        served = {self.name, *(e.model for e in self.engines)}
        for route in self.capture.routes:
            if route.model not in served:
                raise ValueError(
                    f"capture.routes: {route.match!r} leads to model {route.model!r}, which no engine serves; "
                    f"there are {', '.join(sorted(served))}"
                )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 gives every rollout of a group the same answer: nothing to learn from"
            )
        return self


def load_run(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file, apply `a.b=value` overrides (values are YAML), validate, and make its paths absolute.

    Raises:
        ConfigError: with one line per fault, naming the key and the nearest right name.
    """
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"can't read the run file {path}: {e.strerror}") from e
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} isn't valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, such as `name: …`, `model: …`, `agent: …`")
    raw = apply_overrides(raw, overrides or [])
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as e:
        raise ConfigError("\n".join(_explain(err) for err in e.errors()) + f"\n(in {path})") from e
    base = path.resolve().parent
    config.data.train = str(base / config.data.train)
    if config.data.heldout is not None:
        config.data.heldout = str(base / config.data.heldout)
    if config.hooks is not None:
        config.hooks.file = str(base / config.hooks.file)
        if not Path(config.hooks.file).is_file():
            raise ConfigError(f"hooks.file: there is no file {config.hooks.file}")
    if config.agent.directory is not None:
        config.agent.directory = str(base / config.agent.directory)
    if (base / config.model).is_dir():
        config.model = str(base / config.model)
    return config


def apply_overrides(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`raw` with each `a.b.c=value` set; later ones win.

    Raises:
        ConfigError: when an override has no `=`, an empty key, or reaches into something that isn't a mapping.
    """
    raw = copy.deepcopy(raw)
    for item in overrides:
        key, eq, value = item.partition("=")
        parts = key.strip().split(".")
        if not eq or not all(parts):
            raise ConfigError(f"override {item!r} isn't key=value (for example training.steps=20)")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise ConfigError(f"override {item!r}: the value isn't valid YAML") from e
        # YAML 1.1 reads 1e-5 as a string; people mean the number.
        if isinstance(parsed, str):
            try:
                parsed = float(parsed) if any(c.isdigit() for c in parsed) else parsed
            except ValueError:
                pass
        node = raw
        for part in parts[:-1]:
            child = node.get(part)
            if child is None:
                child = node[part] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"override {item!r}: {part!r} holds a value, not a section")
            node = child
        node[parts[-1]] = parsed
    return raw


def dump_run(config: RunConfig) -> str:
    """The resolved run file, every default filled in, as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _explain(err: Any) -> str:
    where = ".".join(str(p) for p in err["loc"] if p not in ("list[str]", "str"))
    if err["type"] == "extra_forbidden":
        names = _keys_at(err["loc"][:-1])
        near = nearest(str(err["loc"][-1]), names)
        hint = f"did you mean {near!r}?" if near else f"known keys here: {', '.join(sorted(names))}"
        return f"unknown key {where!r}: {hint}"
    if err["type"] == "missing":
        return f"missing key {where!r}"
    message = err["msg"].removeprefix("Value error, ")
    got = err.get("input")
    shown = "" if isinstance(got, dict | list) or got is None else f" (got {got!r})"
    return f"{where}: {message}{shown}" if where else message


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the section at `loc`."""
    model: type[BaseModel] = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:
            return list(model.model_fields)
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
                break
    return list(model.model_fields)

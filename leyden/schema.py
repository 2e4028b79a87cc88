"""Wire models shared by gateway, controller, trainer and client.

The shapes are a superset of the Agent Lightning 1.0 admin API, so its clients keep working. docs/architecture.md lists
the routes. Everything here is plain data: no I/O, no clocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What a database column can hold."""

DEFAULT_ATTEMPT_ID = "0"
"""Id of a rollout's first attempt; later ones count up as decimal strings."""


class RolloutState(StrEnum):
    """A rollout's life: `queuing → running → succeeded | failed`. Terminal states are final."""

    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


TERMINAL_STATES = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED})


class Outcome(StrEnum):
    """Why an attempt ended."""

    OK = "ok"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    INFRA = "infra"
    CANCELLED = "cancelled"


class Sampling(BaseModel):
    """Sampling that the run fixes for a rollout's calls. Only these are used, whatever the client asks for.

    `max_tokens` caps what the client asks for; None leaves the client's own limit (or the room left in the context).
    """

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 means off")
    max_tokens: int | None = Field(default=None, ge=1)


class ResourceLimits(BaseModel):
    """The most that an agent or a grader may use, all its processes together. MB are of 1,048,576 bytes.

    More memory or disk than that ends it. More processes and larger files are refused to it.
    """

    model_config = ConfigDict(extra="forbid")

    memory_mb: int | None = Field(default=None, ge=16)
    cpus: float | None = Field(default=None, gt=0, description="cores' worth of CPU time")
    processes: int | None = Field(default=None, ge=4, description="processes and threads at once")
    file_mb: int | None = Field(default=None, ge=1, description="size of a single file")
    disk_mb: int | None = Field(default=None, ge=1, description="size of the workspace")


Sandbox = Literal["none", "bubblewrap"]


class WorkspaceSpec(BaseModel):
    """What an attempt's workspace holds at the start. All strings are templates over `input`, names of `files` aside.

    At most one of `directory` (copied), `tarball` (unpacked) and `git` (an address or a folder, at `revision`: the
    workspace gets a repository with that commit only). Relative paths are seen from the run file's folder. `files` come
    last: path in the workspace → text.
    """

    model_config = ConfigDict(extra="forbid")

    directory: str | None = None
    tarball: str | None = None
    git: str | None = None
    revision: str = "HEAD"
    files: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> WorkspaceSpec:
        if sum(s is not None for s in (self.directory, self.tarball, self.git)) > 1:
            raise ValueError("give one of directory, tarball and git")
        for path in self.files:
            parts = path.split("/")
            if path.startswith("/") or ".." in parts or parts[-1] in ("", "."):
                raise ValueError(f"files: {path!r} isn't the path of a file inside the workspace")
        return self


class AgentSpec(BaseModel):
    """The agent process. Strings in `command` and `env` are Jinja templates over `input` (the task row)."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] | str
    env: dict[str, str] = Field(default_factory=dict)
    directory: str | None = Field(
        default=None, description="working directory; None gives a fresh workspace per attempt"
    )
    workspace: WorkspaceSpec = Field(default_factory=WorkspaceSpec)
    preload: list[str] = Field(
        default_factory=list,
        description="Python modules imported once, in a process that is forked for each agent, where that is safe",
    )
    timeout_seconds: float = Field(default=600, gt=0)
    limits: ResourceLimits = ResourceLimits()
    sandbox: Sandbox = "none"
    readable: list[str] = Field(default=[], description="files and folders that a sandbox shows, read-only")


class GraderSpec(BaseModel):
    """The grading process, run after the agent has exited, in the attempt's workspace.

    A `command` prints the reward as its last line of output (a number, or JSON with a `reward` key), or posts it
    itself. A `function` (`module:function`, found from the run file's folder) returns it;
    leyden/controller/run_function.py says what it is given.
    """

    model_config = ConfigDict(extra="forbid")

    command: list[str] | str = ""
    function: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=300)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=120, gt=0)
    limits: ResourceLimits = ResourceLimits()
    sandbox: Sandbox = "none"
    readable: list[str] = Field(default=[], description="files and folders that a sandbox shows, read-only")

    @model_validator(mode="after")
    def _one_way(self) -> GraderSpec:
        if bool(self.command) == (self.function is not None):
            raise ValueError("give either command or function (module:function)")
        return self


class LocalConfig(BaseModel):
    """Agent Lightning's local runner config: a Python class and environment paths such as `input.question`."""

    agent_class: str | None = None
    preload: list[str] = Field(default_factory=list, description="as that of AgentSpec")
    env_map: dict[str, str] = Field(default_factory=dict)


class K8sConfig(BaseModel):
    """Agent Lightning's Kubernetes runner config."""

    job_template: str | None = None


class ModelRoute(BaseModel):
    """Where calls go whose client asks for a model that `match` (a pattern such as `claude-haiku-*`) fits."""

    model_config = ConfigDict(extra="forbid")

    match: str = Field(min_length=1)
    model: str = Field(min_length=1, description="name under which its engines are registered")
    trained: bool = True


class CallKind(StrEnum):
    """What a call is for."""

    MAIN = "main"
    TITLE = "title"
    SUMMARY = "summary"
    SUBAGENT = "subagent"
    OTHER = "other"


class CaptureConfig(BaseModel):
    """How a rollout's calls are made into tokens, and which of them are trained.

    `bridge` continues a recorded conversation by its recorded ids plus the encoding of the new messages; `render`
    renders every prompt in full, as deployed; `engine` lets the engine render and parse. The first of `routes` that
    fits decides where a call goes; without one it goes to the served model.
    """

    model_config = ConfigDict(extra="forbid")

    mode: Literal["bridge", "render", "engine"] = "bridge"
    train_kinds: list[CallKind] = Field(default=[CallKind.MAIN, CallKind.SUMMARY, CallKind.SUBAGENT])
    train_truncated: bool = Field(
        default=True, description="whether answers that were cut off by their limit are trained"
    )
    routes: list[ModelRoute] = Field(default_factory=list)


class RetryPolicy(BaseModel):
    """How many attempts a rollout has in all when one ends so: 1 means that such an end is final.

    The next attempt is queued after `backoff_seconds`, twice as long after each further one, `backoff_max_seconds` at
    most.
    """

    model_config = ConfigDict(extra="forbid")

    infra: int = Field(default=3, ge=1)
    agent_error: int = Field(default=1, ge=1)
    timeout: int = Field(default=1, ge=1)
    backoff_seconds: float = Field(default=1.0, ge=0)
    backoff_max_seconds: float = Field(default=60.0, ge=0)


class RolloutConfig(BaseModel):
    """How a rollout is to be executed and sampled."""

    timeout_seconds: float = Field(default=3600, gt=0, description="whole attempt, agent and grader together")
    agent: AgentSpec | None = None
    grader: GraderSpec | None = None
    sampling: Sampling | None = None
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    retry: RetryPolicy = Field(default_factory=RetryPolicy)
    local: LocalConfig | None = None
    k8s: K8sConfig | None = None


class RolloutMetadata(BaseModel):
    """Free-form; the trainer fills `run`, `step`, `group`, `task_id`, and Agent Lightning's two keys."""

    model_config = ConfigDict(extra="allow")

    run: str | None = None
    step: Int64 | None = None
    group: str | None = None
    task_id: str | None = None
    batch_idx: int | None = None
    sample_idx_in_batch: int | None = None


class RolloutCreate(BaseModel):
    """One rollout to enqueue. A caller-supplied `rollout_id` that exists returns the existing rollout unchanged."""

    input: Any
    is_train: bool = True
    config: RolloutConfig | None = None
    metadata: RolloutMetadata | None = None
    rollout_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")


class RolloutStatus(BaseModel):
    """Lifecycle status. `outcome`, `reason` and `reward` are those of the last attempt."""

    state: RolloutState = RolloutState.QUEUING
    last_attempt_id: str | None = None
    outcome: Outcome | None = None
    error_message: str | None = None
    reward: float | None = None
    calls: int = 0
    k8s_job_name: str | None = None
    version: int = 1
    created_at: float
    updated_at: float


class Rollout(BaseModel):
    """One execution of the agent on one task."""

    rollout_id: str
    input: Any
    is_train: bool = True
    config: RolloutConfig
    metadata: RolloutMetadata = Field(default_factory=RolloutMetadata)
    status: RolloutStatus


class StatusPatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: RolloutState | None = None
    outcome: Outcome | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    k8s_job_name: str | None = None


class RolloutPatch(BaseModel):
    """PATCH body. Setting a terminal state ends the running attempt (`outcome` defaults to ok / agent_error)."""

    status: StatusPatch | None = None


class Attempt(BaseModel):
    """One try at a rollout."""

    attempt_id: str
    controller_id: str | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    started_at: float
    ended_at: float | None = None
    lease_expires_at: float | None = None
    reward: float | None = None
    calls: int = 0
    late_writes: int = 0
    log_tail: str | None = None


class RolloutDetail(BaseModel):
    """GET /api/rollouts/{id}. `attempts` are ids, as Agent Lightning returns them; `attempt_details` say the rest."""

    rollout: Rollout
    attempts: list[str]
    attempt_details: list[Attempt] = Field(default_factory=list)


class RolloutPage(BaseModel):
    """GET /api/rollouts/page: newest first, `total` and `by_state` counted on the server over all matches."""

    items: list[Rollout]
    next_cursor: str | None = None
    total: int
    by_state: dict[str, int]


class TerminalItem(BaseModel):
    rollout_id: str
    state: RolloutState
    data_id: str = ""
    is_train: bool = True
    outcome: Outcome | None = None
    reward: float | None = None
    calls: int = 0
    metadata: RolloutMetadata = Field(default_factory=RolloutMetadata)


class TerminalPage(BaseModel):
    """Rollouts in the order in which they ended, from cursor `after` on."""

    items: list[TerminalItem]
    next_after: int
    total_terminal: int


class Event(BaseModel):
    """Something that happened in an attempt: `reward`, `model_request`, or any name of the user's."""

    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float
    data: dict[str, Any]


class EventCreate(BaseModel):
    """POST body. Data of a `reward` is that of RewardData."""

    event_type: str = Field(min_length=1, max_length=100)
    data: dict[str, Any] = Field(default_factory=dict)


class RewardData(BaseModel):
    """Data of a `reward` event. Strings, booleans and non-finite numbers are refused (422).

    `value` is the attempt's reward, or with `call_id` that of one call. `per_call` gives calls rewards of their own, by
    call id; without a `value` beside it their sum is the attempt's. The last reward posted wins, for each call and for
    the attempt. A call without a reward of its own has the attempt's. With `source: infra` the attempt ends `infra`,
    whatever the value: the agent, or the grader, found its surroundings broken and says so in `reason`.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    value: FiniteFloat | None = None
    per_call: dict[str, FiniteFloat] | None = None
    call_id: str | None = None
    message: str | None = None
    source: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> RewardData:
        if self.value is None and not self.per_call:
            raise ValueError("value is missing: a finite number, or a mapping per_call with at least one call")
        if self.call_id is not None and (self.value is None or self.per_call is not None):
            raise ValueError("call_id needs a value, and can't go with per_call")
        return self


class EngineModel(BaseModel):
    """A registered engine, keyed by (model, endpoint). `endpoint` includes the OpenAI base path (`http://h:p/v1`)."""

    model: str
    endpoint: str
    version: int = 0
    kind: Literal["leyden", "vllm", "sglang", "openai"] = "vllm"
    max_model_len: int | None = Field(default=None, ge=1)
    max_concurrency: int = Field(default=256, ge=1, description="calls that it is given at once; others wait in turn")


class EngineCapability(BaseModel):
    """What a probe found out about an engine; None where it couldn't tell."""

    reachable: bool | None = None
    ids: bool | None = None
    logprobs: bool | None = None
    processed: bool | None = Field(
        default=None, description="log-probs are of the distribution that was sampled from, temperature included"
    )
    max_model_len: int | None = Field(default=None, description="context that the engine itself says it has")
    detail: str = ""
    checked_at: float = 0.0


class RegisteredEngine(EngineModel):
    """GET /api/models: an engine, what it can do (None: not asked yet), and what it is doing for this gateway."""

    capability: EngineCapability | None = None
    running: int = 0
    waiting: int = 0


class ClaimRequest(BaseModel):
    """Long poll for work. Each claimed rollout starts a new attempt, leased to the controller."""

    controller_id: str = Field(min_length=1, max_length=200)
    limit: int = Field(default=1, ge=1, le=1000)
    lease_seconds: float = Field(default=30, gt=0, le=3600)
    wait_seconds: float = Field(default=0, ge=0, le=60)


class Claim(BaseModel):
    """A leased attempt with the keys that its processes get. The keys are shown here once and stored hashed."""

    rollout: Rollout
    attempt_id: str
    agent_key: str
    grader_key: str | None = None


class AttemptRef(BaseModel):
    rollout_id: str
    attempt_id: str


class Heartbeat(BaseModel):
    controller_id: str
    lease_seconds: float = Field(default=30, gt=0, le=3600)
    attempts: list[AttemptRef]
    wait_seconds: float = Field(default=0, ge=0, le=60, description="answered then, or when an attempt is taken away")


class HeartbeatReply(BaseModel):
    """`lost` attempts are no longer this controller's (cancelled, deleted, requeued): end their processes."""

    lost: list[AttemptRef]


class PhaseReport(BaseModel):
    """`grading` means that the agent's processes are gone: its key is revoked, the grader's key opens."""

    controller_id: str
    phase: Literal["grading"]


class OutcomeReport(BaseModel):
    """How an attempt ended. Ends the attempt; a retry, if the class allows one, is queued by the gateway."""

    controller_id: str
    outcome: Outcome
    reason: str | None = None
    exit_code: Int64 | None = None
    signal: Int64 | None = None
    log_tail: str | None = Field(default=None, max_length=65536)


LogPart = Literal["agent", "grader"]
LOG_NEXT, LOG_COMPLETE = "Leyden-Log-Next", "Leyden-Log-Complete"
"""Headers beside a log's text: where the next piece begins, and 1 when nothing follows."""


class LogPiece(BaseModel):
    """A part of an attempt's log from its byte `start` on (base64 on the wire). Safe to repeat."""

    controller_id: str
    part: LogPart = "agent"
    start: int = Field(default=0, ge=0, lt=2**40)
    data: Base64Bytes = Field(default=b"", max_length=1 << 20)
    last: bool = Field(default=False, description="nothing follows")


class LogSize(BaseModel):
    size: int


class LogText(NamedTuple):
    """A log from some byte on: its text, where the next piece begins, and whether that is the log's end."""

    data: bytes
    next_start: int
    complete: bool


class PauseRequest(BaseModel):
    """Hold model calls. The lease runs out after `lease_seconds` unless renewed: a dead owner can't stop the world."""

    owner: str = "admin"
    lease_seconds: float = Field(default=600, gt=0)
    retry_after_seconds: int = 5
    reason: str | None = None


class PauseState(BaseModel):
    paused: bool
    owner: str | None = None
    lease_expires_at: float | None = None
    retry_after_seconds: int = 5
    reason: str | None = None
    inflight: int


class CallRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model call as recorded: exactly what the engine read and sampled.

    Arrays travel as little-endian bytes: ids and versions int32, log-probs float32 (NaN where the engine gave none).
    `logprobs` are of the distribution sampled from. Lengths of `response_ids`, `logprobs`, `versions` agree when
    `untrainable` is None.
    """

    call_id: str
    seq: int
    """Order of arrival within the attempt."""
    attempt_id: str
    dialect: str
    prompt_ids: bytes
    response_ids: bytes
    logprobs: bytes
    versions: bytes
    """Policy version of each sampled token."""
    finish_reason: str
    parent: str | None = None
    """Call whose prompt + response this call's prompt extends token for token."""
    break_reason: str | None = None
    """Why this call's prompt was rendered in full although the conversation had earlier calls."""
    break_index: int | None = None
    """First token at which the prompt left what had been recorded before."""
    delivered: bool = True
    untrainable: str | None = None
    """Why this call must not be trained; None when it may be."""
    reward: float | None = None
    requested: dict[str, Any] = msgspec.field(default_factory=dict)
    """Sampling parameters that the client asked for."""
    effective: dict[str, Any] = msgspec.field(default_factory=dict)
    """Sampling parameters that were used."""
    started_at: float = 0.0
    ended_at: float = 0.0
    engine: str | None = None
    request: dict[str, Any] | None = None
    """The client's messages and tools; left out unless asked for."""
    response: dict[str, Any] | None = None
    """The answer's message; left out unless asked for."""
    raw: dict[str, Any] | None = None
    """The body that the client sent; left out unless asked for."""
    kind: str = CallKind.MAIN
    images: list[str] = msgspec.field(default_factory=list)
    """References to the images that the prompt holds."""
    routed_experts: bytes | None = None
    """Experts that each token was routed to, as the engine gave them; `routed_format` is dtype and shape."""
    routed_format: str | None = None


class Trajectory(msgspec.Struct, kw_only=True):
    """GET /api/rollouts/{id}/trajectory, encoded with msgpack: all calls of the last attempt."""

    rollout_id: str
    attempt_id: str
    outcome: str | None
    reward: float | None
    calls: list[CallRecord]

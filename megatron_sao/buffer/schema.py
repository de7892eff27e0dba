"""The bodies of the buffer's HTTP interface, as FastAPI checks them and writes them into the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron_sao.data.trajectory import VERSION, addressable

Stage = Literal["sft", "value", "rl"]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Wait = Annotated[float, Field(ge=0, le=600, description="seconds the answer may be held back for")]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Version = Annotated[str, Field(pattern=f"^{VERSION.pattern}$")]
PageSize = Annotated[int, Field(ge=1, le=1000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


# Requests


class TrainerBody(Body):
    run_id: Name
    policy_version: Count


class BatchBody(Body):
    incarnation: Count
    batch_size: Annotated[int, Field(ge=1, le=2**20)]
    policy_version: Count
    wait: Wait = 0.0


class IncarnationBody(Body):
    incarnation: Count


class ResultBody(IncarnationBody):
    wait: Wait = 0.0


class EvaluationBody(IncarnationBody):
    version: Version
    num_prompts: Count


class EngineBody(Body):
    id: Annotated[Name, AfterValidator(addressable)]
    url: Name
    tp: Annotated[int, Field(ge=1, le=2**20)]


class HeartbeatBody(Body):
    sick: Annotated[str | None, Field(max_length=4096, description="why it must not serve; null: it is well")] = None


class DirtyBody(IncarnationBody):
    state: Literal["dirty"]
    version: None = None


class CleanBody(IncarnationBody):
    state: Literal["clean"]
    version: Version


class LeaseBody(Body):
    worker_id: Name
    request_id: Name
    max_leases: Annotated[int, Field(ge=1, le=4096)]
    wait: Wait = 0.0


class RenewBody(Body):
    attempt: Count


class ReleaseBody(RenewBody):
    reason: Annotated[str, Field(max_length=4096)]


# Answers


class Done(Body):
    """The effect is on the disk; there is nothing to say."""


class Refusal(Body):
    error: Annotated[str, Field(description="a sentence: what is wrong, and what to do")]


class Health(Body):
    status: Literal["ok"] = "ok"


class Incarnation(Body):
    incarnation: int


class BatchEntry(Body):
    id: str
    num_tokens: int
    num_action_tokens: int


class Batch(Body):
    entries: Annotated[list[BatchEntry] | None, Field(description="null: not complete within the wait")]


class EvaluationResult(Body):
    ids: Annotated[list[str] | None, Field(description="in task order; null: visits are still open")]


class TaskFields(Body):
    id: str
    prompt: str | list[dict[str, Any]]
    label: Any
    extra: dict[str, Any]


class Lease(Body):
    visit_id: str
    kind: Literal["train", "eval"]
    task: TaskFields
    epoch: int
    attempt: int
    expires_in: float
    version: Annotated[str | None, Field(description="evaluations: the weight version every token must be of")]
    group: str | None


class Leases(Body):
    leases: list[Lease]


class Renewal(Body):
    expires_in: float


class Submission(Body):
    result: Literal["accepted", "duplicate", "dropped"]


class Engine(Body):
    id: str
    url: str
    tp: int
    state: Literal["clean", "dirty", "sick", "down"]
    version: str | None
    heartbeat_age: float


class Engines(Body):
    engines: list[Engine]
    current_version: str | None


class Dropped(Body):
    serial: int
    counter: Annotated[str, Field(description="the counter of /v1/stats it is counted in")]
    trajectory: str
    kind: str
    task_id: str
    epoch: int
    reason: str
    at: Annotated[float, Field(description="Unix time, seconds")]


class DroppedPage(Body):
    dropped: list[Dropped]


class AsideVisit(Body):
    id: int
    kind: str
    task_id: str
    epoch: int
    attempt: Annotated[int, Field(description="how often it was leased")]
    reason: str | None


class AsidePage(Body):
    aside: list[AsideVisit]


class StoredTrajectory(Body):
    id: str
    task_id: str
    epoch: int
    kind: Literal["train", "eval"]
    state: Literal["stored", "assigned", "eval", "dropped", "failed"]
    stage: Annotated[Stage | None, Field(description="of its batch or its evaluation")]
    step: int | None
    num_tokens: int
    num_action_tokens: int
    versions: Annotated[list[str], Field(description="weight versions of its action tokens, oldest first")]
    reason: Annotated[str | None, Field(description="why it was dropped, or failed")]


class Index(Body):
    trajectories: list[StoredTrajectory]


class RecordedBatch(Body):
    stage: Stage
    step: int
    ids: list[str]


class RecordedBatches(Body):
    batches: list[RecordedBatch]


class Stats(Body):
    """Beside the counters since the run began: what is there now."""

    run_id: str
    current_version: str | None
    stage: Annotated[Stage | None, Field(description="of the batch asked for last")]
    step: int
    incarnation: Annotated[int, Field(description="of the trainer that rules; 0: none has registered")]
    outstanding: Annotated[int, Field(description="leased, stored, or in a batch from the current one on")]
    outstanding_limit: int
    visits_leased: int
    visits_ready: int
    eval_visits_open: int
    trajectories_stored: int
    stored_bytes: int
    engines_clean: int
    engines_dirty: int
    engines_sick: int
    engines_down: int
    dropped_stale_fraction: Annotated[float, Field(description="of the accepted trajectories for training")]

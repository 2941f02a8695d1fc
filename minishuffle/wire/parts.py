"""What control messages are made of."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ControlMessage(BaseModel):
    """Base of all: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorInfo(ControlMessage):
    """A failure as it crosses processes: text, and the user's own traceback (may be empty)."""

    code: int
    text: str
    traceback: str = ""
    task: str = ""
    """Name and index of the subtask, e.g. ``count[1]``; empty when no task is to blame."""


class WorkerAddress(ControlMessage):
    worker: int
    epoch: int
    host: str
    data_port: int


class TaskCountersMessage(ControlMessage):
    """Totals of one attempt; see ``counters.TaskCounters`` for the meaning and units."""

    records_in: int = 0
    records_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    user_errors: dict[str, int] = Field(default_factory=dict)
    records_late: int = 0
    rows_kept: int = 0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    backpressured_seconds: float = 0.0
    first_output_at: float = 0.0
    """Wall clock, seconds since the epoch, of the first record emitted; 0.0 when none was."""
    last_input_at: float = 0.0
    """Wall clock at which the last batch was taken in and dealt with; 0.0 when none was."""


class TaskReport(ControlMessage):
    """One task inside a heartbeat."""

    job: str
    operator: int
    index: int
    attempt: int
    state: str
    counters: TaskCountersMessage


class PeerReport(ControlMessage):
    """One data connection inside a heartbeat; ``connections`` is 1 at rest, always."""

    worker: int
    connections: int
    local: str
    remote: str


class WorkerReport(ControlMessage):
    """Plain figures of a worker, for ``cluster status``. Bytes unless named otherwise."""

    network_cap_bytes: int = 0
    network_peak_bytes: int = 0
    segments_free: int = 0
    abandoned_tasks: int = 0
    remote_bytes_out: int = 0
    remote_payload_bytes_out: int = 0
    remote_records_out: int = 0
    local_records_out: int = 0
    loop_lag_p99_seconds: float = 0.0


class InputChannelSpec(ControlMessage):
    """Where one input channel finds its producer."""

    producer: int
    attempt: int
    worker: int


class InputSpec(ControlMessage):
    """One in-edge of a subtask. ``input`` is the operator's input number."""

    edge: int
    input: int
    channels: list[InputChannelSpec]


class OutputSpec(ControlMessage):
    """One out-edge: this producer feeds consumers ``first`` … ``first + count - 1``."""

    edge: int
    first: int
    count: int


class TaskSpec(ControlMessage):
    operator: int
    name: str
    index: int
    parallelism: int
    attempt: int
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    stream: str = ""
    """The stream that it reads, if other programs write its records."""
    sink: str = ""
    """Of a sink whose records other programs read: its name."""
    bounded: bool = True


class TaskInfo(ControlMessage):
    operator: int
    name: str
    index: int
    attempt: int
    state: str
    worker: int
    counters: TaskCountersMessage
    result: bytes = b""


class JobEvent(ControlMessage):
    number: int
    at: float
    kind: str
    text: str
    operator: int = -1
    index: int = -1
    attempt: int = 0
    worker: int = 0


class WorkerInfo(ControlMessage):
    worker: int
    epoch: int
    state: Literal["alive", "lost", "gone"]
    host: str
    pid: int
    data_port: int
    metrics_port: int
    slots: int
    slots_free: int
    heartbeat_age_seconds: float
    report: WorkerReport
    peers: list[PeerReport]

"""The control plane: what coordinator, workers and clients say to each other.

Each message is a pydantic model, packed as a msgpack map with its ``type``. Every message to or
about a task carries (term, job, attempt) and may be applied twice without harm. Job graphs and
programs travel as bytes that only ``dataflow`` (graphs) and the workers (programs) open.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError, RemoteProtocolError, ResourceExhausted
from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import BufferHeader, Frame, Message, encode_frame

# --- parts ----------------------------------------------------------------------------------------
#
# What control messages are made of.


class ControlMessage(BaseModel):
    """Base of all: frozen, and an unknown field is an error.

    A subclass with a ``type`` is a message, and is found by that name when one arrives; one without
    is a part of messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    by_type: ClassVar[dict[str, type[ControlMessage]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        if "type" in cls.model_fields:
            name = cls.model_fields["type"].default
            if ControlMessage.by_type.setdefault(name, cls) is not cls:
                raise LocalProtocolError(f"two control messages are called {name!r}")


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


class TaskReport(ControlMessage):
    """One task inside a heartbeat."""

    job: str
    operator: int
    index: int
    attempt: int
    state: str
    counters: TaskCounters


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
    counters: TaskCounters
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


# --- messages -------------------------------------------------------------------------------------

# --- worker -> coordinator ------------------------------------------------------------------------


class Register(ControlMessage):
    type: Literal["register"] = "register"
    host: str
    data_port: int
    metrics_port: int
    pid: int
    slots: int
    python: str
    """Major.minor; functions are pickled, so it must equal the coordinator's."""
    version: str
    segments: int
    segment_bytes: int
    requested_worker: int = 0
    """An id to be given back (0: any free one); refused while another process holds it."""


class Heartbeat(ControlMessage):
    type: Literal["heartbeat"] = "heartbeat"
    term: int
    worker: int
    epoch: int
    report: WorkerReport
    tasks: list[TaskReport]
    peers: list[PeerReport]


class TaskStateChanged(ControlMessage):
    """``state`` is running, finished, failed, canceled or abandoned."""

    type: Literal["task_state"] = "task_state"
    term: int
    job: str
    operator: int
    index: int
    attempt: int
    state: Literal["running", "finished", "failed", "canceled", "abandoned"]
    error: ErrorInfo | None = None
    result: bytes = b""
    """What the sink's ``close`` returned, msgpacked; empty when nothing."""
    counters: TaskCounters = Field(default_factory=TaskCounters)


class Collected(ControlMessage):
    """Rows for the client, from a ``collect`` sink: the msgpack of a list of rows."""

    type: Literal["collected"] = "collected"
    term: int
    job: str
    operator: int
    index: int
    attempt: int
    rows: int
    payload: bytes


class LogLines(ControlMessage):
    type: Literal["log_lines"] = "log_lines"
    term: int
    job: str
    lines: list[str]


class AskDial(ControlMessage):
    """A worker with the higher id wants a connection: tell ``target`` to dial me."""

    type: Literal["ask_dial"] = "ask_dial"
    term: int
    worker: int
    target: int


# --- coordinator -> worker ------------------------------------------------------------------------


class Registered(ControlMessage):
    type: Literal["registered"] = "registered"
    term: int
    worker: int
    epoch: int
    heartbeat_interval: float
    heartbeat_timeout: float


class DeployTasks(ControlMessage):
    """Start these tasks of a job. ``programs`` maps operator id to its cloudpickled program."""

    type: Literal["deploy"] = "deploy"
    term: int
    job: str
    name: str
    """The job's name, for metrics."""
    settings: dict[str, Any]
    """The ``dataflow.graph.JobSettings`` as a plain map."""
    programs: dict[int, bytes]
    tasks: list[TaskSpec]
    workers: list[WorkerAddress]


class CancelTasks(ControlMessage):
    """Cancel every task of the job on this worker."""

    type: Literal["cancel_tasks"] = "cancel_tasks"
    term: int
    job: str


class ReleaseJob(ControlMessage):
    """The job is over everywhere: forget its partitions, gates and pools."""

    type: Literal["release_job"] = "release_job"
    term: int
    job: str


class Dial(ControlMessage):
    """Dial that worker now, if not connected yet."""

    type: Literal["dial"] = "dial"
    term: int
    peer: WorkerAddress


class WorkerLost(ControlMessage):
    """The coordinator's verdict: let go of that worker's connections."""

    type: Literal["worker_lost"] = "worker_lost"
    term: int
    worker: int
    epoch: int


class Shutdown(ControlMessage):
    type: Literal["shutdown"] = "shutdown"
    term: int
    reason: str


# --- client -> coordinator (requests) -------------------------------------------------------------


class SubmitJob(ControlMessage):
    """``graph`` is ``dataflow.graph.JobGraph.to_bytes()``.

    ``submission`` is an id that the client made, or empty: as long as its job is known, the same id is
    answered with that job and starts no other.
    """

    type: Literal["submit"] = "submit"
    name: str
    python: str
    graph: bytes
    submission: str = ""


class ListJobs(ControlMessage):
    type: Literal["list_jobs"] = "list_jobs"


class ShowJob(ControlMessage):
    type: Literal["show_job"] = "show_job"
    job: str


class CancelJob(ControlMessage):
    type: Literal["cancel_job"] = "cancel_job"
    job: str


class CancelSubmission(ControlMessage):
    """Cancel the job of a submission; one that has not arrived yet will be refused. Answered with Accepted,
    whose ``job`` is empty if there is no job."""

    type: Literal["cancel_submission"] = "cancel_submission"
    submission: str


class GetEvents(ControlMessage):
    """Events of a job numbered above ``after``; waits up to ``wait_seconds`` for one."""

    type: Literal["get_events"] = "get_events"
    job: str
    after: int = 0
    wait_seconds: float = 0.0


class GetLogs(ControlMessage):
    type: Literal["get_logs"] = "get_logs"
    job: str
    after: int = 0
    wait_seconds: float = 0.0


class GetRows(ControlMessage):
    """Collected batches of a job from batch number ``after`` on: the client has those before it.
    Waits up to ``wait_seconds`` for one."""

    type: Literal["get_rows"] = "get_rows"
    job: str
    after: int = 0
    wait_seconds: float = 0.0


class WaitJob(ControlMessage):
    """Answered with ``JobInfo`` when the job is over, or when ``wait_seconds`` have passed."""

    type: Literal["wait_job"] = "wait_job"
    job: str
    wait_seconds: float


class GetStatus(ControlMessage):
    type: Literal["get_status"] = "get_status"


class StopCluster(ControlMessage):
    """Shut workers and coordinator down; running jobs are cancelled first."""

    type: Literal["stop_cluster"] = "stop_cluster"


# --- coordinator -> client (replies) --------------------------------------------------------------


class Failure(ControlMessage):
    """Any request may be answered by this; ``code`` as in ``errors``."""

    type: Literal["failure"] = "failure"
    code: int
    text: str


class Accepted(ControlMessage):
    type: Literal["accepted"] = "accepted"
    job: str = ""


class JobInfo(ControlMessage):
    """``state`` is created, running, finished, failing, failed, canceling or canceled."""

    type: Literal["job_info"] = "job_info"
    job: str
    name: str
    state: str
    submitted_at: float
    ended_at: float = 0.0
    tasks: list[TaskInfo] = Field(default_factory=list)
    causes: list[ErrorInfo] = Field(default_factory=list)
    """First cause first."""
    collected_batches: int = 0


class JobList(ControlMessage):
    type: Literal["job_list"] = "job_list"
    jobs: list[JobInfo]


class JobEvents(ControlMessage):
    type: Literal["job_events"] = "job_events"
    events: list[JobEvent]
    over: bool


class JobLogs(ControlMessage):
    type: Literal["job_logs"] = "job_logs"
    lines: list[str]
    next: int
    over: bool


class JobRows(ControlMessage):
    type: Literal["job_rows"] = "job_rows"
    batches: list[bytes]
    next: int
    over: bool


class ClusterStatus(ControlMessage):
    type: Literal["cluster_status"] = "cluster_status"
    cluster: str
    version: str
    term: int
    pid: int
    web_port: int
    workers: list[WorkerInfo]
    jobs: list[JobInfo]


def pack_message(message: ControlMessage) -> bytes:
    """The body of a Message frame. Text that is no Unicode (a file name in an error, say) is escaped: a
    report that could not be packed would be lost, and its task wait for ever."""
    fields = message.model_dump(mode="python")
    packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def unpack_message(body: bytes | memoryview) -> ControlMessage:
    """Read one message.

    Raises:
        RemoteProtocolError: not msgpack, of an unknown type, or with fields that do not fit.
    """
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
        kind = ControlMessage.by_type.get(fields["type"])
        if kind is None:
            raise ValueError(f"unknown type {fields['type']!r:.80}")
        return kind.model_validate(fields)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, ValidationError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RemoteProtocolError(f"control message cannot be read: {first}") from error


# --- control --------------------------------------------------------------------------------------
#
# Control links' byte stream: Message frames, and nothing else, both ways.


class MessageDecoder:
    """Incremental decoder of one direction of a control link."""

    def __init__(self) -> None:
        self._messages: list[tuple[ControlMessage, int]] = []
        self._decoder = FrameDecoder(self, limits.CONTROL_FRAME_BYTES_MAX)

    def receive(self, data: bytes) -> list[tuple[ControlMessage, int]]:
        """Take the next bytes; returns the messages that became complete, with their request numbers.

        Raises:
            RemoteProtocolError: anything but well-formed Message frames.
        """
        self._decoder.receive(data)
        messages, self._messages = self._messages, []
        return messages

    def frame(self, frame: Frame) -> None:
        if not isinstance(frame, Message):
            raise RemoteProtocolError(f"{type(frame).__name__} frame on a control link")
        self._messages.append((unpack_message(frame.body), frame.request))

    def credit(self, channel: int, credit: int) -> None:
        raise RemoteProtocolError("AddCredit frame on a control link")

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        raise RemoteProtocolError("BufferResponse frame on a control link")

    def buffer_end(self) -> None:
        raise LocalProtocolError("no payload was begun")


def encode_message(message: ControlMessage, request: int) -> bytes:
    """The frame that carries ``message``.

    Raises:
        ResourceExhausted: it is longer than a control frame may be.
    """
    data = encode_frame(Message(request, pack_message(message)))
    if len(data) > limits.CONTROL_FRAME_BYTES_MAX:
        raise ResourceExhausted(
            f"{type(message).__name__} of {len(data)} bytes is too large for the control plane, which takes "
            f"{limits.CONTROL_FRAME_BYTES_MAX}; let functions read large objects from files instead of "
            "carrying them"
        )
    return data

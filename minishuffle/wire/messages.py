"""The control plane: what coordinator, workers and clients say to each other.

Each message is a pydantic model, packed as a msgpack map with its ``type``. Every message to or
about a task carries (term, job, attempt) and may be applied twice without harm. Job graphs and
programs travel as bytes that only ``dataflow`` (graphs) and the workers (programs) open.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from minishuffle.errors import RemoteProtocolError
from minishuffle.wire.parts import (
    ControlMessage,
    ErrorInfo,
    JobEvent,
    PeerReport,
    TaskCountersMessage,
    TaskInfo,
    TaskReport,
    TaskSpec,
    WorkerAddress,
    WorkerInfo,
    WorkerReport,
)
from minishuffle.wire.results import ResultMessage
from minishuffle.wire.streams import (
    AbortWrite,
    CommitWrite,
    DescribeStream,
    EndStream,
    EndWrite,
    ExpectUpstream,
    OpenUpstream,
    StreamInfo,
    UpstreamExpected,
    UpstreamOpened,
    WriteEnded,
)

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
    counters: TaskCountersMessage = Field(default_factory=TaskCountersMessage)


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
    """``graph`` is ``dataflow.graph.JobGraph.to_bytes()``."""

    type: Literal["submit"] = "submit"
    name: str
    python: str
    graph: bytes


class ListJobs(ControlMessage):
    type: Literal["list_jobs"] = "list_jobs"


class ShowJob(ControlMessage):
    type: Literal["show_job"] = "show_job"
    job: str


class CancelJob(ControlMessage):
    type: Literal["cancel_job"] = "cancel_job"
    job: str


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
    """Collected batches of a job from batch number ``after`` on."""

    type: Literal["get_rows"] = "get_rows"
    job: str
    after: int = 0


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


AnyMessage = Annotated[
    Register
    | Heartbeat
    | TaskStateChanged
    | Collected
    | LogLines
    | AskDial
    | Registered
    | DeployTasks
    | CancelTasks
    | ReleaseJob
    | Dial
    | WorkerLost
    | Shutdown
    | SubmitJob
    | ListJobs
    | ShowJob
    | CancelJob
    | GetEvents
    | GetLogs
    | GetRows
    | WaitJob
    | GetStatus
    | StopCluster
    | Failure
    | Accepted
    | JobInfo
    | JobList
    | JobEvents
    | JobLogs
    | JobRows
    | ClusterStatus
    | DescribeStream
    | StreamInfo
    | OpenUpstream
    | UpstreamOpened
    | ExpectUpstream
    | UpstreamExpected
    | CommitWrite
    | AbortWrite
    | EndStream
    | EndWrite
    | WriteEnded
    | ResultMessage,
    Field(discriminator="type"),
]

_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyMessage)


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
        message: ControlMessage = _ADAPTER.validate_python(fields)
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RemoteProtocolError(f"control message cannot be read: {first}") from error
    return message

"""Control messages between clients and the coordinator: requests, and what is replied."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from minishuffle.wire.messages import (
    ControlMessage,
    Counters,
    ErrorInfo,
    Name,
    OrNone,
    PeerReport,
    Port,
    WorkerNumber,
    WorkerReport,
)

__all__ = [
    "JOB_LIVE",
    "Accepted",
    "CancelJob",
    "CancelSubmission",
    "ClusterStatus",
    "DeployWait",
    "EdgeInfo",
    "Failure",
    "GetEvents",
    "GetLogs",
    "GetRows",
    "GetStatus",
    "GraphInfo",
    "JobEvent",
    "JobEvents",
    "JobInfo",
    "JobList",
    "JobLogs",
    "JobRows",
    "ListJobs",
    "PauseJob",
    "ResumeJob",
    "SettingInfo",
    "ShowGraph",
    "ShowJob",
    "SlotWait",
    "StageInfo",
    "StopCluster",
    "SubmitJob",
    "TaskInfo",
    "UserCall",
    "VertexInfo",
    "WaitJob",
    "WaitPause",
    "WorkerEnded",
    "WorkerInfo",
]


JOB_LIVE: Final = ("created", "running", "pausing", "paused")
"""States of a job that has not ended and is not about to."""

# --- parts ----------------------------------------------------------------------------------------


class TaskInfo(ControlMessage):
    """A subtask, with the totals of all its attempts."""

    operator: int
    name: str
    index: int
    attempt: int
    state: str
    worker: int
    counters: Counters
    rows_sent: int = 0
    rows_received: int = 0
    result: bytes = b""
    state_rows_lost: int = 0
    """Rows that its operators held, and that were lost with attempts that did not finish."""


class JobEvent(ControlMessage):
    number: int
    at: float
    kind: str
    text: str
    operator: OrNone = -1
    index: OrNone = -1
    attempt: int = 0
    worker: int = 0
    since: float = 0.0
    """Seconds since the failure was detected of which the subtask recovers."""
    traceback: str = ""
    """The user's frames, the exception last, if the user's code raised."""


class WorkerInfo(ControlMessage):
    worker: WorkerNumber
    epoch: int
    state: Literal["alive", "awaited", "lost", "gone"]
    host: Name
    pid: int
    data_port: Port
    metrics_port: Port
    slots: int
    slots_free: int
    standby: bool = False
    """It takes slots of lost workers, and no others until then."""
    confined: bool = False
    """There are processes on other hosts, which cannot reach it: its address is loopback's. It takes slots
    only of jobs that run on its host alone."""
    reachable: int = 0
    """Other workers that are alive, and to which there is a link or the last probe could make one."""
    tried: int = 0
    """Other workers that are alive, and of which that is known or being tried."""
    draining: bool = False
    """It takes no slots, and leaves when nothing runs on it any more."""
    heartbeat_age_seconds: float
    report: WorkerReport
    peers: list[PeerReport]


class UserCall(ControlMessage):
    """An attempt whose thread was inside user code when its worker ended."""

    job: Name
    operator: int
    index: int
    attempt: int
    position: int
    """Rows of input that it had dealt with."""
    rows: int
    """Rows of input that it had in hand."""


# --- client -> coordinator (requests) -------------------------------------------------------------


class SubmitJob(ControlMessage):
    """``graph`` is ``plan.graph.JobGraph.to_bytes()``.

    ``submission`` is an id that the client made, or empty: as long as its job is known, the same id is
    answered with that job and starts no other.
    """

    type: Literal["submit"] = "submit"
    name: str
    python: str
    graph: bytes
    submission: Name = ""
    releases: dict[Name, Name] = Field(default_factory=dict)
    """The client's versions by package, see ``releases_here``."""


class ListJobs(ControlMessage):
    """Without ``tasks``, jobs come with the number of their tasks by state alone."""

    type: Literal["list_jobs"] = "list_jobs"
    tasks: bool = True


class ShowJob(ControlMessage):
    """Answered with ``JobInfo``; ``results`` of sinks may be left out. With ``earlier``, counters are those
    of half a minute ago, or of when the attempts had their first records."""

    type: Literal["show_job"] = "show_job"
    job: str
    results: bool = True
    earlier: bool = False


class ShowGraph(ControlMessage):
    """Answered with ``GraphInfo``."""

    type: Literal["show_graph"] = "show_graph"
    job: str


class CancelJob(ControlMessage):
    """Cancel a job. ``give_up_results``: of one that has ended too, what its sinks keep for readers goes."""

    type: Literal["cancel_job"] = "cancel_job"
    job: str
    give_up_results: bool = False


class PauseJob(ControlMessage):
    """Have the tasks of a job stop once nothing is on its way between them. Answered with Accepted at once;
    may be sent again."""

    type: Literal["pause_job"] = "pause_job"
    job: str


class ResumeJob(ControlMessage):
    """Have a job that is paused, or about to be, go on. Answered with Accepted."""

    type: Literal["resume_job"] = "resume_job"
    job: str


class WaitPause(ControlMessage):
    """Answered with ``JobInfo``, without tasks, when the job is paused, or the pause has failed, or when
    ``wait_seconds`` have passed."""

    type: Literal["wait_pause"] = "wait_pause"
    job: str
    wait_seconds: float


class CancelSubmission(ControlMessage):
    """Cancel the job of a submission; one that has not arrived yet will be refused. Answered with Accepted,
    whose ``job`` is empty if there is no job."""

    type: Literal["cancel_submission"] = "cancel_submission"
    submission: Name


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
    """Answered with ``JobInfo`` when the job has ended, or when ``wait_seconds`` have passed."""

    type: Literal["wait_job"] = "wait_job"
    job: str
    wait_seconds: float


class GetStatus(ControlMessage):
    """Without ``jobs``, only workers are listed; without ``reports``, not what they have reported of
    themselves and of each other; with ``earlier``, these are of half a minute ago. With ``worker``, only
    that one is."""

    type: Literal["get_status"] = "get_status"
    jobs: bool = True
    reports: bool = True
    earlier: bool = False
    worker: WorkerNumber = 0


class WorkerEnded(ControlMessage):
    """What a launcher knows of the end of a worker process that it had started, and which did not end by
    itself. Answered with Accepted; may be sent again."""

    type: Literal["worker_ended"] = "worker_ended"
    worker: WorkerNumber
    epoch: int
    code: OrNone = -1
    """Its exit code; -1: it was ended by a signal."""
    signal: Name = ""
    """The name of that signal, as the launcher's system has it: ``SIGSEGV``."""
    out_of_memory: bool = False
    """The kernel has killed a process of its cgroup for want of memory meanwhile."""
    hung: bool = False
    """The launcher has ended it, since it did not react although it could run."""
    recorded: bool = False
    """Whether ``calls`` are known."""
    calls: list[UserCall] = Field(default_factory=list)


class DrainWorker(ControlMessage):
    """Have a worker leave once its tasks have moved elsewhere, or after so many seconds (None: it has all the
    time that it needs). Answered with Accepted at once."""

    type: Literal["drain_worker"] = "drain_worker"
    worker: WorkerNumber
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


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
    warning: str = ""
    """Why it may be forgotten."""


class SlotWait(ControlMessage):
    """Subtasks that have waited since a worker was lost for another one with a free slot."""

    worker: WorkerNumber
    until: float
    """Wall time at which their job fails for it."""
    text: str
    """Which they are, how the worker was lost, and why no other one takes its slots."""


class DeployWait(ControlMessage):
    """Subtasks that were not deployed so far, and for what they wait: input or slots. They may do so for any
    time."""

    operators: list[int]
    text: str


class StageInfo(ControlMessage):
    """A stage of a job whose stages are deployed one by one."""

    operators: list[int]
    state: Literal["waiting", "deployed", "complete"]
    version: int = 1
    """How often it has begun to run."""


class BrokenLink(ControlMessage):
    """Two workers between which tasks of a job need a link that there has not been for ``link_timeout``."""

    workers: list[int]
    text: str
    """Both with their addresses, and why there is none as far as that is known."""
    excluded: WorkerNumber = 0
    """The one of the two that is excluded from the job for it; 0: tasks wait for the link."""


class JobInfo(ControlMessage):
    """``state`` is created, running, pausing, paused, finished, finished_with_loss, failing, failed,
    canceling or canceled."""

    type: Literal["job_info"] = "job_info"
    job: str
    name: str
    state: str
    submitted_at: float
    ended_at: float = 0.0
    at: float = 0.0
    """When the coordinator said all this, by its clock, which the other times are of, too."""
    tasks: list[TaskInfo] = Field(default_factory=list)
    causes: list[ErrorInfo] = Field(default_factory=list)
    """First cause first."""
    collected_batches: int = 0
    collects: list[str] = Field(default_factory=list)
    """Names of the sinks whose rows are for the client."""
    restarts: dict[str, int] = Field(default_factory=dict)
    """Attempts that took the place of another, by how that one ended: failed, abandoned, canceled, lost,
    finished."""
    rows_dropped: dict[str, int] = Field(default_factory=dict)
    """By reason, over all attempts."""
    rows_in_flight: int = 0
    """At most so many more were lost in what died, if its tasks write one row for each that they read."""
    state_rows_lost: int = 0
    """Rows that operators held (sides of joins, windows, groups), and that died with a task."""
    files_listed: int = 0
    """Files that its sinks have completed."""
    file_rows: int = 0
    """Rows in them."""
    task_states: dict[str, int] = Field(default_factory=dict)
    """Number of its tasks by state."""
    first_failure: JobEvent | None = None
    """When a task failed for the first time, whatever became of the job; None: none has."""
    rows_again: int = 0
    """At most so many rows were emitted twice: of sources that died, by ``source_lease`` 0 or while there was
    no coordinator; and by sinks that a blocking exchange feeds and that ran again."""
    slot_waits: list[SlotWait] = Field(default_factory=list)
    deploy_waits: list[DeployWait] = Field(default_factory=list)
    stages: list[StageInfo] = Field(default_factory=list)
    """In their order; none of a job that is deployed at once."""
    pause: Literal["none", "wanted", "aligning", "paused"] = "none"
    pause_problem: str = ""
    """Why the last pause failed; empty: it did not."""
    pause_left: list[str] = Field(default_factory=list)
    """What stays where it is while the job is paused."""
    links_broken: list[BrokenLink] = Field(default_factory=list)
    flow_control: Literal["credit", "tcp"] = "credit"


class JobList(ControlMessage):
    type: Literal["job_list"] = "job_list"
    jobs: list[JobInfo]


class VertexInfo(ControlMessage):
    """A vertex of the job graph; its number is that of ``TaskInfo.operator``."""

    name: str
    parallelism: int
    operators: list[str]
    is_source: bool
    bounded: bool
    stream: str
    sink: str


class EdgeInfo(ControlMessage):
    """``source`` and ``target`` are numbers of vertices; ``input`` is the target's input number."""

    source: int
    target: int
    input: int
    partitioner: str
    kind: str = "pipelined_bounded"


class SettingInfo(ControlMessage):
    """A setting of a job; values are texts, empty where the job has the runtime choose."""

    name: str
    value: str
    """What holds: where none was given, what follows from the job."""
    default: str
    given: bool
    """It was given another value than the default."""


class GraphInfo(ControlMessage):
    """The graph of a job, without its programs."""

    type: Literal["graph_info"] = "graph_info"
    job: str
    vertices: list[VertexInfo]
    edges: list[EdgeInfo]
    restart_strategy: str
    on_unavailable: str
    settings: list[SettingInfo] = Field(default_factory=list)


class JobEvents(ControlMessage):
    type: Literal["job_events"] = "job_events"
    events: list[JobEvent]
    terminal: bool


class JobLogs(ControlMessage):
    type: Literal["job_logs"] = "job_logs"
    lines: list[str]
    next: int
    terminal: bool


class JobRows(ControlMessage):
    type: Literal["job_rows"] = "job_rows"
    batches: list[bytes]
    next: int
    terminal: bool
    sinks: list[str] = []
    """The name of the sink that each batch is from."""


class ClusterStatus(ControlMessage):
    type: Literal["cluster_status"] = "cluster_status"
    cluster: str
    version: str
    term: int
    pid: int
    web_port: Port
    journal_problem: str = ""
    """Why the journal could not be written last; empty: it could."""
    unreached: list[str] = Field(default_factory=list)
    """Pairs of workers, with their addresses, that could make no link, and why; the first ones."""
    events: list[JobEvent] = Field(default_factory=list)
    """What happened last that is of no job."""
    workers: list[WorkerInfo]
    jobs: list[JobInfo]

"""Control messages between clients and the coordinator: requests and replies."""

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
    "DurableInfo",
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
    "SaveJob",
    "SavepointInfo",
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
    "WaitSavepoint",
    "WorkerEnded",
    "WorkerInfo",
]


JOB_LIVE: Final = ("created", "running", "pausing", "paused")
"""States of a job that has not ended and is not stopping."""

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
    """State rows of its operators, lost with attempts that did not finish."""
    holder: WorkerNumber = 0
    """The worker that holds its snapshots; 0: none does, or it takes none."""


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
    """Seconds since the detection of the failure from which the subtask recovers."""
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
    """It is a standby worker: it takes over slots of lost workers, and no others before."""
    confined: bool = False
    """Processes on other hosts cannot reach it, since its address is a loopback one. It takes slots only of
    jobs that run on its host alone."""
    reachable: int = 0
    """Number of other alive workers to which it has a link, or could make one at the last probe."""
    tried: int = 0
    """Number of other alive workers to which it was probed, or is being probed."""
    draining: bool = False
    """It takes no more slots, and leaves when no task runs on it."""
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
    """Input rows that it had processed."""
    rows: int
    """Input rows that it was processing."""
    row: int = 0
    """The hash of the first of these, if it looked for one that ends its process; 0: it is not known."""
    place: OrNone = -1
    """The place in the chain of the operator that it was in, if it looked for such a row; -1: it is not
    known."""
    place_rows: int = 0
    """Rows that this operator had in hand, from the one before it, or a timer; 0: none, or it is the first,
    which has the input rows."""
    place_row: int = 0
    """The hash of the first of these; 0: it is not known."""


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
    restore_from: str = ""
    """The folder of a savepoint from which the job goes on; empty: it begins."""
    drop_state: list[Name] = Field(default_factory=list)
    """Ids or names of operators whose state in the savepoint is left out."""
    trust_snapshot: bool = False
    """The savepoint need not be signed under the secret of this cluster."""


class ListJobs(ControlMessage):
    """List all jobs; without ``tasks``, with only the number of their tasks by state."""

    type: Literal["list_jobs"] = "list_jobs"
    tasks: bool = True


class ShowJob(ControlMessage):
    """Answered with ``JobInfo``; ``results`` of sinks may be left out. With ``earlier``, counters are from
    half a minute ago, or from the first records of the attempts."""

    type: Literal["show_job"] = "show_job"
    job: str
    results: bool = True
    earlier: bool = False


class ShowGraph(ControlMessage):
    """Answered with ``GraphInfo``."""

    type: Literal["show_graph"] = "show_graph"
    job: str


class CancelJob(ControlMessage):
    """Cancel a job. ``give_up_results``: drop the results that its sinks keep for readers, even if the job
    has ended."""

    type: Literal["cancel_job"] = "cancel_job"
    job: str
    give_up_results: bool = False


class PauseJob(ControlMessage):
    """Pause a job: its tasks stop once no rows are in flight between them. Answered with Accepted at once;
    may be sent again."""

    type: Literal["pause_job"] = "pause_job"
    job: str


class ResumeJob(ControlMessage):
    """Resume a job that is paused or pausing. Answered with Accepted."""

    type: Literal["resume_job"] = "resume_job"
    job: str


class WaitPause(ControlMessage):
    """Answered with ``JobInfo``, without tasks, when the job is paused, or the pause has failed, or when
    ``wait_seconds`` have passed."""

    type: Literal["wait_pause"] = "wait_pause"
    job: str
    wait_seconds: float


class SaveJob(ControlMessage):
    """Take a savepoint of a job. Answered with Accepted at once; may be sent again with the same ``token``,
    which takes no other."""

    type: Literal["save_job"] = "save_job"
    job: str
    token: Name
    directory: str = ""
    """Where its folder is made; empty: in ``snapshot_dir``."""
    stop: bool = False
    """The job is cancelled behind it."""


class WaitSavepoint(ControlMessage):
    """Answered with ``JobInfo``, without tasks, when no savepoint of the job is under way, or when
    ``wait_seconds`` have passed."""

    type: Literal["wait_savepoint"] = "wait_savepoint"
    job: str
    wait_seconds: float


class SavepointInfo(ControlMessage):
    """The last savepoint of a job; ``number`` 0: there was none."""

    number: int = 0
    token: Name = ""
    phase: Literal["none", "checking", "aligning", "taking", "writing", "committing", "stopping"] = "none"
    """``none``: it is complete, or has failed."""
    path: str = ""
    problem: str = ""
    """Why it has failed; empty: it has not."""
    bytes: int = 0
    seconds: float = 0.0
    """From its beginning to its manifest."""
    stood_seconds: float = 0.0
    """The longest for which a task stood; with ``stop``, until all had taken their state."""


class DurableInfo(ControlMessage):
    """The last complete durable snapshot of a job; ``number`` 0: there is none."""

    number: int = 0
    path: str = ""
    taken_at: float = 0.0
    """When it began, by the coordinator's clock."""
    bytes: int = 0
    seconds: float = 0.0
    """From its beginning to its manifest."""
    taken: int = 0
    """How many were completed."""
    failed: int = 0
    problem: str = ""
    """Why the last one failed; empty: it did not."""
    awaited: bool = False
    """Programs that write to the job wait for the next one."""


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
    """The cluster's status. Without ``jobs``, only workers are listed; without ``reports``, their reports
    about themselves and each other are left out; with ``earlier``, these are from half a minute ago. With
    ``worker``, only this worker is listed."""

    type: Literal["get_status"] = "get_status"
    jobs: bool = True
    reports: bool = True
    earlier: bool = False
    worker: WorkerNumber = 0


class WorkerEnded(ControlMessage):
    """A launcher's report about the end of a worker process it had started, and which did not end by itself.
    Answered with Accepted; may be sent again."""

    type: Literal["worker_ended"] = "worker_ended"
    worker: WorkerNumber
    epoch: int
    code: OrNone = -1
    """Its exit code; -1: it was ended by a signal."""
    signal: Name = ""
    """The name of that signal, as the launcher's system has it: ``SIGSEGV``."""
    out_of_memory: bool = False
    """The kernel has killed a process of its cgroup for lack of memory meanwhile."""
    hung: bool = False
    """The launcher killed it because it did not react, although it could run."""
    recorded: bool = False
    """Whether ``calls`` are known."""
    calls: list[UserCall] = Field(default_factory=list)


class DrainWorker(ControlMessage):
    """Drain a worker: it leaves once its tasks have moved elsewhere, or after ``seconds`` (None: no limit).
    Answered with Accepted at once."""

    type: Literal["drain_worker"] = "drain_worker"
    worker: WorkerNumber
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class StopCluster(ControlMessage):
    """Shut workers and coordinator down; running jobs are cancelled first."""

    type: Literal["stop_cluster"] = "stop_cluster"


# --- coordinator -> client (replies) --------------------------------------------------------------


class Failure(ControlMessage):
    """The refusal of any request; ``code`` as in ``errors``."""

    type: Literal["failure"] = "failure"
    code: int
    text: str


class Accepted(ControlMessage):
    type: Literal["accepted"] = "accepted"
    job: str = ""
    warning: str = ""
    """Why the next coordinator may not know of it."""


class SlotWait(ControlMessage):
    """Subtasks that wait for a worker with a free slot, since their worker was lost."""

    worker: WorkerNumber
    until: float
    """Wall clock at which their job fails."""
    text: str
    """The subtasks, how the worker was lost, and why no other takes its slots."""


class DeployWait(ControlMessage):
    """Subtasks that are not deployed yet, and whether they wait for input or slots. This wait has no
    limit."""

    operators: list[int]
    text: str


class StageInfo(ControlMessage):
    """A stage of a job with the schedule ``stages``."""

    operators: list[int]
    state: Literal["waiting", "deployed", "complete"]
    version: int = 1
    """Number of its runs."""


class BrokenLink(ControlMessage):
    """Two workers between which tasks of a job need a link; there has been none for ``link_timeout``."""

    workers: list[int]
    text: str
    """Both with their addresses, and the reason, if it is known."""
    excluded: WorkerNumber = 0
    """The worker of the two that is excluded from the job for it; 0: tasks wait for the link."""


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
    """The coordinator's clock at the reply; the other times are by this clock too."""
    tasks: list[TaskInfo] = Field(default_factory=list)
    causes: list[ErrorInfo] = Field(default_factory=list)
    """First cause first."""
    collected_batches: int = 0
    collects: list[str] = Field(default_factory=list)
    """Names of the sinks whose rows are collected for the client."""
    restarts: dict[str, int] = Field(default_factory=dict)
    """Replacement attempts, by how the previous attempt ended: failed, abandoned, canceled, lost,
    finished."""
    rows_dropped: dict[str, int] = Field(default_factory=dict)
    """Dropped rows by reason, over all attempts."""
    rows_in_flight: int = 0
    """Upper bound of further rows lost inside dead workers, if its tasks write at most one row per input
    row."""
    state_rows_lost: int = 0
    """State rows of operators (sides of joins, windows, groups) lost with their task."""
    files_listed: int = 0
    """Number of files that its sinks have completed."""
    file_rows: int = 0
    """Rows in these files."""
    task_states: dict[str, int] = Field(default_factory=dict)
    """Number of its tasks by state."""
    first_failure: JobEvent | None = None
    """The event of the first failed task, whatever happened later; None: none has failed."""
    rows_again: int = 0
    """Upper bound of rows emitted twice: by sources that died, with ``source_lease`` 0 or while there was no
    coordinator; by sinks that ran again, fed by a blocking exchange; and, with a guarantee, received as new
    ones of tasks that had gone back to a snapshot."""
    unprotected: int = 0
    """Tasks of a job with a guarantee that could not go on if their worker was lost now."""
    slot_waits: list[SlotWait] = Field(default_factory=list)
    deploy_waits: list[DeployWait] = Field(default_factory=list)
    stages: list[StageInfo] = Field(default_factory=list)
    """Stages in their order; empty if the job is deployed at once."""
    pause: Literal["none", "wanted", "aligning", "paused"] = "none"
    pause_problem: str = ""
    """Why the last pause failed; empty: it did not."""
    pause_left: list[str] = Field(default_factory=list)
    """Data that stays where it is while the job is paused, in words."""
    savepoint: SavepointInfo = SavepointInfo()
    durable: DurableInfo = DurableInfo()
    fallbacks: int = 0
    """How often the whole job went back to a snapshot, since a task could not be recovered alone."""
    links_broken: list[BrokenLink] = Field(default_factory=list)
    flow_control: Literal["credit", "tcp"] = "credit"
    guarantee: Literal["loss", "at_least_once"] = "loss"


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
    """A setting of a job; values are texts, empty where the runtime chooses."""

    name: str
    value: str
    """The effective value: if none was given, the one that follows from the job."""
    default: str
    given: bool
    """A value other than the default was given."""


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
    """The sink of each batch."""


class ClusterStatus(ControlMessage):
    type: Literal["cluster_status"] = "cluster_status"
    cluster: str
    version: str
    term: int
    pid: int
    web_port: Port
    journal_problem: str = ""
    """Why the last journal write failed; empty: it succeeded."""
    unreached: list[str] = Field(default_factory=list)
    """Texts about pairs of workers that could make no link, with their addresses and the reason; only the
    first ones."""
    events: list[JobEvent] = Field(default_factory=list)
    """The last events of the cluster that belong to no job."""
    workers: list[WorkerInfo]
    jobs: list[JobInfo]

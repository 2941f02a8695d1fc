"""The control plane: messages between coordinator, workers and clients.

Each message is a pydantic model, packed as a msgpack map with its ``type``. Every message to or about a task
carries (term, job, attempt), and may be applied twice without harm. Job graphs and programs travel as bytes;
only ``plan`` (graphs) and the workers (programs) open them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, GetPydanticSchema, model_validator
from pydantic_core import core_schema

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.wire.packed import WORKER_BYTES, PositionTable, TrafficTable, unpack_placement

# --- parts ----------------------------------------------------------------------------------------
#
# Parts of control messages.


COUNT_MAX: Final = (1 << 63) - 1
WORKER_NUMBER_MAX: Final = (1 << 31) - 1

Name = Annotated[str, Field(max_length=limits.MESSAGE_NAME_CHARS_MAX)]
Port = Annotated[int, Field(ge=0, le=65_535)]
WorkerNumber = Annotated[int, Field(ge=0, le=WORKER_NUMBER_MAX)]
OrNone = Annotated[int, Field(ge=-1, le=COUNT_MAX)]
"""A number, or -1 for none."""


_BOUNDS: Final[dict[str, dict[str, Any]]] = {
    "int": {"ge": 0, "le": COUNT_MAX},
    "float": {"ge": 0.0, "allow_inf_nan": False},
    "list": {"fail_fast": True},
    "dict": {"fail_fast": True},
}


def _set_bounds(schema: Any) -> Any:
    """Give each part of a pydantic schema the default bounds of its type, unless it has its own."""
    if isinstance(schema, dict):
        for name, bound in _BOUNDS.get(str(schema.get("type")), {}).items():
            schema.setdefault(name, bound)
        for part in schema.values():
            _set_bounds(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _set_bounds(part)
    return schema


class ControlMessage(BaseModel):
    """Base class of all messages and their parts: frozen, and an unknown field is an error.

    A subclass with a ``type`` is a message, and is found by this name when it arrives; a subclass without one
    is a part of messages. Unless a field says otherwise, integers are counts (0 to 2^63 - 1), and floats are
    finite and at least 0. Validation of a list or map stops at its first invalid entry.
    """

    # What pydantic validates a type with is made with the first message of it: a command and a worker use a
    # few of the ninety.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    by_type: ClassVar[dict[str, type[ControlMessage]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: Any) -> Any:
        return _set_bounds(handler(source))

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        if "type" in cls.model_fields:
            name = cls.model_fields["type"].default
            if ControlMessage.by_type.setdefault(name, cls) is not cls:
                raise LocalProtocolError(f"two control messages are called {name!r}")


Counters: TypeAlias = Annotated[
    TaskCounters,
    GetPydanticSchema(lambda kind, make: _set_bounds(make.resolve_ref_schema(make(kind)))),
]


_AttemptFields: TypeAlias = tuple[str, int, int, int]


def _attempt_fields(attempt: Any) -> Any:
    if not isinstance(attempt, AttemptId):
        return attempt
    return attempt.subtask.job, attempt.subtask.operator, attempt.subtask.index, attempt.attempt


def _attempt_schema(_: Any, make: Any) -> Any:
    fields = core_schema.no_info_before_validator_function(_attempt_fields, make(_AttemptFields))
    return core_schema.no_info_after_validator_function(
        lambda fields: AttemptId.of(*fields),
        fields,
        serialization=core_schema.plain_serializer_function_ser_schema(_attempt_fields),
    )


AttemptRef: TypeAlias = Annotated[AttemptId, GetPydanticSchema(_attempt_schema)]
"""An attempt, on the wire as an array: job, operator, index, attempt."""


class ErrorInfo(ControlMessage):
    """A failure as it crosses processes: text, and the user's own traceback (may be empty)."""

    code: int
    text: str
    traceback: str = ""
    task: str = ""
    """Name and index of the subtask, e.g. ``count[1]``; empty when no task is to blame."""
    mistake: bool = False
    """The user's function raised an error that wrong code raises in each run, such as NameError."""


class WorkerAddress(ControlMessage):
    worker: WorkerNumber
    epoch: int
    host: Name
    data_port: Port


class Standing(ControlMessage):
    """The state of an attempt at the barriers of its job."""

    barrier: int = 0
    """The barrier that it has forwarded, and at which it has stopped; 0: it runs."""
    blocked: bool = False
    """It waits for its consumers, and reaches no barrier before they read."""
    unread: list[int] = Field(default_factory=list)
    """Edges that it reads later, after others have ended."""
    taken: bool = False
    """It has stopped in order to move, and its consumers have read all it emitted."""
    outbox: int = 0
    """Bytes of rows for the client, and of log lines, not sent to the coordinator yet."""


class TaskReport(ControlMessage):
    """A task in a heartbeat."""

    attempt: AttemptRef
    counters: Counters
    traffic: TrafficTable = b""
    writes: list[Name] = Field(default_factory=list)
    """Writes with an external client connected to it."""
    inside: bool = False
    """Its thread is inside user code."""
    position: int = 0
    """Input rows that the attempt has processed."""
    in_hand: int = 0
    """Input rows that it is processing."""
    standing: Standing = Standing()
    awaits_cut: OrNone = -1
    """Receipts wait for the durable snapshot of that number, or a later one; 0: for the next that begins."""
    awaits_snapshot: bool = False
    """A program that writes to it waits, or is about to, for snapshots that the tasks of the job take of
    themselves."""


class PeerReport(ControlMessage):
    """A data connection in a heartbeat; ``connections`` is always 1 at rest."""

    worker: WorkerNumber
    epoch: int = 0
    connections: int
    local: Name
    remote: Name
    round_trip_seconds: float = 0.0
    """Least round trip time that TCP has measured recently; 0.0: not known."""
    unsent_bytes: int = 0
    """Bytes accepted by the kernel and not sent yet."""
    smoothed_round_trip_seconds: float = 0.0
    """Recent mean of TCP's round trip time; 0.0: not known."""
    in_flight_bytes: int = 0
    """Bytes sent and not acknowledged yet."""


class UnlinkedPeer(ControlMessage):
    """A worker to which channels need a link; there has been none for ``seconds``."""

    worker: WorkerNumber
    epoch: int
    seconds: float
    why: str
    """The error of the last try; empty if the other side dials."""
    jobs: list[str]


class WorkerReport(ControlMessage):
    """Stats of a worker, for ``cluster status``. Bytes unless named otherwise."""

    network_cap_bytes: int = 0
    network_peak_bytes: int = 0
    segments_free: int = 0
    abandoned_tasks: int = 0
    remote_bytes_out: int = 0
    remote_payload_bytes_out: int = 0
    remote_records_out: int = 0
    remote_records_discarded: int = 0
    local_records_out: int = 0
    loop_lag_p99_seconds: float = 0.0
    jobs_loaded: int = 0
    """Jobs whose programs were sent in advance and are loaded, with all their imports."""
    loop_lag_seconds: float = 0.0
    """Largest delay of the event loop since the last heartbeat."""
    clock_seconds: float = 0.0
    """The worker's clock at the report, of any origin. Rates are differences of the next two fields divided
    by its difference."""
    cpu_seconds: float = 0.0
    """Processor time of the process."""
    gc_seconds: float = 0.0
    """Time for which Python's garbage collector stopped the process."""
    segment_bytes: int = 0
    """Payload bytes of a network buffer."""
    memory_bytes: int = 0
    """Resident memory of the process; 0: not known."""
    snapshot_bytes: int = 0
    """Size of the snapshots that it holds for tasks of other workers."""
    snapshot_memory_bytes: int = 0
    """The bound of those in its memory, and of copies of its own tasks' ones; others are on its disk."""
    retains_much: bool = False
    """It retains half of ``retained_bytes`` or more of rows that were sent, or all that memory has room for
    while its disk takes no more."""
    disk_problem: str = ""
    """Why its disk takes no more of these; empty: it does."""
    stuck: dict[str, list[int]] = Field(default_factory=dict)
    """Slots in which the thread of an abandoned task still runs, by job."""


class TaskAttempt(ControlMessage):
    """An attempt of a subtask; the message names the job."""

    operator: int
    index: int
    attempt: int
    version: int = 0
    """The attempt that began the version of its rows: it makes them again, the same and in the same order.
    0: it begins one."""


class PlacedAttempt(TaskAttempt):
    """An attempt and the worker that runs it."""

    worker: WorkerNumber


class InputSpec(ControlMessage):
    """Producers ``first`` … ``first + count - 1`` of ``operator`` feed a subtask's input number ``input``."""

    edge: int
    input: int
    operator: int
    first: int = Field(ge=0)
    count: int = Field(ge=0)
    kept: bool = False
    """The producers keep their partitions, and send all of them to each attempt."""
    ended: list[int] = Field(default_factory=list)
    """Producers that an earlier attempt has read to the end: they send no more rows."""
    later: list[int] = Field(default_factory=list)
    """Producers that are not deployed yet: their partitions are requested when the coordinator names their
    workers."""
    waits: bool = False
    """Event time waits for the next attempt of a lost producer, which may repeat its rows."""
    strict: bool = False
    """The task fails if rows may be missing because a link broke: its next attempt gets all of them again."""
    guaranteed: bool = False
    """No row may be missing: producers retain what they have sent until snapshots of this task cover it, and
    number it through all their versions."""
    redealt: bool = False
    """The next attempt of such a producer may give this task rows that others had before."""


class OutputSpec(ControlMessage):
    """An output edge: this producer feeds consumers ``first`` … ``first + count - 1`` of ``operator``."""

    edge: int
    operator: int
    first: int
    count: int
    kept: bool = False
    """It keeps its partition for the next attempts of its consumers."""
    retained: bool = False
    """It retains what it has sent until snapshots of its consumers cover it."""
    bounded: bool = True
    """The number of buffers for each consumer is limited, even if more are free on the worker."""
    shared: bool = False
    """All consumers get the same rows."""
    closed: list[int] = Field(default_factory=list)
    """Consumers that get no rows, only the end, since they have read the rows of an earlier attempt."""
    announced: bool = False
    """Its consumers may wait for deployment: its first buffer is reported to the coordinator."""


class Restoration(ControlMessage):
    """The savepoint from which a task takes its state."""

    path: str
    fingerprint: Name
    """The fingerprint of the manifest by which the job was restored: all tasks take that snapshot."""
    trust: bool = False
    """It need not be signed under the secret of this cluster."""
    dropped: list[str] = Field(default_factory=list)
    """Ids of operators that begin without state, although the savepoint has some."""
    outputs: dict[str, list[str]] = Field(default_factory=dict)
    """By the ids of operators whose aggregates are others than in the savepoint, or in another order, the
    names of these in the job."""


class PoisonRow(ControlMessage):
    """A row that has ended the process of each attempt that took it."""

    row: int
    """Its hash."""
    place: int
    """The place in the chain of the operator whose function took it, or what came of it."""
    at: int = 0
    """The place of the operator in front of which it is known by its hash; 0: it is a row of the input."""
    reach: int
    """It comes among so many first rows of an attempt."""
    why: str
    """How these processes ended."""


class PoisonSearch(ControlMessage):
    """The search of an attempt for rows that have ended the processes of earlier ones."""

    row: int = 0
    """The hash of the first row that the last attempt had in hand; 0: it is not known."""
    rows: int = 0
    """Rows that it had in hand; 0: there is nothing to look for but rows that are found."""
    place: OrNone = -1
    """The place in the chain of the operator that it was in; -1: it is not known."""
    place_row: int = 0
    """The hash of the first row that this operator had in hand; 0: it is not known."""
    place_rows: int = 0
    """Rows that it had in hand."""
    reach: int
    """The search ends after so many rows."""
    found: list[PoisonRow] = Field(default_factory=list)
    """Rows to leave out, once each. A snapshot names by their place here those that were left out before."""


class TaskSpec(ControlMessage):
    operator: int
    name: str
    index: int
    parallelism: int
    attempt: int
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    stream: str = ""
    """The stream that it reads, if external clients write its records."""
    receipts_by_cuts: bool = False
    """Their receipts wait for durable snapshots, too."""
    sink: str = ""
    """The name of its sink, if external clients read the records."""
    bounded: bool = True
    positions: PositionTable = b""
    """Positions reported by an earlier attempt of a source, external writes included: each split continues at
    its ``end``."""
    positions_age: float = 0.0
    """Age of the positions in seconds."""
    files: dict[int, int] = Field(default_factory=dict)
    """Number of files in the manifest, by earlier attempt of a file sink."""
    committable: bytes = b""
    """The last commit prepared by an earlier attempt of a sink that commits in two phases."""
    files_complete: bool = False
    """An earlier attempt has had its last rows listed, in a job that loses nothing."""
    rows_collected: int = 0
    """Rows of its subtask that the client has, in a job that loses nothing."""
    rows_listed: int = 0
    """Rows in listed files of its subtask, or committed, in a job that loses nothing."""
    rows_again: int = 0
    """Rows that earlier attempts have counted as coming twice, likewise."""
    first_row: int = 0
    """The number of the first row that it keeps, if it is a sink whose records external clients read."""
    version: int = 0
    """See :class:`TaskAttempt`."""
    slot: int = 0
    """The number of its slot among the slots of the job."""
    state_worker: WorkerNumber = 0
    """The worker that keeps the state with which it goes on."""
    state_attempt: int = 0
    """The attempt that wrote this state; 0: there is none."""
    state_holder: bool = False
    """This state is the oldest snapshot that a holder keeps, and ``state_attempt`` counts this holder. If the
    holder has none, the task begins from its beginning."""
    needs_state: bool = False
    """There have been snapshots of the task: it must not begin from its beginning."""
    one_split: bool = False
    """Its rows are the same ones in each attempt if its source reads one split at most: it says how many it
    has, and with a ``version`` fails if these are more."""
    holder: int = 0
    """The holder of the snapshots that the task takes, counted from 1; 0: it has none yet."""
    restoration: Restoration | None = None
    """Where its first attempt takes its state from; None: it begins without any."""
    has_ended: bool = False
    """It had ended before the savepoint that its job goes on from: it gives its consumers the end."""
    poison: PoisonSearch | None = None
    """Which rows have ended the processes of earlier attempts; None: none may have."""


class HolderSpec(TaskAttempt):
    """The holder of the snapshots of the subtask ``index`` of ``operator``. ``attempt`` counts the holders
    that this subtask has had, from 1."""

    task_attempt: int
    """The attempt of the subtask whose snapshots it holds first; TasksRestarted names later ones."""
    task_worker: WorkerNumber
    """The worker that runs this attempt."""


Step: TypeAlias = Literal["inputs", "outputs", "first record", "snapshot read", "replayed", "caught up"]


class RecoveryStep(ControlMessage):
    """The progress of a replacement attempt: ``channels`` more channels to its producers or consumers are
    attached, the last of them ``age`` seconds ago, or have sent what was retained; or it has read its
    snapshot, passed on its first batch, or has nothing to do for the first time."""

    operator: int
    index: int
    attempt: int
    step: Step
    channels: int = 0
    age: float = 0.0


# --- messages -------------------------------------------------------------------------------------

# --- worker -> coordinator ------------------------------------------------------------------------


class AttemptPositions(ControlMessage):
    """The positions of a source's subtask."""

    attempt: AttemptRef
    positions: PositionTable


class WitnessedPositions(ControlMessage):
    """The positions of a worker's sources while the coordinator does not answer. The receiving peers pass
    them on to the coordinator. It ignores them if it has applied the report ``last_report``."""

    type: Literal["witnessed_positions"] = "witnessed_positions"
    term: int = 0
    """In a message to a coordinator: the coordinator's term."""
    worker: WorkerNumber
    epoch: int
    last_report: int
    """The number of the last report with these positions."""
    sources: list[AttemptPositions]


class Heartbeat(ControlMessage):
    type: Literal["heartbeat"] = "heartbeat"
    term: int
    worker: WorkerNumber
    epoch: int
    report: WorkerReport
    tasks: list[TaskReport]
    peers: list[PeerReport]
    unlinked: list[UnlinkedPeer] = Field(default_factory=list)


class LogLines(ControlMessage):
    type: Literal["log_lines"] = "log_lines"
    term: int
    job: str
    lines: list[str]


class RecoverySteps(ControlMessage):
    """The recovery steps that a worker has seen for a job since its last message of this type."""

    type: Literal["recovery_steps"] = "recovery_steps"
    term: int
    job: str
    steps: list[RecoveryStep]


class Leaving(ControlMessage):
    """The worker's process got SIGTERM: its tasks have ``seconds`` to move elsewhere. The coordinator answers
    with Shutdown."""

    type: Literal["leaving"] = "leaving"
    term: int
    seconds: float = Field(ge=0, allow_inf_nan=False)


class AskDial(ControlMessage):
    """The sender, which has the higher id, needs a connection: tell ``target`` to dial it."""

    type: Literal["ask_dial"] = "ask_dial"
    term: int
    worker: WorkerNumber
    target: WorkerNumber


class Advertised(ControlMessage):
    """The answer to Advertise. An empty ``host``: the sender listens only on loopback, or has no route
    there."""

    type: Literal["advertised"] = "advertised"
    term: int
    host: Name


class HostLooked(ControlMessage):
    """The answer to HostLook: whether the host has answered; None: the sender was held up and cannot tell."""

    type: Literal["host_looked"] = "host_looked"
    term: int
    ticket: int
    answer: bool | None


class Probed(ControlMessage):
    """The result of a probe. ``why`` is empty if the sender could make a link to ``worker``, else the
    reason."""

    type: Literal["probed"] = "probed"
    term: int
    worker: WorkerNumber
    epoch: int
    why: str = ""


class FolderChecked(ControlMessage):
    """The answer to CheckFolder. ``problem`` is empty if the file is there, else why it is not."""

    type: Literal["folder_checked"] = "folder_checked"
    term: int
    job: str
    savepoint: int
    problem: str = ""


class PeerSuspicion(ControlMessage):
    """The sender suspects ``worker``, which does not answer a Ping; or it trusts it again, since they are
    connected again."""

    type: Literal["peer_suspicion"] = "peer_suspicion"
    term: int
    worker: WorkerNumber
    epoch: int
    suspected: bool


class ClockSet(ControlMessage):
    """The system clock of the sender was set forward or back by ``seconds``."""

    type: Literal["clock_set"] = "clock_set"
    term: int
    seconds: float
    forward: bool


# --- coordinator -> worker ------------------------------------------------------------------------


class Acknowledge(ControlMessage):
    """The worker's reports (``wire.reports``) up to ``number`` were applied, each once: it need not keep them
    any longer."""

    type: Literal["acknowledge"] = "acknowledge"
    term: int
    number: int
    refused: bool = False
    """The last of these reports is about a file of a fenced attempt, and the file is not listed."""
    journaled: bool = True
    """False: the journal cannot be written, so the worker keeps the reports for the next coordinator. It need
    not keep rows, since the next coordinator would not know of them either."""


class DeployTasks(ControlMessage):
    """Start these tasks of a job. ``programs`` maps operator id to its packed program; a standby worker
    may have them already, see PrepareJob."""

    type: Literal["deploy"] = "deploy"
    term: int
    job: str
    name: str
    """The job's name, for metrics."""
    settings: dict[str, Any]
    """The ``plan.graph.JobSettings`` as a plain map."""
    programs: dict[int, bytes]
    tasks: list[TaskSpec]
    workers: list[WorkerAddress]
    """The workers of the producers and consumers of these tasks, and of the tasks whose snapshots the holders
    hold."""
    placement: dict[int, bytes] = Field(default_factory=dict)
    """The worker of each subtask, by operator that feeds one of these tasks: see :func:`pack_placement`."""
    attempts: list[TaskAttempt] = Field(default_factory=list)
    """The current attempts of their producers and consumers, if not the first."""
    barrier: int = 0
    """The last barrier of the job; 0: there has been none."""
    paused: bool = False
    """The barrier has not ended: these tasks start at it, and read and emit nothing before it ends."""
    holders: list[HolderSpec] = Field(default_factory=list)
    """The holders of snapshots that begin on this worker. There may be only these."""

    @model_validator(mode="after")
    def _placed(self) -> DeployTasks:
        known = {address.worker for address in self.workers}
        tables = {operator: unpack_placement(table) for operator, table in self.placement.items()}
        read: set[tuple[int, int, int]] = set()
        for task in self.tasks:
            for spec in task.inputs:
                placed = len(tables.get(spec.operator, ()))
                if spec.first + spec.count > placed:
                    raise ValueError(
                        f"input {spec.input} of operator {task.operator} reads {spec.count} producers from "
                        f"{spec.first} on, operator {spec.operator} is placed with {placed}"
                    )
                read.add((spec.operator, spec.first, spec.count))
        for operator, first, count in read:
            if unknown := set(tables.get(operator, ())[first : first + count]) - known:
                raise ValueError(f"operator {operator} is read from worker {min(unknown)} without an address")
        return self

    def channels(self, spec: InputSpec) -> Iterator[tuple[int, int, int]]:
        """Producer index, attempt and worker of each channel of an input, except ended ones."""
        attempts = {each.index: each.attempt for each in self.attempts if each.operator == spec.operator}
        begin, end = (WORKER_BYTES * number for number in (spec.first, spec.first + spec.count))
        table, ended = self.placement.get(spec.operator, b"")[begin:end], set(spec.ended)
        for producer, worker in enumerate(unpack_placement(table), spec.first):
            if producer not in ended:
                yield producer, attempts.get(producer, FIRST_ATTEMPT), worker

    def versions(self, operator: int) -> dict[int, int]:
        """The version of its rows, by subtask of a producer or consumer operator, if another attempt began
        it."""
        attempts = (each for each in self.attempts if each.operator == operator)
        return {each.index: each.version for each in attempts if each.version}


class PauseTasks(ControlMessage):
    """Every task of the job on this worker must forward the barrier and stop at it. If not ``paused``: this
    barrier and all before it have ended, and stopped tasks continue."""

    type: Literal["pause_tasks"] = "pause_tasks"
    term: int
    job: str
    barrier: Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
    paused: bool


class CheckFolder(ControlMessage):
    """Read a file that the coordinator has written, and compare it with ``content``. Answered with
    FolderChecked."""

    type: Literal["check_folder"] = "check_folder"
    term: int
    job: str
    savepoint: int
    folder: str
    file: Name
    content: str


class WriteState(ControlMessage):
    """Every task of the job on this worker that stands at the barrier must take its state, and then write it
    into the folder. If it ``goes_on``, it does not stand: it forwards the barrier once it has read all that
    came before, takes its state, and goes on."""

    type: Literal["write_state"] = "write_state"
    term: int
    job: str
    savepoint: int
    """Its number among those of the job."""
    barrier: int
    folder: str
    goes_on: bool = False


class CutComplete(ControlMessage):
    """A durable snapshot of the job is complete. Those tasks that were ``alone``, and had no holder when they
    took their state for it, go back to nothing earlier: their producers need not retain the rows that it
    covers."""

    type: Literal["cut_complete"] = "cut_complete"
    term: int
    job: str
    savepoint: int
    kept: int
    """The oldest one to which the job may go back: sources acknowledge what that covers."""
    alone: list[tuple[int, int]] = Field(default_factory=list)
    """Operator and index of each task that had no holder when its barrier was sent."""


class TakeSnapshots(ControlMessage):
    """The tasks of the job on this worker are to take local snapshots soon: another worker, from whose tasks
    they read, retains half of what it may. Or a program that writes to the job keeps half of its bound."""

    type: Literal["take_snapshots"] = "take_snapshots"
    term: int
    job: str


class DivideTasks(ControlMessage):
    """These subtasks must move. Each of them stops at the barrier, once it has read everything before it.
    Their producers send the barrier on the channels to them, and continue."""

    type: Literal["divide_tasks"] = "divide_tasks"
    term: int
    job: str
    barrier: Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
    moving: list[TaskAttempt]


class PrepareJob(ControlMessage):
    """The preparation of a worker for a takeover. The worker keeps and loads the programs until ReleaseJob; a
    DeployTasks without programs uses these."""

    type: Literal["prepare_job"] = "prepare_job"
    term: int
    job: str
    programs: dict[int, bytes]
    """By operator; none if they are too large to be kept, or there already."""
    workers: list[WorkerAddress]
    """All other workers, to which the worker must have links."""


class CancelTasks(ControlMessage):
    """Cancel these attempts, which others may follow; if empty, all attempts of the job on this worker, since
    it ends."""

    type: Literal["cancel_tasks"] = "cancel_tasks"
    term: int
    job: str
    attempts: list[TaskAttempt] = Field(default_factory=list)


class ReleaseJob(ControlMessage):
    """Free the partitions, gates and pools of these attempts; if empty, the job has ended everywhere."""

    type: Literal["release_job"] = "release_job"
    term: int
    job: str
    attempts: list[TaskAttempt] = Field(default_factory=list)


class TasksRestarted(ControlMessage):
    """These attempts replace earlier ones. Consumers on this worker reattach to them, and channels that
    earlier attempts have read here are closed."""

    type: Literal["tasks_restarted"] = "tasks_restarted"
    term: int
    job: str
    tasks: list[PlacedAttempt]
    workers: list[WorkerAddress]
    """The workers of these attempts."""


class ConsumerEnds(TaskAttempt):
    """Consumers that have read a producer to the end over this edge, in its current attempt or an earlier
    attempt."""

    edge: int
    consumers: list[int]


class ConsumersEnded(ControlMessage):
    """Consumers that need no rows of these attempts, known only after their deployment. No rows are kept for
    these consumers, and nothing waits for them. See ``OutputSpec.closed``."""

    type: Literal["consumers_ended"] = "consumers_ended"
    term: int
    job: str
    ends: list[ConsumerEnds]


class Dial(ControlMessage):
    """Dial this worker now, if it is not connected yet."""

    type: Literal["dial"] = "dial"
    term: int
    peer: WorkerAddress


class Probe(ControlMessage):
    """Probe each of these workers, which have higher ids: can a link be made?"""

    type: Literal["probe"] = "probe"
    term: int
    peers: list[WorkerAddress]


class Advertise(ControlMessage):
    """A worker of another host has registered: advertise the address of the interface by which you reach
    it."""

    type: Literal["advertise"] = "advertise"
    term: int
    toward: Name
    """An address of that host."""


class HostLook(ControlMessage):
    """Dial these ports of a silent host, ``times`` times within ``seconds``: does its kernel answer?"""

    type: Literal["host_look"] = "host_look"
    term: int
    ticket: int
    addresses: list[Name]
    """HOST:PORT, with numbers for hosts."""
    times: Annotated[int, Field(ge=1, le=limits.HOST_LOOKS_MAX)]
    seconds: float


class WorkerLost(ControlMessage):
    """The coordinator has declared a worker lost: close the connections to it. To the worker itself: stop."""

    type: Literal["worker_lost"] = "worker_lost"
    term: int
    worker: int
    epoch: int
    reason: str = ""


class Shutdown(ControlMessage):
    type: Literal["shutdown"] = "shutdown"
    term: int
    reason: str

"""The control plane: what coordinator, workers and clients say to each other.

Each message is a pydantic model, packed as a msgpack map with its ``type``. Every message to or
about a task carries (term, job, attempt) and may be applied twice without harm. Job graphs and
programs travel as bytes that only ``plan`` (graphs) and the workers (programs) open.
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
# What control messages are made of.


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
    """Give each part of a pydantic schema the bounds of its type that it has not got."""
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
    """Base of all: frozen, and an unknown field is an error.

    A subclass with a ``type`` is a message, and is found by that name when one arrives; one without
    is a part of messages. Unless a field says otherwise, its integers are counts (0 to 2^63 - 1), its
    floats are finite and at least 0; the first entry of a list or map that does not fit is the last one
    looked at.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
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
    """The user's function raised what code that is wrong raises each time, such as NameError."""


class WorkerAddress(ControlMessage):
    worker: WorkerNumber
    epoch: int
    host: Name
    data_port: Port


class Standing(ControlMessage):
    """How an attempt stands to the barriers of its job."""

    barrier: int = 0
    """The one that it has passed on, and stands behind; 0: it runs."""
    blocked: bool = False
    """It waits for its consumers, and cannot come to a barrier before they read."""
    unread: list[int] = Field(default_factory=list)
    """Edges that it reads later, once others have ended."""
    taken: bool = False
    """It stands since it is to move, and all that it has emitted was taken."""
    outbox: int = 0
    """Bytes of rows for the client, and of lines of the log, that it has yet to send to the coordinator."""


class TaskReport(ControlMessage):
    """One task inside a heartbeat."""

    attempt: AttemptRef
    counters: Counters
    traffic: TrafficTable = b""
    writes: list[Name] = Field(default_factory=list)
    """Writes of external clients that are connected to it."""
    inside: bool = False
    """Its thread is inside user code."""
    position: int = 0
    """Rows of input that the attempt has dealt with."""
    in_hand: int = 0
    """Rows of input that it is dealing with."""
    standing: Standing = Standing()


class PeerReport(ControlMessage):
    """One data connection inside a heartbeat; ``connections`` is 1 at rest, always."""

    worker: WorkerNumber
    epoch: int = 0
    connections: int
    local: Name
    remote: Name
    round_trip_seconds: float = 0.0
    """The least that TCP has measured of late; 0.0: not known."""
    unsent_bytes: int = 0
    """What the kernel took and has not sent so far."""
    smoothed_round_trip_seconds: float = 0.0
    """The mean of late; 0.0: not known."""
    in_flight_bytes: int = 0
    """What was sent and is not acknowledged."""


class UnlinkedPeer(ControlMessage):
    """A worker to which channels need a link that there has not been for ``seconds``."""

    worker: WorkerNumber
    epoch: int
    seconds: float
    why: str
    """What the last try failed with; empty if the other side dials."""
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
    """Jobs whose programs, sent ahead of need, are loaded with all that they import."""
    loop_lag_seconds: float = 0.0
    """How late the event loop was at most since the last heartbeat."""
    clock_seconds: float = 0.0
    """The worker's clock when it said this, of any origin: what the next two are to be divided by."""
    cpu_seconds: float = 0.0
    """Processor time of the process."""
    gc_seconds: float = 0.0
    """Time that Python's garbage collector held the process up."""
    segment_bytes: int = 0
    """Payload bytes of a network buffer."""
    memory_bytes: int = 0
    """Resident memory of the process; 0: not known."""
    stuck: dict[str, list[int]] = Field(default_factory=dict)
    """By job: slots in which the thread of an abandoned task still runs."""


class TaskAttempt(ControlMessage):
    """One attempt of a subtask of the job that the message is about."""

    operator: int
    index: int
    attempt: int
    base: int = 0
    """The attempt whose rows it writes once more, from the first on; 0: it writes others."""


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
    """The producers keep what they have written, and send all of it to each attempt."""
    ended: list[int] = Field(default_factory=list)
    """Producers that an earlier attempt has read to the end: nothing more comes of them."""
    later: list[int] = Field(default_factory=list)
    """Producers that were not deployed so far: they are asked once the coordinator says where they are."""
    waits: bool = False
    """Event time waits for the next attempt of a producer that is lost: it may write rows once more."""
    strict: bool = False
    """The task fails if rows may be missing since a link broke: all come again to its next attempt."""


class OutputSpec(ControlMessage):
    """One out-edge: this producer feeds consumers ``first`` … ``first + count - 1`` of ``operator``."""

    edge: int
    operator: int
    first: int
    count: int
    kept: bool = False
    """It keeps what it has written for the next attempts of its consumers."""
    bounded: bool = True
    """Its consumers have so many buffers each, whatever is free on the worker."""
    shared: bool = False
    """All consumers get the same."""
    closed: list[int] = Field(default_factory=list)
    """Consumers that get no rows, since they have read them from an earlier attempt, but the end."""
    announced: bool = False
    """Its consumers may wait to be deployed: the coordinator is to hear of its first buffer."""


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
    """The name of a sink whose records external clients read."""
    bounded: bool = True
    positions: PositionTable = b""
    """What an earlier attempt of a source, or of one that external clients write to, has reported: each split
    goes on at its ``end``."""
    positions_age: float = 0.0
    """Seconds since it has."""
    files: dict[int, int] = Field(default_factory=dict)
    """By earlier attempt of a file sink, how many of its files are in the manifest."""
    committable: bytes = b""
    """What an earlier attempt of a sink has prepared last, if it commits in two phases."""
    first_row: int = 0
    """The number of the first row that it keeps, if it is a sink whose records external clients read."""
    base: int = 0
    """See :class:`TaskAttempt`."""
    slot: int = 0
    """The number of its slot, of those that the job has."""


Step: TypeAlias = Literal["inputs", "outputs", "first record"]


class RecoveryStep(ControlMessage):
    """How far an attempt has come that took the place of another: so many more channels to its producers or
    its consumers are attached, the last of them ``age`` seconds ago, or it has passed on its first batch."""

    operator: int
    index: int
    attempt: int
    step: Step
    channels: int = 0
    age: float = 0.0


# --- messages -------------------------------------------------------------------------------------

# --- worker -> coordinator ------------------------------------------------------------------------


class AttemptPositions(ControlMessage):
    """Where the subtask of a source is."""

    attempt: AttemptRef
    positions: PositionTable


class WitnessedPositions(ControlMessage):
    """Where the sources of a worker are that gets no answer from the coordinator. The peers that get this
    hand it on to the coordinator, which believes it unless it has applied that report."""

    type: Literal["witnessed_positions"] = "witnessed_positions"
    term: int = 0
    """To a coordinator: its own."""
    worker: WorkerNumber
    epoch: int
    last_report: int
    """The number of the last report that they are in."""
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
    """What a worker has seen of the recoveries of a job since its last such message."""

    type: Literal["recovery_steps"] = "recovery_steps"
    term: int
    job: str
    steps: list[RecoveryStep]


class Leaving(ControlMessage):
    """The worker's process was sent SIGTERM: its tasks are to move elsewhere within so many seconds. Shutdown
    answers that."""

    type: Literal["leaving"] = "leaving"
    term: int
    seconds: float = Field(ge=0, allow_inf_nan=False)


class AskDial(ControlMessage):
    """A worker with the higher id wants a connection: tell ``target`` to dial me."""

    type: Literal["ask_dial"] = "ask_dial"
    term: int
    worker: WorkerNumber
    target: WorkerNumber


class Advertised(ControlMessage):
    """The answer to Advertise. An empty ``host``: it listens on loopback alone, or has no way there."""

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
    """Whether the sender could make a link to ``worker``: empty, or why not."""

    type: Literal["probed"] = "probed"
    term: int
    worker: WorkerNumber
    epoch: int
    why: str = ""


class PeerSuspicion(ControlMessage):
    """The sender suspects ``worker``, which answers no Ping, or is connected to it again."""

    type: Literal["peer_suspicion"] = "peer_suspicion"
    term: int
    worker: WorkerNumber
    epoch: int
    suspected: bool


class ClockSet(ControlMessage):
    """The system clock of the sender was set by so much."""

    type: Literal["clock_set"] = "clock_set"
    term: int
    seconds: float
    forward: bool


# --- coordinator -> worker ------------------------------------------------------------------------


class Acknowledge(ControlMessage):
    """The worker's reports (``wire.reports``) up to ``number`` were applied, each once: it need not keep them
    any more."""

    type: Literal["acknowledge"] = "acknowledge"
    term: int
    number: int
    refused: bool = False
    """The last of them is of a file of an attempt that was fenced, which is not listed."""
    journaled: bool = True
    """False: the journal cannot be written, and they are to be kept for the next coordinator, but for rows,
    which it would not know either."""


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
    """Those at the other end of these tasks' channels, both ways."""
    placement: dict[int, bytes] = Field(default_factory=dict)
    """By operator that feeds one of these tasks: the worker of each subtask, see :func:`pack_placement`."""
    attempts: list[TaskAttempt] = Field(default_factory=list)
    """The subtasks at the other end of these tasks' channels, both ways, whose current attempt is not the
    first."""
    barrier: int = 0
    """The last barrier of the job; 0: there has been none."""
    paused: bool = False
    """It is not over: these tasks begin with it, and read and emit nothing before it is."""

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
        """Producer index, its attempt and its worker, of each channel of an input that has not ended."""
        attempts = {each.index: each.attempt for each in self.attempts if each.operator == spec.operator}
        begin, end = (WORKER_BYTES * number for number in (spec.first, spec.first + spec.count))
        table, ended = self.placement.get(spec.operator, b"")[begin:end], set(spec.ended)
        for producer, worker in enumerate(unpack_placement(table), spec.first):
            if producer not in ended:
                yield producer, attempts.get(producer, FIRST_ATTEMPT), worker

    def bases(self, operator: int) -> dict[int, int]:
        """By subtask of an operator at the other end, the base of its attempt, if that is another one."""
        return {each.index: each.base for each in self.attempts if each.operator == operator and each.base}


class PauseTasks(ControlMessage):
    """Every task of the job on this worker is to pass that barrier on and stop behind it; or, if not
    ``paused``, that barrier and all before it have ended: those that stand go on."""

    type: Literal["pause_tasks"] = "pause_tasks"
    term: int
    job: str
    barrier: Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
    paused: bool


class DivideTasks(ControlMessage):
    """These subtasks are to move. Each of them stops behind that barrier once it has taken all that was
    emitted for it; those that feed them put the barrier on the channels to them, and go on."""

    type: Literal["divide_tasks"] = "divide_tasks"
    term: int
    job: str
    barrier: Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
    moving: list[TaskAttempt]


class PrepareJob(ControlMessage):
    """To a standby worker: what a takeover in that job would need. It keeps and loads the programs until
    ReleaseJob; a DeployTasks that leaves programs out means these."""

    type: Literal["prepare_job"] = "prepare_job"
    term: int
    job: str
    programs: dict[int, bytes]
    """By operator; none if they are too large to be kept, or there already."""
    workers: list[WorkerAddress]
    """All others: there are to be links to them."""


class CancelTasks(ControlMessage):
    """Cancel these attempts; none named: every one of the job on this worker."""

    type: Literal["cancel_tasks"] = "cancel_tasks"
    term: int
    job: str
    attempts: list[TaskAttempt] = Field(default_factory=list)


class ReleaseJob(ControlMessage):
    """Free the partitions, gates and pools of these attempts; none named: the job has ended everywhere."""

    type: Literal["release_job"] = "release_job"
    term: int
    job: str
    attempts: list[TaskAttempt] = Field(default_factory=list)


class TasksRestarted(ControlMessage):
    """These attempts take the place of earlier ones: reattach to them what reads from them here, and let go
    of what earlier ones read here."""

    type: Literal["tasks_restarted"] = "tasks_restarted"
    term: int
    job: str
    tasks: list[PlacedAttempt]
    workers: list[WorkerAddress]
    """Those that run these attempts."""


class ConsumerEnds(TaskAttempt):
    """The consumers that have read to the end what a producer writes over one edge, be it of this attempt or
    of one before it."""

    edge: int
    consumers: list[int]


class ConsumersEnded(ControlMessage):
    """Since these attempts were deployed, consumers are known to want none of their rows: none is kept for
    them, and nobody waits for them to read any. See ``OutputSpec.closed``."""

    type: Literal["consumers_ended"] = "consumers_ended"
    term: int
    job: str
    ends: list[ConsumerEnds]


class Dial(ControlMessage):
    """Dial that worker now, if not connected yet."""

    type: Literal["dial"] = "dial"
    term: int
    peer: WorkerAddress


class Probe(ControlMessage):
    """Say of each of these, which have higher ids, whether a link to it could be made."""

    type: Literal["probe"] = "probe"
    term: int
    peers: list[WorkerAddress]


class Advertise(ControlMessage):
    """A worker of another host has come: advertise the address of the interface by which you reach it."""

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
    """The coordinator's verdict: let go of that worker's connections; to the worker itself: stop."""

    type: Literal["worker_lost"] = "worker_lost"
    term: int
    worker: int
    epoch: int
    reason: str = ""


class Shutdown(ControlMessage):
    type: Literal["shutdown"] = "shutdown"
    term: int
    reason: str

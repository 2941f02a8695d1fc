"""What a task thread runs: a chain of operators that hand batches and marks to each other.

A *mark* (:class:`Watermark`, :class:`Idle`, :class:`Active`, :class:`Side`, :class:`SplitMark`) goes the same
way as batches (``exchange.batch``), in order with them.

Event times are int, microseconds since 1970 in UTC.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

from typing_extensions import TypeIs, TypeVar

from minishuffle.counters import TaskCounters
from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.spool import Spool
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME
from minishuffle.operators.user_metrics import UserMetrics

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.state_parts import StatePart

__all__ = [
    "BEGINNING_OF_TIME",
    "END_OF_TIME",
    "NO_ROWS",
    "Active",
    "AnySource",
    "Aside",
    "AsyncCall",
    "AsyncCalls",
    "CompleteFile",
    "Emit",
    "Idle",
    "Mark",
    "ModuleSource",
    "Operator",
    "Output",
    "OutputFiles",
    "Portion",
    "Program",
    "Reached",
    "Side",
    "Source",
    "SplitMark",
    "SplitSource",
    "TaskContext",
    "TimedBatch",
    "Watermark",
    "names_splits",
    "refuse_as_rows",
]

B = TypeVar("B", default=Any, covariant=True)
"""A batch: a list of rows, or a record batch."""


class Mark:
    """What travels between batches."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Watermark(Mark):
    """No record with an event time at or below ``time`` is expected from here on; one is late.

    Never goes back. (Flink: ``Watermark``.)
    """

    time: int


@dataclass(frozen=True, slots=True)
class Idle(Mark):
    """The input pauses: until it is :class:`Active` or has a watermark it holds nobody's watermark back.

    (Flink: ``WatermarkStatus.IDLE``.)
    """


@dataclass(frozen=True, slots=True)
class Active(Mark):
    """The input goes on after :class:`Idle`; stands in front of its next batch.

    Everybody behind hears of it, also those who get none of the records: from here on they wait for this
    input's watermark again, so that what the records lead to does not come late. (Flink:
    ``WatermarkStatus.ACTIVE``.)
    """


@dataclass(frozen=True, slots=True)
class Reached(Mark):
    """The watermark of the one producer that the batches which follow come from: at least that of all, and
    the same in every run. For the first operator of a task that asks for it (``by_channel``), and ends there.
    """

    time: int


@dataclass(frozen=True, slots=True)
class Side(Mark):
    """A batch of a side output; it goes to the outputs of that name and to no operator."""

    tag: str
    batch: Batch


@dataclass(frozen=True, slots=True)
class Aside:
    """What a function gives in place of a row: ``row`` goes to the side output ``name`` of its step."""

    name: str
    row: Any
    made: ClassVar[bool] = False
    """Whether this process has made any. While it has not no row is one, and none is looked at for that: it
    would take half as long again as the function that does nothing but return the row."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Aside:
        """Also for one that comes with the function, out of its pickle."""
        Aside.made = True
        return object.__new__(cls)


NO_ROWS: Final = frozenset({dict, str, bytes, Aside})
"""What may be iterated, or is an Aside that looks like a row, and is one row where several are expected."""


def refuse_as_rows(given: Any) -> NoReturn:
    """Raises WrongResult that says what to give instead of one of :data:`NO_ROWS`."""
    way = "[row] for one, or [] for none"
    if isinstance(given, str | bytes):
        way = "[text] for one row, or list(text) for its letters"
    raise WrongResult(f"the function gave {given!r:.80}, which is no list of rows: return {way}")


@dataclass(frozen=True, slots=True)
class SplitMark(Mark):
    """Which split the records are of: for watermarks by split, seen by the source's own chain only.

    ``open``: the split belongs to this subtask and has yet to end. ``current``: the batches that
    follow are of it. ``idle``: nobody waits for it until its next record. ``done``: it has ended.
    ``none``: the subtask has no split at all (``split`` is -1), and until one is open nobody waits for it.
    """

    split: int
    state: Literal["open", "current", "idle", "done", "none"]


Emit: TypeAlias = Callable[[Batch | Mark], None]


Committable: TypeAlias = bytes
"""What stands for rows that a sink of the user has prepared; empty: nothing."""


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """A file of a sink that has all its rows. ``number`` counts those of the attempt from 0; ``checksum`` is
    the SHA-256 of its bytes, in hexadecimal. In place of a file it may be what a sink of the user has
    prepared: a ``committable``, without a path."""

    number: int
    path: str
    rows: int
    bytes: int
    checksum: str
    committable: Committable = b""
    attempt: int = 0
    """The attempt that made it, if it is not the one that reports it."""
    is_last: bool = False
    """No row of the subtask follows."""


class OutputFiles(Protocol):
    """The coordinator's manifest, as a sink sees it.

    In a job that loses nothing files are *held*: one is reported once a snapshot of the task that was taken
    behind its end is safe. Until then another attempt would write its rows again.
    """

    listed: Mapping[int, int]
    """By earlier attempt of the subtask, how many of its files are in the manifest: the first ones."""
    acknowledged: int
    """How many files of this attempt are: the first ones."""
    committable: Committable
    """What an earlier attempt of the subtask has prepared last, which may not be committed."""
    held: bool
    """Files are."""
    adopted: Sequence[CompleteFile]
    """Files of earlier attempts that were complete in the snapshot with which this one begins, and are
    about to be listed."""
    is_complete: bool
    """An earlier attempt has had the last rows of the subtask listed: what comes again is not written."""
    sink_state: bytes
    """The state of the sink, as the snapshot has it with which this attempt begins."""

    @property
    def may_be_listed(self) -> int:
        """How many files of this attempt, the first ones, are listed or may be, also by another attempt."""
        ...

    def keep(self, state: bytes) -> None:
        """Put this state of the sink into the snapshots that follow; empty: none."""

    def complete(self, file: CompleteFile) -> None:
        """Have a file listed; files are reported in the order of their numbers."""

    def wait(self) -> None:
        """Have all that are complete reported, and wait until they are listed; raises TaskCancelled."""

    def finish(self) -> None:
        """The same behind the last row of the subtask."""

    def linger(self) -> None:
        """Wait for that even though the task was cancelled, for a moment at the most."""


@dataclass(slots=True)
class TaskContext:
    """What an operator may know of its surroundings."""

    job: str
    name: str
    index: int
    parallelism: int
    attempt: int
    counters: TaskCounters = field(default_factory=TaskCounters)
    now: Callable[[], float] = lambda: 0.0
    """Monotonic clock, seconds of any origin."""
    wall: Callable[[], float] = lambda: 0.0
    """Wall clock as anchored, seconds since 1970: see :mod:`minishuffle.clock`."""
    paused_seconds: Callable[[], float] = lambda: 0.0
    """For how long the attempt has stood while its job was paused; ``now`` goes without that."""
    lead: Callable[[], float] = lambda: 0.0
    """By how many seconds the system clock, which functions of users read, is ahead of ``wall``."""
    collect: Callable[[Payload], None] = lambda batch: None
    """Send rows or columns to the client (``collect`` sink)."""
    log: Callable[[str], None] = lambda line: None
    """Add a line to the job's log (``print`` sink)."""
    settle: Callable[[], None] = lambda: None
    """Wait until the coordinator has all rows that were collected; raises TaskCancelled."""
    wait_until: Callable[[Callable[[], bool]], None] = lambda ready: None
    """Wait, as for a consumer that takes nothing, until ``ready`` says so; raises TaskCancelled."""
    spool: Spool | None = None
    """Where a sink whose records other programs read keeps them."""
    files: OutputFiles | None = None
    put_aside: Callable[[Side], None] = lambda side: None
    """Send rows to a side output, beside what is emitted."""
    left_out: Callable[[str, Batch], None] | None = None
    """Takes records that are dropped, with the name of the side output that they might have gone to; None:
    nobody looks at them."""
    async_calls: Callable[[], AsyncCalls] | None = None
    """Makes the loop of an operator that calls asynchronous functions."""
    repeats_from: Callable[[], int | None] = lambda: None
    """Records in hand that are late, and not before that time, came in time before: their producer makes them
    once more. None: there are no such records."""
    alone: Callable[[Any], str | None] | None = None
    """To be called before a function takes a record that is of no batch, while a row is looked for that ends
    the process: gives why this record does, and is to be left out; None: it is not. None: nobody looks."""
    metrics: UserMetrics = field(default_factory=UserMetrics)
    """The operator's own, for the user's code."""


@dataclass(slots=True)
class AsyncCall:
    """A call of an asynchronous function, written by the thread of its loop; ``done`` comes last."""

    row: Any
    time: int | None = None
    """The row's event time, microseconds since 1970, if it came with one."""
    done: bool = False
    result: Any = None
    error: BaseException | None = None


class AsyncCalls(Protocol):
    """An event loop of the task's own for asynchronous functions, in another thread."""

    def start(
        self, fn: Callable[[Any], Awaitable[Any]], calls: Sequence[AsyncCall], timeout: float | None
    ) -> None:
        """Begin these calls, each with its row and at most ``timeout`` seconds; the task is woken when one
        has ended."""

    def wait(self, awaitable: Awaitable[Any]) -> None:
        """Until the awaitable has ended; raises what it does."""

    def cancel(self) -> None:
        """Cancel what runs, and wait until it has ended."""

    def close(self) -> None:
        """The same, and the loop ends."""


class Operator(Protocol):
    """One function of a chain. Called by one thread only, in the order open, (process, on_mark, on_clock,
    on_barrier, before_snapshot)*, finish, close. ``chained.ChainedOperator`` has the defaults."""

    name: str
    id: str
    """That of its state, the same in each plan of a job that has the step; empty if it has none."""
    first_input: int | None
    """The number of the input that is read to its end before any other is; None: in turn."""
    by_split: bool
    """It keeps the splits of a source apart (:class:`SplitMark`), which are then read in turn."""
    by_channel: bool
    """It looks at how far each producer is by itself (:class:`Reached`)."""
    is_copied: bool
    """All of its state is the same in each of its subtasks."""
    keeps_rows: bool
    """Its state is of rows that may be emitted, or lead to what is, later on."""
    shares: bool
    """What it emits may be held by its state, by another row, or by what its function keeps: a chained
    operator gets copies, unless it ``only_reads``. (An exchange copies anyway.)"""
    reports: bool
    """It has the coordinator list what it has taken: see :class:`OutputFiles`."""
    only_reads: bool
    """It leaves rows as they are, and passes none on along the chain."""

    def open(self, context: TaskContext) -> None: ...

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        """Take one batch of input number ``input`` (0 unless the operator joins)."""

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        """Take a mark. By default it is passed on. An input that has ended says
        ``Watermark(END_OF_TIME)``; a :class:`Side` never comes here."""

    def deadline(self) -> float | None:
        """When :meth:`on_clock` wants to be called, on the clock of ``TaskContext.now``; None: never."""

    def on_clock(self, now: float, emit: Emit) -> None:
        """The deadline has passed."""

    def on_barrier(self, emit: Emit) -> None:
        """A barrier is passed on behind what is emitted now: calls that are under way end first."""

    def defers_snapshot(self, *, urgent: bool) -> bool:
        """Whether a snapshot of the task has to wait, since what was taken cannot be written down now; if it
        is ``urgent``, since that cannot be helped."""

    def before_snapshot(self, emit: Emit) -> None:
        """A snapshot of the task is taken behind what is emitted now. By default as at a barrier; a sink has
        what it has taken outside of the process then, or gives it to the snapshot."""

    def finish(self, emit: Emit) -> None:
        """Every input has ended; what was kept back may be emitted now."""

    def state_rows(self) -> int:
        """How much state would be lost with the task, in rows: both sides of a join, the keys of an
        aggregation, those of every open window. Called after each batch: more rows must not slow it down."""

    def write_state(self) -> Iterator[StatePart]:
        """All that is held by key, and how far event time is, between two batches."""

    def freeze_state(self) -> Iterator[StatePart]:
        """What :meth:`write_state` gives now. The parts may be asked for one by one, between two of the
        batches that follow, also once this was called again."""

    def stored_state(self) -> Iterator[StatePart] | None:
        """What it has on disk and a cut of the whole job needs, as of now; None: nothing. The parts are made
        as they are asked for, on another thread. A next attempt of the task alone goes on without."""

    def read_state(self, parts: Iterable[StatePart]) -> None:
        """(After open, before the first batch.) Go on with what operators of this kind have written."""

    def close(self) -> Any:
        """Let go of resources; called once, also after a failure. A sink's return value (what
        msgpack takes, or None) becomes its result, after a cancel too. Not a result after a failure."""


@dataclass(frozen=True, slots=True)
class TimedBatch(Generic[B]):
    """What a source of the user gives in place of a batch: with the event time of each row, for
    ``event_time()`` right behind the source. (Flink: ``SourceOutput.collect(record, timestamp)``.)

    Args:
        batch: a list of rows or a record batch.
        times: as many, in the same order: datetimes (without a time zone: in UTC), dates or int microseconds
            since 1970; or a vector of numpy or Arrow of these.
    """

    batch: B
    times: Any
    """``Sequence[datetime | date | int] | numpy.ndarray | pyarrow.Array``."""


@runtime_checkable
class Source(Protocol[B]):
    """The user's own source.

    ``splits()`` is called in each source subtask and must give the same list each time; subtask
    ``i`` of ``p`` reads ``splits()[i::p]``. ``read(split, offset)`` yields batches (lists of rows, or
    record batches of at most 65,536 rows) from record number ``offset`` of the split on, nothing if
    it has no more than that; an empty list says that there is nothing now. A :class:`TimedBatch` brings the
    event times of its rows. Optional attributes:
    ``bounded`` (bool, default True), ``rate`` (records/s of the whole source or None), ``format``
    ("rows" or "arrow", default "rows"), ``schema`` (of record batches: their columns, if they are not
    declared beside the source).
    """

    def splits(self) -> Sequence[Any]: ...

    def read(self, split: Any, offset: int) -> Iterator[B | TimedBatch[B]]: ...


class SplitSource(Protocol[B]):
    """The user's own source whose splits have names and whose positions are its own, as of a partition of
    Kafka or of a database's log. (Flink: ``SourceReader`` and ``SourceSplit``.)

    ``splits()`` is called in each source subtask and must give the same names each time; subtask ``i`` of
    ``p`` reads ``splits()[i::p]``. Names are different texts of at most 1,024 bytes.

    ``read(split, position)`` yields pairs: a batch as of a :class:`Source`, and the position behind it, at
    most 1,024 bytes that only the source understands. It begins at a position that it gave before, or at the
    beginning of the split if that is empty. After a restart the rows behind that position which may have been
    emitted already are read again and left out: the same rows have to come again in the same order. A source
    that cannot read them again has ``replayable = False``: none are left out then.

    None in place of a batch says that the split is *idle*: it holds no other's event time back until it has
    its next record.

    It may have a method ``acknowledge(positions)``, which is called, in the thread of ``read``, with the last
    positions by name of their splits that are safe: the source's task has passed their batches on, and the
    coordinator has them, so that no later attempt begins before. What precedes them may be thrown away
    outside. That a batch was passed on does not say that all functions and sinks have taken its rows, which
    are lost if the worker of one is: this is at most once. The last positions of an attempt that fails, or is
    cancelled, may not be acknowledged.

    In a job that is to lose nothing (``guarantee="at_least_once"``) positions are safe once the oldest
    durable snapshot that is kept covers them, and the oldest one of the task itself. Such a job refuses a
    source with ``acknowledge`` if it is bounded, or there are no durable snapshots; it need not be
    ``replayable``, as long as it gives again whatever was not acknowledged.

    Optional attributes: those of a :class:`Source`, and ``discovery_interval``, a timedelta. With that the
    names may change: each subtask calls ``splits()`` so often, between two reads, and reads the names whose
    stable hash modulo the parallelism is its index. A name that a later answer lacks is still read to its
    end. One that has ended is not read again, and is forgotten once an answer lacks it: given again, it is a
    new split. The source is not ``bounded`` then, and has no ``rate``.

    What ``splits()`` gives, or ``read`` yields, against this contract ends the job at once (``WrongResult``),
    and so does a ``WrongInput`` that they raise; after any other error of theirs the subtask restarts.
    """

    replayable: bool

    def splits(self) -> Sequence[str]: ...

    def read(self, split: str, position: bytes, /) -> Iterator[tuple[B | TimedBatch[B] | None, bytes]]: ...


AnySource: TypeAlias = "Source[Any] | SplitSource[Any]"


def names_splits(source: AnySource) -> TypeIs[SplitSource[Any]]:
    """Whether it is one of those whose splits have names: it says whether it is ``replayable``."""
    return hasattr(source, "replayable")


@dataclass(frozen=True, slots=True)
class Portion:
    """What a source gives in place of a batch if it left records of the split out, which count as records of
    it all the same: the ``batch`` is what is left of ``records`` of them. ``letters`` has a text for each one
    that is missing: which it is, and why."""

    batch: pa.RecordBatch
    records: int
    policy: Literal["skip", "dead_letter"]
    letters: Sequence[str]


@dataclass(slots=True)
class Output:
    """One out-edge of a chain: how a batch is cut up among the consumers.

    ``edge`` is the index in the job graph. ``keys`` are column names (Arrow) or None; with
    ``partitioner == "hash"`` and ``keys is None`` batches have their keys with them.
    ``choose`` is the user's own function (row, consumers) -> consumer index for ``partitioner ==
    "custom"``. An output with a ``side`` takes the batches of the :class:`Side` of that tag, and no others.
    Of record batches only ``columns`` are shipped, those that a consumer or something behind it reads; None:
    all. Event times beside the records are shipped if something reads them there: ``times``.
    """

    edge: int
    partitioner: str
    keys: tuple[str, ...] | None = None
    choose: Callable[[Any, int], int] | None = None
    side: str | None = None
    columns: frozenset[str] | None = None
    times: bool = False


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module of the user's that workers do not have."""

    text: str
    path: str
    is_package: bool


@dataclass(slots=True)
class Program:
    """What a vertex runs: a source (or None), the chain, and its outputs.

    ``modules`` are what functions may import on workers, by name.
    """

    source: AnySource | None
    operators: list[Operator]
    outputs: list[Output]
    modules: Mapping[str, ModuleSource] = field(default_factory=dict)
    times: bool = True
    """Something reads the event times that batches of the source bring."""

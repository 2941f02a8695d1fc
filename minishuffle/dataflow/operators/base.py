"""What a task thread runs: a chain of operators that hand batches to each other.

A *batch* is a list of Python objects (rows), a :class:`KeyedRows`, or a ``pyarrow.RecordBatch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from minishuffle.counters import TaskCounters
from minishuffle.exchange.elements import KeyedRows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Batch", "Emit", "KeyedRows", "Operator", "Program", "Output", "Source", "TaskContext"]


Batch: TypeAlias = "list[Any] | KeyedRows | pa.RecordBatch"
Emit: TypeAlias = Callable[["Batch"], None]


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
    """Wall clock, seconds since the epoch."""
    collect: Callable[[list[Any]], None] = lambda rows: None
    """Send rows to the client (``collect`` sink)."""
    log: Callable[[str], None] = lambda line: None
    """Add a line to the job's log (``print`` sink)."""


class Operator(Protocol):
    """One function of a chain. Called by one thread only, in the order open, process*, finish, close."""

    name: str

    def open(self, context: TaskContext) -> None: ...

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        """Take one batch of input number ``input`` (0 unless the operator joins)."""

    def finish(self, emit: Emit) -> None:
        """Every input has ended; what was kept back may be emitted now."""

    def close(self) -> Any:
        """Let go of resources; called once, also after a failure. A sink's return value (what
        msgpack takes, or None) becomes its result. Not a result after a failure."""


@runtime_checkable
class Source(Protocol):
    """The user's own source.

    ``splits()`` is called in each source subtask and must give the same list each time; subtask
    ``i`` of ``p`` reads ``splits()[i::p]``. ``read(split, offset)`` yields batches (lists of rows, or
    record batches of at most 65,536 rows) from record number ``offset`` of the split on; an empty
    list says that there is nothing now. Optional attributes: ``bounded`` (bool, default True),
    ``rate`` (records/s of the whole source or None), ``format`` ("rows" or "arrow", default
    "rows").
    """

    def splits(self) -> Sequence[Any]: ...

    def read(self, split: Any, offset: int) -> Iterator[Batch]: ...


@dataclass(slots=True)
class Output:
    """One out-edge of a chain: how a batch is cut up among the consumers.

    ``edge`` is the index in the job graph. ``keys`` are column names (Arrow) or None; with
    ``partitioner == "hash"`` and ``keys is None`` batches are KeyedRows. ``choose`` is the user's
    own function (row, consumers) -> consumer index for ``partitioner == "custom"``.
    """

    edge: int
    partitioner: str
    keys: tuple[str, ...] | None = None
    choose: Callable[[Any, int], int] | None = None


@dataclass(slots=True)
class Program:
    """What is cloudpickled for a vertex: a source (or None), the chain, and its outputs."""

    source: Source | None
    operators: list[Operator]
    outputs: list[Output]

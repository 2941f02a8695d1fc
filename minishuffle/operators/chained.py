"""What every operator of a chain shares: its life cycle's defaults, and what becomes of a record
whose function raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from minishuffle.errors import FatalRecord, UnserializableRecord, WrongResult, described
from minishuffle.exchange.batch import Batch, Times
from minishuffle.exchange.rows import pack_rows, preview
from minishuffle.exchange.sizes import Drop, ListedTimes, RowsOut
from minishuffle.limits import DEAD_LETTER_CHARS
from minishuffle.operators.base import (
    Aside,
    Emit,
    Mark,
    Operator,
    Side,
    TaskContext,
)
from minishuffle.operators.state_parts import StatePart

__all__ = [
    "ChainedOperator",
    "Emission",
    "Failed",
    "ForgivingOperator",
    "OnError",
    "RecordOperator",
    "asides_of",
    "dropper_of",
    "emit_rows",
    "fatal",
    "preview",
]

OnError: TypeAlias = Literal["fail", "skip", "dead_letter", "side"]
"""``fail`` ends the task; ``skip`` drops and counts that record alone; ``dead_letter`` also logs it, ``side``
sends it to the side output of errors."""

Emission: TypeAlias = Literal["each", "batch", "end"]
"""When a keyed operator emits: per record, per key and batch, or per key at the end of the input."""

Failed: TypeAlias = Callable[[Exception, Any], None]
"""Takes what a function raised, and the record; raises it again, or drops the record."""


class ChainedOperator:
    """Opens, finishes and closes with nothing to do, passes marks on; subclasses add ``process``."""

    name = "operator"
    id = ""
    first_input: int | None = None
    by_split = False
    by_channel = False
    is_copied = False
    keeps_rows = False
    shares = False
    reports = False
    only_reads = False

    @property
    def keeps_in_process(self) -> bool:
        """(Of a sink.) What it has taken is nowhere else until its task ends, and in no snapshot."""
        return False

    def open(self, context: TaskContext) -> None:
        self.context = context

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        emit(mark)

    def deadline(self) -> float | None:
        return None

    def on_clock(self, now: float, emit: Emit) -> None:
        """Nothing is due."""

    def on_barrier(self, emit: Emit) -> None:
        """Nothing is under way."""

    def defers_snapshot(self, *, urgent: bool) -> bool:
        return False

    def before_snapshot(self, emit: Emit) -> None:
        self.on_barrier(emit)

    def finish(self, emit: Emit) -> None:
        """Nothing is kept back."""

    def state_rows(self) -> int:
        return 0

    def write_state(self) -> Iterator[StatePart]:
        """What is held by key; nothing."""
        return iter(())

    def freeze_state(self) -> Iterator[StatePart]:
        """By default all of it is made now."""
        return iter(list(self.write_state()))

    def stored_state(self) -> Iterator[StatePart] | None:
        return None

    def read_state(self, parts: Iterable[StatePart]) -> None:
        """Go on with state that operators of this kind have written; there is none."""

    def close(self) -> Any:
        return None

    def claim(self) -> str | None:
        """(At submission.) What this operator writes to and no other may. Checks again what was checked
        when the stream was built and may have changed since."""
        return None

    def named(self, name: str, id: str = "") -> Self:
        """The same under another name, its state under that id."""
        if (name, id) == (self.name, self.id):
            return self
        other = copy.copy(self)
        other.name, other.id = name, id
        return other


class ForgivingOperator(ChainedOperator):
    """Deals with records that something is wrong with by one of the policies of :data:`OnError`."""

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self.errors_tag = ""
        """The tag of the side output of errors; "" without one."""
        self.last_time: Times | None = None
        """A vector of one: the time of the last row that was emitted, if they have one beside them."""

    def put_errors_aside(self, tag: str) -> None:
        """Give records for which something is wrong the side output of that tag; "" is none."""
        self.errors_tag = tag

    def drop(self, error: Exception, record: Any, times: Times | None = None) -> None:
        """Count a record that is dropped because of ``error``, and log it or put it aside if it is to be.

        Args:
            times: a vector of one, the record's. None: that of the last one emitted, if they have any, as of
                one that cannot be sent.
        """
        errors, policy, left_out = self.context.counters.user_errors, self.on_error, self.context.left_out
        errors[policy] = errors.get(policy, 0) + 1
        if policy == "dead_letter":
            what = described(error)
            shown = preview(record, DEAD_LETTER_CHARS)
            self.context.log(f"dead letter: {self.name}: {what}: record {shown}")
        if policy == "side":
            batch = self._errors(error, record, self.last_time if times is None else times)
            self.context.put_aside(Side(self.errors_tag, batch))
        elif left_out is not None:
            left_out("errors", self._errors(error, record, None))

    def _errors(self, error: Exception, record: Any, times: Times | None) -> Batch:
        """One record of the side output of errors."""
        row = {"operator": self.name, "error": described(error), "record": _as_sent(record)}
        return Batch([row], None, times)

    def note_failure(self, error: BaseException, record: Any) -> None:
        """Add to the error which record raised it, and where."""
        error.add_note(f"raised in operator {self.name!r} by the record {preview(record)}")


def _as_sent(record: Any) -> Any:
    """The record, or what it looks like if no exchange takes it."""
    try:
        pack_rows([record])
    except UnserializableRecord:
        return preview(record)
    return record


class RecordOperator(ForgivingOperator):
    """Calls a function of the user for each record. An object with ``open(context)`` or ``close()`` opens and
    closes with the operator."""

    def __init__(self, fn: Callable[..., Any], on_error: OnError) -> None:
        super().__init__(on_error)
        self.fn = fn
        self.side_tags: Mapping[str, str] = {}
        """Tags of the side outputs into which the function may put rows, by name."""

    def put_rows_aside(self, tags: Mapping[str, str]) -> None:
        """Give rows that the function puts aside the side outputs of these tags, by name."""
        self.side_tags = tags

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._call_hook("open", context)

    def close(self) -> Any:
        self._call_hook("close")

    def _call_hook(self, name: str, *arguments: TaskContext) -> Any:
        """What the hook gives. A class that is called for each record, ``Path`` say, has none: its instances
        have them."""
        hook = None if isinstance(self.fn, type) else getattr(self.fn, name, None)
        return hook(*arguments) if callable(hook) else None

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        """See :meth:`Operator.process`."""
        raise NotImplementedError

    def failed(self, error: Exception, record: Any) -> None:
        """The function raised for a record: raise that again, or drop the record, as ``on_error`` says."""
        if self.on_error == "fail":
            self.note_failure(error, record)
            raise error
        self.drop(error, record)

    def parted(self, emit: Emit) -> Callable[[Batch], None]:
        """Emits as :meth:`emit_parted` does."""
        return lambda batch: self.emit_parted(batch, emit)

    def emit_parted(self, batch: Batch, emit: Emit) -> None:
        """Emit rows, those that are an :class:`Aside` to its side output.

        Raises:
            WrongResult: there is no such side output.
        """
        rows, times = batch.payload, batch.times
        if times is not None:
            self.last_time = times[-1:]
        if not Aside.made or not asides_of(rows):
            emit(batch)
            return
        apart: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            apart.setdefault(self._tag_of(row.name) if type(row) is Aside else "", []).append(number)
        kept = apart.pop("", [])
        for tag, numbers in apart.items():
            aside = [rows[number].row for number in numbers]
            emit(Side(tag, Batch(aside, None, None if times is None else times[numbers])))
        if kept:
            emit(Batch([rows[number] for number in kept], None, None if times is None else times[kept]))

    def _tag_of(self, name: Any) -> str:
        tags = self.side_tags
        if isinstance(name, str) and name in tags:
            return tags[name]
        names = ", ".join(map(repr, [*tags, name]))
        raise WrongResult(
            f"{self.name}: its function gave Aside({name!r:.80}, ...) and there is no such side output: "
            f"write sides=[{names:.400}]"
        )


def fatal(operator: Operator, why: str, record: Any, what: str = "") -> FatalRecord:
    """That a record ends the process of each attempt in which the operator takes it. ``what`` says for what
    its function was called, if not for the record."""
    if isinstance(operator, ForgivingOperator) and operator.on_error != "fail":
        return FatalRecord(f"the function{what} {why}")
    return FatalRecord(
        f"the function of {operator.name!r}{what} {why}: correct it, or where its step has on_error, leave "
        f"such records out with 'dead_letter': record {preview(record)}"
    )


def dropper_of(operators: Sequence[Operator]) -> Drop | None:
    """What drops a row that the chain gives and that cannot be sent: the operator that made the row, if its
    ``on_error`` says so; None: such a row fails the task."""
    for operator in reversed(operators):
        if not operator.only_reads:
            if isinstance(operator, ForgivingOperator) and operator.on_error != "fail":
                return operator.drop
            return None
    return None


def asides_of(results: Sequence[Any]) -> Sequence[Aside]:
    """Those among what a function gave."""
    return [each for each in results if type(each) is Aside] if Aside.made else ()


def emit_rows(rows: list[Any], emit: Callable[[Batch], None], times: list[int] | None = None) -> None:
    """Emit rows, with their times, in batches within BATCH_ROWS_MAX and about BATCH_BYTES_MAX; none if there
    are none."""
    out = RowsOut(emit, None if times is None else ListedTimes(times))
    out.extend(rows)
    out.look()
    out.flush()

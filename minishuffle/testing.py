"""Runs a job, a source or a sink in a test: without a cluster, in the calling thread, in milliseconds.

:func:`run` takes rows for each source of a stream or table and gives what reaches its end; :func:`start` does
the same by steps. The operators are those of a cluster, with one subtask each, in whose chains rows go in the
order given. Sources and sinks of the plan are not opened. Functions are called as they are, not as copies:
what an object of yours holds after a run, the next one finds there.

:func:`check_source` and :func:`check_sink` put a source and a sink of your own through what a job does to
them: copies, subtasks, restarts and ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import pyarrow as pa

from minishuffle.connectors.pushed import PushedSource
from minishuffle.connectors.sinks import Sink, UserSink
from minishuffle.errors import UsageError, did_you_mean
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.collected import table_of
from minishuffle.exchange.rows import pack_result
from minishuffle.exchange.schemas import as_declared, batch_without_rows
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.limits import LIST_ROWS
from minishuffle.operators.base import AnySource, CompleteFile, Source, TaskContext
from minishuffle.operators.batch_times import microseconds
from minishuffle.operators.pandas_index import given_table
from minishuffle.operators.row_copies import copies_of
from minishuffle.plan.arguments import checked_parallelism
from minishuffle.plan.detached import detached
from minishuffle.plan.graph import Guarantee
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.nodes import ObjectSchema
from minishuffle.plan.pickling import copied_program
from minishuffle.plan.programs import ProgramSpec
from minishuffle.runtime.conformance import SourceCheck
from minishuffle.runtime.onethread import OneThread

if TYPE_CHECKING:
    from minishuffle.api.stream_base import StreamBase

__all__ = ["JobHarness", "check_sink", "check_source", "run", "start"]

CLOCK_STEP: Final = 1e-6
"""Seconds by which the clock goes on at least where something is due."""


def run(stream: StreamBase, inputs: Any = None) -> Any:
    """What a job makes of these rows.

    A source of rows takes a list, a table's a ``pyarrow.Table``, a DataFrame of pandas or Polars or a list of
    dicts, with the columns of its schema and cast to its types where that changes no value. The clock stands
    still. A watermark follows each record, so that which of them are late depends on their order.

    Args:
        stream: a stream or table, or several that end in sinks (``Stream.together``).
        inputs: the rows of the job's source, or a :class:`~minishuffle.operators.base.TimedBatch` of them if
            it brings their event times; of several a dict by the sources' names, which says in which order
            they come. Collections in memory that it leaves out (``Stream.items``, ``Table.from_arrow``)
            give their own rows, before all others.

    Returns: what reaches the end, or each sink: a list of rows, or a ``pyarrow.Table``. A dict of these by
        the name of the sink if there are several, or if records were dropped: late ones, which are there as
        ``<step>.late`` (of the right side of a join ``<step>.late_right``), and those whose function raised,
        as ``<step>.errors`` with ``operator``, ``error`` and ``record``.

    Raises:
        UsageError: the names of ``inputs`` are not those of the sources, or rows do not fit a schema; two
            sources have one name, unless all are collections in memory and there are no ``inputs``.
        Exception: what a function of the job raises.
    """
    __tracebackhide__ = True
    with start(stream) as job:
        job.push_all(inputs)
        return job.finish()


def start(stream: StreamBase) -> JobHarness:
    """A job that takes rows as :func:`run` does, step by step.

    Raises:
        InvalidGraph: the job cannot run anywhere.
        UsageError: it is none; sinks share a name.
    """
    return JobHarness(stream)


def check_source(source: AnySource, *, parallelism: int = 2, records: int = 10_000) -> Any:
    """Read a source of your own as a job does, each split also from places where a restart could go on: the
    rest has to be the same then.

    Each reading is of a copy, as each subtask has one. Rows are the same if they are equal, or look alike.
    Of a source that is not ``replayable`` no split is read again, but at its end. The method ``acknowledge``
    is called last, for the first half and then the rest, each in a copy of its own; if it is not
    ``replayable``, while it is read first.

    Args:
        parallelism: of its subtasks.
        records: how many each subtask reads at most. One of an endless source also stops once it had no
            record a hundred times in a row.

    Returns: what was read first: a list of rows, or a ``pyarrow.Table``, subtask after subtask.

    Raises:
        UsageError: it does not keep the contract of a :class:`~minishuffle.operators.base.Source` or a
            :class:`~minishuffle.operators.base.SplitSource`, or cannot be copied.
        Exception: what it raises.
    """
    name = source.__name__ if isinstance(source, type) else type(source).__name__
    if isinstance(source, type):
        raise UsageError(f"check_source takes a source, not the class {name}: write {name}(...)")
    if not isinstance(source, Source):
        raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
    check = SourceCheck(
        lambda: copied_program(ProgramSpec(source), name).source,
        checked_parallelism(parallelism, "check_source"),
        records,
    )
    check.run()
    return _joined(check.batches, None)


def check_sink(sink: Sink, rows: Any, *, parallelism: int = 2, guarantee: Guarantee = "loss") -> list[Any]:
    """Write rows into a sink of your own as a job does whose first attempt of each subtask fails halfway.

    That attempt is closed and another one writes all of its rows; a subtask without rows is opened and closed
    too. Its ``flush``, if it has one, is called behind the first batch, and in the second attempt before it
    is closed. Of a sink that commits in two phases, the second attempt commits what the first one had
    prepared and not committed, and a third one, without rows, what the second has committed last. Each
    attempt has a copy of the sink, and of the rows. What an attempt that failed wrote outside is not taken
    back.

    With the guarantee ``at_least_once`` a snapshot follows each batch. The second attempt begins at the
    middle one of those of the first, and writes the rows behind it. If it commits in two phases, what it
    has prepared before that snapshot is committed by both, and what the first has prepared behind it never.

    Args:
        rows: a list, or a ``pyarrow.Table`` or what makes one: 4,096 at a time go to the subtasks in
            turn.
        parallelism: of its subtasks.
        guarantee: of the job.

    Returns: the result of each subtask.

    Raises:
        UsageError: it is no :class:`~minishuffle.connectors.sinks.Sink`, or cannot be copied; ``rows`` are
            neither.
        WrongResult: a result is not what msgpack takes.
        Exception: what it raises, with a note that says in which method.
    """
    if isinstance(sink, type):
        name = sink.__name__
        raise UsageError(f"check_sink takes a sink, not the class {name}: write {name}(...)")
    UserSink(sink)
    if not isinstance(rows, list | tuple) and not hasattr(rows, "__arrow_c_stream__"):
        raise UsageError(f"check_sink takes a list of rows or a pyarrow.Table, not a {type(rows).__name__}")
    if hasattr(rows, "__arrow_c_stream__"):
        batches: list[Any] = given_table(rows, "check_sink").to_batches(max_chunksize=LIST_ROWS)
    else:
        batches = [rows[start : start + LIST_ROWS] for start in range(0, len(rows), LIST_ROWS)]
    count = checked_parallelism(parallelism, "check_sink")
    results = []
    for index in range(count):
        part = batches[index::count]
        half = part[: len(part) // 2] or [each[: len(each) // 2] for each in part[:1]]
        if guarantee == "at_least_once":
            results.append(_written_with_snapshots(sink, index, count, part))
            continue
        lost = _Manifest()
        context = TaskContext("test", type(sink).__name__, index, count, FIRST_ATTEMPT, files=lost)
        _written(sink, context, half)
        last = _Manifest(lost.committable)
        second = replace(context, attempt=FIRST_ATTEMPT + 1, files=last)
        results.append(_written(sink, second, part, finishes=True))
        if last.committable:
            third = replace(context, attempt=FIRST_ATTEMPT + 2, files=_Manifest(last.committable))
            _written(sink, third, [], finishes=True)
    return results


class _Manifest:
    """A manifest in whose coordinator what was prepared is durable once the sink waits for it."""

    def __init__(
        self, committable: bytes = b"", *, held: bool = False, listed: int = 0, sink_state: bytes = b""
    ) -> None:
        self.listed: Mapping[int, int] = {FIRST_ATTEMPT: listed} if listed else {}
        self.acknowledged = self.prepared = 0
        self.committable = committable
        self.held, self.is_complete = held, False
        self.adopted: Sequence[CompleteFile] = ()
        self.sink_state = sink_state

    @property
    def may_be_listed(self) -> int:
        return self.prepared

    def complete(self, file: CompleteFile) -> None:
        self.committable = file.committable
        self.prepared += 1

    def keep(self, state: bytes) -> None:
        self.sink_state = state

    def wait(self) -> None:
        self.acknowledged = self.prepared

    def finish(self) -> None:
        self.wait()

    def linger(self) -> None:
        """It is not there in time."""


def _written_with_snapshots(sink: Sink, index: int, count: int, batches: Sequence[Any]) -> Any:
    """The result of a subtask whose first attempt fails at its end, and whose second begins in the middle."""
    first = _Manifest(held=True)
    context = TaskContext("test", type(sink).__name__, index, count, FIRST_ATTEMPT, files=first)
    middle = len(batches) // 2
    safe = _Manifest(held=True)

    def snapshot(number: int) -> None:
        nonlocal safe
        if number == middle:
            first.wait()
            safe = _Manifest(
                first.committable, held=True, listed=first.acknowledged, sink_state=first.sink_state
            )

    _written(sink, context, batches, snapshot=snapshot)
    second = replace(context, attempt=FIRST_ATTEMPT + 1, files=safe)
    behind = batches[middle + 1 :]
    return _written(sink, second, behind, finishes=True, snapshot=lambda number: safe.wait())


def _written(
    sink: Sink,
    context: TaskContext,
    batches: Sequence[Any],
    *,
    finishes: bool = False,
    snapshot: Callable[[int], None] | None = None,
) -> Any:
    """The result of one attempt, whose input ends if it ``finishes``; ``snapshot`` is called with the number
    of each batch for one behind it."""
    name = type(sink).__name__
    spec = ProgramSpec(operators=[(name, OperatorSpec("sink", {"sink": UserSink(sink)}))])
    ((_, copy),) = copied_program(spec, name).operators
    operator: UserSink = copy.parameters["sink"]
    where = f"in attempt {context.attempt} of subtask {context.index}"
    with _noted(f"raised by {name}.open {where}, or by commit of what was prepared before"):
        operator.open(context)
    for number, batch in enumerate(batches):
        own = copies_of(batch) if isinstance(batch, list | tuple) else batch
        with _noted(f"raised by {name}.write {where} for batch {number} of {len(batches)}"):
            operator.process(Batch(own), 0, lambda item: None)
        with _noted(f"raised by {name}.flush, prepare or commit {where}"):
            if snapshot is not None:
                operator.before_snapshot(lambda item: None)
                snapshot(number)
            if snapshot is not None or not number:
                operator.on_clock(math.inf, lambda item: None)
    if finishes:
        with _noted(f"raised by {name}.flush, prepare or commit {where}"):
            operator.finish(lambda item: None)
    with _noted(f"raised by {name}.close {where}, or its result is none"):
        result = operator.close()
        pack_result(result)
    return result


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Says of an error where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


class JobHarness:
    """A job between the steps of a test; made by :func:`start`.

    Use it in a ``with`` block, or call :meth:`finish`: both close the functions of the job. After an error
    they are closed as well.
    """

    def __init__(self, stream: StreamBase) -> None:
        self._plan = detached(stream)
        self._sources = {source.name: source for source in self._plan.sources}
        self._clock = 0.0
        self._dropped: dict[str, list[Payload]] = {}
        self._run = OneThread(
            self._plan.programs,
            self._plan.edges,
            job="test",
            now=self._read_clock,
            wall=self._read_clock,
            left_out=self._note,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self._end_sources()
        self._run.close(error)

    def push(self, rows: Any, input: str | None = None) -> None:
        """Give the source of that name rows, and run until nothing is left to do.

        Raises:
            UsageError: there are several sources and no name, or none or two of that name; or the rows do not
                fit.
            Exception: what a function of the job raises.
        """
        __tracebackhide__ = True
        self._push(self._source(input), rows)

    def end(self, input: str | None = None) -> None:
        """End the source of that name alone, and run until nothing is left to do: the small side of a
        broadcast join is read to its end first.

        Raises: as :meth:`push`.
        """
        __tracebackhide__ = True
        self._source(input).end()
        self._running(self._run.drain)

    def advance_to(self, time: datetime | int) -> None:
        """Have event time reach ``time``, wherever the job has some: all records before it have come, and
        windows up to it are complete. It never goes back.

        Args:
            time: a datetime (without a time zone: in UTC) or microseconds since 1970.

        Raises:
            UsageError: it is no time, or the job has no event time.
        """
        __tracebackhide__ = True
        try:
            reached = microseconds(time)
        except TypeError as error:
            raise UsageError(f"advance_to takes a datetime or microseconds: {error}") from error
        if not self._run.has_event_time:
            raise UsageError("the job has no event time to advance: call event_time(...) on its stream")
        self._running(lambda: self._run.advance(reached - 1))

    def advance_clock(self, seconds: float) -> None:
        """Have the clock go on, which begins at 1970: timers of the wall clock, ``ttl``, ``idle_after`` and
        others come in their order.

        Raises:
            UsageError: it would go back.
        """
        __tracebackhide__ = True
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise UsageError(f"advance_clock takes seconds from 0 on, not {seconds!r}: a clock goes forward")
        self._running(lambda: self._go_on(self._clock + seconds))

    def _go_on(self, until: float) -> None:
        while (due := self._run.deadline()) is not None and due <= until:
            self._clock = max(self._clock + CLOCK_STEP, due)
            self._run.drain()
        self._clock = max(self._clock, until)
        self._run.drain()

    def take(self) -> Any:
        """What has come out since the last call, in the form that :func:`run` gives."""
        found: dict[str, Any] = {}
        for name, end in self._plan.ends.items():
            schema = None if isinstance(end.schema, ObjectSchema) else end.schema.remove_metadata()
            found[name] = _joined(end.sink.take(), schema)
        dropped, self._dropped = self._dropped, {}
        found |= {name: _joined(payloads, None) for name, payloads in dropped.items()}
        return _Results(found, dropped) if len(found) > 1 else next(iter(found.values()))

    def finish(self) -> Any:
        """End all sources, close the functions, and take what has come out since the last call.

        Raises:
            Exception: what a function of the job raises.
        """
        __tracebackhide__ = True
        self._end_sources()
        self._running(self._run.drain)
        return self.take()

    def push_all(self, inputs: Any) -> None:
        """Give the sources the inputs of :func:`run`, one after the other.

        Raises:
            UsageError: the names are not those of the sources, or rows do not fit.
            Exception: what a function of the job raises.
        """
        __tracebackhide__ = True
        for source, rows in self._by_source(inputs):
            self._push(source, rows)

    def _by_source(self, inputs: Any) -> list[tuple[PushedSource, Any]]:
        __tracebackhide__ = True
        in_memory = [(each, each.held) for each in self._plan.sources if each.held is not None]
        if inputs is None and len(in_memory) == len(self._plan.sources):
            return in_memory
        self._check_names()
        names = list(self._sources)
        if inputs is None:
            inputs = {}
        elif not isinstance(inputs, Mapping):
            if len(names) > 1:
                raise UsageError(f"the job has {len(names)} sources: write {_example(names)}")
            return [(self._sources[names[0]], inputs)]
        held = [(each, rows) for each, rows in in_memory if each.name not in inputs]
        missing = [name for name in names if name not in {*inputs, *(each.name for each, _ in held)}]
        unknown = [name for name in inputs if name not in names]
        if missing or unknown:
            wrong = [f"{name!r} is missing" for name in missing]
            wrong += [f"{name!r} is no source of it" for name in unknown]
            raise UsageError(f"inputs of the job: {', '.join(wrong)}: write {_example(names)}")
        return [*held, *((self._sources[name], rows) for name, rows in inputs.items())]

    def _check_names(self) -> None:
        __tracebackhide__ = True
        ((name, number),) = Counter(source.name for source in self._plan.sources).most_common(1)
        if number > 1:
            raise UsageError(f"two sources of the job are named {name!r}: give each its own, name('...')")

    def _source(self, name: str | None) -> PushedSource:
        __tracebackhide__ = True
        self._check_names()
        sources = self._sources
        if name is None and len(sources) == 1:
            return next(iter(sources.values()))
        if name not in sources:
            given = "no input is named" if name is None else f"{name!r} is no source of the job"
            raise UsageError(f"{given}: write push(rows, ...) with one of {', '.join(map(repr, sources))}")
        return sources[name]

    def _push(self, source: PushedSource, rows: Any) -> None:
        __tracebackhide__ = True
        try:
            source.push(rows)
        except UsageError as error:
            raise error.with_traceback(None) from None
        self._running(self._run.drain)

    def _read_clock(self) -> float:
        return self._clock

    def _note(self, operator: str, side: str, batch: Batch) -> None:
        self._dropped.setdefault(f"{operator}.{side}", []).append(batch.payload)

    def _running(self, steps: Callable[[], None]) -> None:
        __tracebackhide__ = True
        try:
            self._run.guarded(steps)
        except BaseException:
            self._end_sources()
            raise

    def _end_sources(self) -> None:
        for source in self._plan.sources:
            source.end()


class _Results(dict[str, Any]):
    """What reached several ends, or was dropped, by name; says so to who takes it for that of one end."""

    def __init__(self, found: Mapping[str, Any], dropped: Mapping[str, list[Payload]]) -> None:
        super().__init__(found)
        self._dropped = list(dropped)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            text = f"the result is a dict and has no attribute {name!r}: {self._way()}"
            raise AttributeError(text, name=name, obj=self)

    def __missing__(self, key: object) -> NoReturn:
        side = str(key).rpartition(".")[2]
        alike = {name.rpartition(".")[2]: name for name in self}
        near = did_you_mean(alike.get(side, str(key)), self)
        raise KeyError(f"there is no {key!r}: {near}there are {', '.join(map(repr, self))}: {self._way()}")

    def _way(self) -> str:
        dropped = [f"{name} has {len(self[name])}" for name in self._dropped]
        first = f"take result[{next(iter(self))!r}]"
        return f"rows were dropped: {', '.join(dropped)}; {first}" if dropped else f"{first}, or another"


def _joined(payloads: list[Payload], schema: pa.Schema | None) -> Any:
    """One list of all rows, or one table of all columns, in the ``schema`` of its end if there is one."""
    batches = [payload for payload in payloads if not isinstance(payload, list)]
    if schema is not None:
        batches = [as_declared(batch, schema) for batch in batches] or [batch_without_rows(schema)]
    return table_of(batches) if batches else [row for payload in payloads for row in payload]


def _example(names: list[str]) -> str:
    return f"{{{', '.join(f'{name!r}: rows' for name in names)}}}"

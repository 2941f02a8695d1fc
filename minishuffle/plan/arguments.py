"""Checks of what the methods of a stream are given, so that a mistake raises where it was written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minishuffle.errors import UnknownName, UsageError, did_you_mean
from minishuffle.exchange.schemas import without_dictionary
from minishuffle.limits import ASYNC_CALLS_MAX, DURATION_MAX, NAME_BYTES_MAX, PARALLELISM_MAX

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.base import AnySource

__all__ = [
    "ONE_GROUP",
    "check_callable",
    "checked_concurrency",
    "check_columns",
    "check_distinct",
    "check_key_types",
    "check_late",
    "check_on_error",
    "check_time_type",
    "checked_duration",
    "checked_name",
    "checked_parallelism",
    "checked_paths",
    "discovery_seconds",
    "key_columns",
]


ONE_GROUP = (
    "for one group of all rows write with_columns(all=pc.scalar(0)).key_by('all') of a table, with pc for "
    "pyarrow.compute, or key_by(lambda row: 0) of a stream"
)
"""Where somebody wants a value of all rows."""


def check_callable(fn: Any, method: str, *, awaited: bool = False) -> None:
    """Raises UsageError unless ``fn`` can be called, and what it gives is a value or is ``awaited``."""
    if not callable(fn):
        raise UsageError(f"{method} takes a function, not {_shown(fn)}")
    if not awaited and any(map(inspect.iscoroutinefunction, (fn, type(fn).__call__))):
        raise UsageError(
            f"{method} awaits nothing, and {_shown(fn)} is a coroutine function: write "
            "map_async(fn, concurrency=...)"
        )
    if awaited and _gives_no_awaitable(fn):
        raise UsageError(
            f"{method} takes an asynchronous function, and {_shown(fn)} gives nothing to await: define it "
            "with 'async def' and 'return', or use map or flat_map"
        )


def _gives_no_awaitable(fn: Any) -> bool:
    """As far as it can be known without a call: a class, a generator function. A plain function may give an
    awaitable that it got from somewhere else."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, type):
        makes_instances = type(fn).__call__ is type.__call__ and not inspect.isfunction(fn.__new__)
        return makes_instances and not hasattr(fn, "__await__")
    for called in (fn, type(fn).__call__):
        if inspect.isasyncgenfunction(called):
            return True
        if inspect.isgeneratorfunction(called):
            code = getattr(called, "__code__", None)  # that of a method too
            return code is not None and not code.co_flags & inspect.CO_ITERABLE_COROUTINE
    return False


def checked_parallelism(count: Any, where: str) -> int:
    """The number of subtasks, if it is one.

    Raises:
        UsageError: it is not a whole number in 1..PARALLELISM_MAX.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= PARALLELISM_MAX:
        raise UsageError(f"{where} takes a whole number from 1 to {PARALLELISM_MAX}, not {_shown(count)}")
    return count


def checked_concurrency(count: Any) -> int:
    """How many calls of ``map_async`` may be under way.

    Raises:
        UsageError: it is no whole number, or out of range.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= ASYNC_CALLS_MAX:
        raise UsageError(f"map_async(concurrency=...) takes 1 to {ASYNC_CALLS_MAX:,}, not {_shown(count)}")
    return count


def checked_duration(duration: Any, where: str, *, positive: bool = False) -> int:
    """Microseconds of a ``timedelta`` from 0 on, or above 0 if it must be ``positive``.

    Raises:
        UsageError: it is no timedelta, or out of range.
    """
    if not isinstance(duration, timedelta):
        raise UsageError(f"{where} takes a datetime.timedelta, not {_shown(duration)}")
    micros = duration // timedelta(microseconds=1)
    if micros < 0 or (positive and not micros):
        raise UsageError(f"{where} takes a time {'above' if positive else 'from'} 0, not {duration}")
    if duration > DURATION_MAX:
        raise UsageError(f"{where} takes a time of at most {DURATION_MAX.days} days, not {duration}")
    return micros


def discovery_seconds(source: AnySource) -> float | None:
    """Its ``discovery_interval`` in seconds; None: its splits never change.

    Raises:
        UsageError: it is no time, or does not go with what else the source says of itself.
    """
    from minishuffle.operators.base import names_splits

    interval = getattr(source, "discovery_interval", None)
    if interval is None:
        return None
    name = type(source).__name__
    seconds = checked_duration(interval, f"{name}.discovery_interval", positive=True) / 1_000_000
    if not names_splits(source):
        raise UsageError(
            f"{name} has a discovery_interval, and no names for its splits: give it the attribute "
            "replayable, and positions of its own"
        )
    if getattr(source, "bounded", True):
        raise UsageError(f"{name} has a discovery_interval, so that it never ends: set bounded = False")
    if getattr(source, "rate", None):
        raise UsageError(
            f"{name} has a discovery_interval and a rate, which is divided among splits that do not change: "
            "leave one of them out"
        )
    return seconds


def checked_name(name: Any, where: str) -> str:
    """The name of what other programs write or read.

    Raises:
        UsageError: it is no text, is empty, too long, or has characters that cannot be printed.
    """
    if not is_name(name):
        raise UsageError(
            f"{where} takes a name of 1 to {NAME_BYTES_MAX} bytes, all printable, not {_shown(name)}"
        )
    return str(name)


def checked_job_name(name: Any) -> str:
    """The name of a job.

    Raises:
        UsageError: it is no text, is empty, too long, or has characters that cannot be printed.
    """
    if not is_name(name):
        raise UsageError(
            f"a job's name has 1 to {NAME_BYTES_MAX} bytes, all printable, not {_shown(name)}: "
            "choose another --name"
        )
    return str(name)


def is_name(name: Any) -> bool:
    """Whether it can stand in a table: a line end or an escape sequence in it would break the terminal's."""
    return (
        isinstance(name, str)
        and bool(name.strip())
        and name.isprintable()
        and len(name.encode()) <= NAME_BYTES_MAX
    )


def check_on_error(on_error: Any) -> None:
    """Raises UsageError unless it says what becomes of a record for which a function raises."""
    if on_error not in ("fail", "skip", "dead_letter", "side"):
        raise UsageError(f"on_error is {on_error!r}: write 'fail', 'skip', 'dead_letter' or 'side'")


def check_late(late: Any) -> None:
    """Raises UsageError unless it says what becomes of late records."""
    if late not in ("drop", "side", "fail"):
        raise UsageError(f"late is {late!r}: write 'drop', 'side' or 'fail'")


def check_columns(names: Sequence[str], known: Sequence[str] | None, method: str, way: str = "") -> None:
    """Raises UnknownName for a name that is not among the ``known`` columns (None: not known yet), with
    ``way`` at the end of the text; UsageError for one that several have."""
    for name in names:
        if known is not None and known.count(name) > 1:
            raise UsageError(
                f"{method}: there are several columns {name!r}: give each a name of its own first"
            )
        if known is not None and name not in known:
            hint = did_you_mean(name, known)
            raise UnknownName(
                f"{method}: there is no column {name!r}; {hint}there are {', '.join(known)}{way}"
            )


def check_key_types(schema: pa.Schema, names: Sequence[str]) -> None:
    """Raises UsageError if one of these columns is of a type that no key has."""
    from minishuffle.exchange.keys import family

    for name in names:
        try:
            family(without_dictionary(schema.field(name).type))
        except UsageError as error:
            raise UsageError(f"key_by, column {name!r}: {error}") from error


def check_time_type(schema: pa.Schema, name: str) -> None:
    """Raises UsageError if that column is of a type that holds no times."""
    import pyarrow as pa

    if not pa.types.is_null(kind := schema.field(name).type):
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind):
            return
        way = "to a timestamp, a date, or int64 microseconds since 1970"
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            way = (
                f"first, as with_columns(at=col({name!r}).cast(pa.timestamp('us', 'UTC'))) for ISO texts "
                "with Z or an offset, pa.timestamp('us') for those without; pyarrow.compute reads others: "
                "pc.strptime(col('at').expression, '%d.%m.%Y', 'us')"
            )
        raise UsageError(f"event_time: column {name!r} of type {kind} holds no times: cast it {way}")


def check_distinct(names: Sequence[str] | None, method: str) -> None:
    """Raises UsageError if the columns are known and two have one name."""
    if names is not None and len(set(names)) < len(names):
        raise UsageError(
            f"{method}: dict rows cannot hold two columns of one name: rename some of {', '.join(names)}"
        )


def key_columns(given: tuple[Any, ...], method: str = "key_by") -> tuple[str, ...]:
    """The column names that ``method`` was given, one by one or as one list.

    Raises:
        UsageError: they are not names, none, or one of them twice.
    """
    names = tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not names or not all(isinstance(name, str) for name in names):
        shown = ", ".join(repr(name) for name in names)
        or_function = " or one function of a row" if method == "key_by" else ""
        way = "" if names or method != "key_by" else f": {ONE_GROUP}"
        raise UsageError(f"{method} takes column names{or_function}, not ({shown:.80}){way}")
    if len(set(names)) < len(names):
        raise UsageError(f"{method} names a column twice: {', '.join(names)}")
    return names


def checked_paths(given: tuple[Any, ...], method: str) -> list[str | Path]:
    """The paths given one by one or as one list.

    Raises:
        UsageError: one of them is not a path.
    """
    paths = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else list(given)
    for path in paths:
        if not isinstance(path, str | Path):
            raise UsageError(f"{method} takes paths, not {_shown(path)}")
    return paths


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"

"""What a stream of rows cannot do and a table can, and the other way round: refused with the way there; and
what users of pandas and Spark write first, with what it is here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from minishuffle.errors import UsageError

__all__ = ["Bridged", "answering", "refuse_mixture"]

Method = TypeVar("Method", bound=Callable[..., Any])

_OF_ROWS: Final = frozenset({"map", "flat_map", "process", "reduce", "fold", "map_async", "partition"})
_OF_COLUMNS: Final = frozenset(
    {"aggregate", "asof_join", "distinct", "drop", "explode", "map_batches", "rename", "select", "to_rows"}
    | {"to_spark", "top_n", "with_columns"}
)
_OF_KEYS: Final = frozenset(
    {"aggregate", "asof_join", "count", "count_window", "distinct", "fold", "join", "process", "reduce"}
    | {"session_window", "top_n", "window"}
)
_OF_SINKS: Final = frozenset({"collect", "print", "to", "to_count", "to_files"})
_OF_ALL: Final = (
    _OF_SINKS
    | {"broadcast", "drop", "explain", "explode", "filter", "flat_map", "forward", "key_by", "map"}
    | {"map_async", "map_batches", "partition", "rebalance", "rename", "rescale", "select", "to_rows"}
    | {"show", "with_columns"}
)
"""What streams and tables have and keyed ones do not: what takes the values of keys."""
_BEFORE_KEYS: Final = frozenset({"broadcast_join", "event_time", "exchange", "to_table", "union"})
"""What they lack too, and is for the records that are to be keyed."""
_OF_OPERATORS: Final = frozenset({"name", "parallel", "slot_group"})
"""What they lack too, and is about one operator."""
_OTHERWISE: Final = {"agg": "aggregate", "group_by": "key_by", "groupby": "key_by", "head": "show"}
"""Methods by the names that they have in pandas, Polars or Spark."""
_RAN: Final = {
    "to_pandas": "cluster.run(table).to_pandas()",
    "to_polars": "polars.from_arrow(cluster.run(table))",
    "to_pylist": "cluster.run(table).to_pylist()",
}
"""What only the result of a run has."""
_SOURCES: Final = {
    "from_pandas": "from_arrow(frame)",
    "from_polars": "from_arrow(frame)",
    "read_csv": "from_files(path, format='csv')",
    "read_parquet": "from_files(path)",
}


def answering(**ways: str) -> Callable[[Method], Method]:
    """Decorates a method that answers arguments which it does not have, by name, with what to write."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def answered(*args: Any, **options: Any) -> Any:
            for name in options:
                if name in ways:
                    raise TypeError(f"{method.__name__}() has no argument {name!r}: {ways[name]}")
            return method(*args, **options)

        return cast("Method", answered)

    return decorate


class _Sources(type):
    """Answers a source that a class lacks with that which it has."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            way = f": write Table.{_SOURCES[name]}" if name in _SOURCES else ""
            text = f"type object {cls.__name__!r} has no attribute {name!r}{way}"
            raise AttributeError(text, name=name, obj=cls)


class Bridged(metaclass=_Sources):
    """Answers a method that its subclass lacks with the way to it: to the other form, or about ``key_by``."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """
            Raises:
                UsageError: a table has no methods for functions of rows, a stream none that work on columns.
                AttributeError: there is no such method here, or none at all.
            """
            kind = type(self).__name__
            if "Table" in kind and name in _OF_ROWS:
                raise UsageError(
                    f"{name}() takes functions of rows, and this is a {kind}: call to_rows() on the Table "
                    "first, or use expressions, with_columns() and filter(), or map_batches()"
                )
            if "Stream" in kind and name in _OF_COLUMNS:
                raise UsageError(
                    f"{name}() works on columns, and this is a {kind} of rows: call to_table(schema) on the "
                    "Stream first"
                )
            text = f"{kind!r} object has no attribute {name!r}{_way(kind, name)}"
            raise AttributeError(text, name=name, obj=self)

        def __getitem__(self, item: object) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} has no values yet, so that [{item!r:.80}] gives none: write "
                "select('column') for columns of a Table, col('column') in its expressions, or take them "
                "from what cluster.run(...) gives"
            )


def _way(kind: str, name: str) -> str:
    """Where a method is called that a class of that name lacks, behind a colon; nothing if it is none."""
    if name in _RAN:
        return f": nothing has run yet: write {_RAN[name]}"
    if name == "agg" and "Stream" in kind:
        return ": call to_table(schema) on the Stream first, then key_by() and aggregate()"
    if name in _OTHERWISE:
        return _way(kind, _OTHERWISE[name]) or f": write {_OTHERWISE[name]}()"
    if kind in ("Stream", "Table"):
        return f": call key_by(...) first, then {name}()" if name in _OF_KEYS else ""
    if name in _OF_ALL:
        return f": say what to compute for each key, such as count(), and then {name}()"
    if name in _BEFORE_KEYS:
        return f": call {name}() before key_by()"
    if name in _OF_OPERATORS:
        return (
            f": it is about an operator: call {name}() right after that, before key_by(), or after what to "
            "compute for each key, such as count()"
        )
    return ""


def refuse_mixture(method: str, mine: str, other: Any) -> NoReturn:
    """Raises UsageError: ``method`` of a ``mine`` was given something that is none."""
    kind = type(other).__name__
    if "Table" in kind or "Stream" in kind:
        keyed = "Keyed" in mine
        if keyed == ("Keyed" in kind):
            way = (
                "call to_table(schema) on the Stream, or to_rows() on the Table"
                if ("Table" in kind) != ("Table" in mine)
                else f"give it a {mine}"
            )
        else:
            way = "call key_by() first" if keyed else "leave out its key_by()"
        raise UsageError(f"{method} of a {mine} takes a {mine}, not a {kind}: {way}")
    raise UsageError(f"{method} takes a {mine}, not a {kind}")

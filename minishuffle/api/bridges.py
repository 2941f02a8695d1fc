"""What a stream of rows cannot do and a table can, and the other way round: refused with the way there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from minishuffle.errors import UsageError

__all__ = ["Bridged", "refuse_mixture"]

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
    | {"with_columns"}
)
"""What streams and tables have and keyed ones do not: what takes the values of keys."""
_BEFORE_KEYS: Final = frozenset({"broadcast_join", "event_time", "exchange", "to_table", "union"})
"""What they lack too, and is for the records that are to be keyed."""
_OF_OPERATORS: Final = frozenset({"name", "parallel", "slot_group"})
"""What they lack too, and is about one operator."""


class Bridged:
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


def _way(kind: str, name: str) -> str:
    """Where a method is called that a class of that name lacks, behind a colon; nothing if it is none."""
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

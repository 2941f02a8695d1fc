"""What a stream of rows cannot do and a table can, and the other way round: refused with the way there; and
what users of pandas and Spark write first, with what it is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from minishuffle.errors import UsageError, did_you_mean
from minishuffle.plan.arguments import ONE_GROUP

__all__ = ["DELIMITED_BY", "JOINED_ON", "LATE_BY", "LOOKED_UP_ON", "Bridged", "answering", "refuse_mixture"]

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
_OF_EXCHANGES: Final = frozenset({"broadcast", "forward", "partition", "rebalance", "rescale"})
_OF_ALL: Final = (
    _OF_EXCHANGES
    | {"drop", "explain", "explode", "filter", "flat_map", "map", "map_async", "map_batches", "rename"}
    | {"select", "show", "to_rows", "with_columns"}
)
"""What streams and tables have and keyed ones do not: what takes the values of keys, or what comes before."""
_BEFORE_KEYS: Final = frozenset({"broadcast_join", "event_time", "exchange", "to_table", "union"})
"""What they lack too, and is for the records that are to be keyed."""
_OF_OPERATORS: Final = frozenset({"name", "parallel", "slot_group"})
"""What they lack too, and is about one operator."""
_OTHERWISE: Final = (
    dict.fromkeys(("groupBy", "group_by", "groupby"), "key_by")
    | dict.fromkeys(("assign", "withColumn", "with_column"), "with_columns")
    | dict.fromkeys(("query", "where"), "filter")
    | dict.fromkeys(("first", "head", "limit", "take"), "show")
    | dict.fromkeys(("dropDuplicates", "drop_duplicates", "unique"), "distinct")
    | dict.fromkeys(("to_csv", "to_parquet", "write_csv", "write_parquet"), "to_files")
    | {"agg": "aggregate", "merge": "join", "withColumnRenamed": "rename"}
    | dict.fromkeys(("concat", "unionAll"), "union")
)
"""Methods by the names that they have in pandas, Polars, SQL or Spark."""
_JOINED: Final = (
    "key_by('id').join(other.key_by('its_id')), or if the other is small broadcast_join(small, "
    "on={'id': 'its_id'})"
)
_WRITTEN: Final = {
    "Table.apply": "map_batches(fn), or to_rows() and then map(fn)",
    **dict.fromkeys(("Table.dropna", "Table.drop_nulls"), "filter(~col('amount').is_null())"),
    **dict.fromkeys(("Table.fillna", "Table.fill_null"), "with_columns(amount=col('amount').fill_null(0))"),
    "Table.filter": "filter(col('amount') > 5)",
    "Table.join": _JOINED,
    "Table.show": "show(n) for a look at the first rows, or cluster.run(table).slice(0, n)",
    "Table.to_files": (
        "to_files(path), which writes Parquet, or for CSV pyarrow.csv.write_csv(cluster.run(table), path)"
    ),
    "Table.with_columns": "with_columns(total=col('amount') * 2)",
    "Stream.apply": "map(fn)",
    **dict.fromkeys(("Stream.dropna", "Stream.drop_nulls"), "filter(lambda row: row['amount'] is not None)"),
    **dict.fromkeys(("Stream.fillna", "Stream.fill_null"), "map(fn) with a function of the row"),
    "Stream.filter": "filter(fn) with a function of the row",
    "Stream.join": _JOINED,
    "Stream.show": "show(n) for a look at the first rows, or cluster.run(stream)[:n]",
    "Stream.to_files": "to_files(path), which writes Parquet",
    "Stream.with_columns": "map(fn) with a function of the row, or to_table(schema) and then with_columns()",
    "KeyedTable.apply": "aggregate(total=('amount', 'sum')), or map_batches(fn) before key_by()",
    "KeyedTable.join": "join(other.key_by('its_id'))",
    "KeyedStream.apply": "process(fn), reduce(fn) or fold(int, fn), or map(fn) before key_by()",
    "KeyedStream.join": "join(other.key_by('its_id'))",
}
"""How these are called, where there is more to say than their names."""
_AGGREGATES: Final = frozenset({"last", "max", "mean", "min", "std", "sum"})
_SORTS: Final = frozenset({"orderBy", "order_by", "sort", "sort_by", "sort_values"})
_RAN: Final = {
    "num_rows": ".num_rows",
    "shape": ".shape",
    "to_arrow": "",
    "to_dicts": ".to_pylist()",
    "to_list": ".to_pylist()",
    "to_pandas": ".to_pandas()",
    "toPandas": ".to_pandas()",
    "to_polars": " and polars.from_arrow() of that",
    "to_pylist": ".to_pylist()",
}
"""What only the result of a run has."""
_SOURCES: Final = {
    "from_pandas": "from_arrow(frame)",
    "from_polars": "from_arrow(frame)",
    "read_csv": "from_files(path, format='csv')",
    "read_json": "from_files(path, format='json')",
    "read_parquet": "from_files(path)",
}


JOINED_ON: Final = dict.fromkeys(
    ("on", "left_on", "right_on"),
    "call key_by(...) with these columns on both sides, which may have other names on each",
)
"""What keyed joins answer those who say the columns in them."""
LOOKED_UP_ON: Final = dict.fromkeys(("left_on", "right_on"), "write on={'id': 'its_id'}")
"""The same of ``broadcast_join``."""
LATE_BY: Final = dict.fromkeys(
    ("out_of_orderness", "max_out_of_orderness", "lateness"), "write out_of_order=timedelta(seconds=5)"
)
"""What ``event_time`` answers those who know Flink."""
DELIMITED_BY: Final = dict.fromkeys(("sep", "separator"), "write delimiter=';'")
"""What ``from_files`` answers those who know pandas or Polars."""


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
            raise AttributeError(text, obj=cls)


class Bridged(metaclass=_Sources):
    """Answers a method that its subclass lacks with the way to it: to the other form, or about ``key_by``."""

    __slots__ = ()

    def _column_names(self) -> Sequence[str]:
        """Those of a table; nothing else has any."""
        return ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """
            Raises:
                UsageError: a table has no methods for functions of rows, a stream none that work on columns.
                AttributeError: there is no such method here, or none at all.
            """
            kind = type(self).__name__
            first = "first" if kind in ("Stream", "Table") else "first, before key_by()"
            if "Table" in kind and name in _OF_ROWS:
                raise UsageError(
                    f"{name}() takes functions of rows, and this is a {kind}: call to_rows() on the Table "
                    f"{first}, or use expressions, with_columns() and filter(), or map_batches()"
                )
            if "Stream" in kind and name in _OF_COLUMNS - {"to_rows"}:
                raise UsageError(
                    f"{name}() works on columns, and this is a {kind} of rows: call to_table(schema) on the "
                    f"Stream {first}"
                )
            way = (
                ""
                if name.startswith("_")
                else _way(kind, name) or _near(name, type(self), self._column_names())
            )
            # With a name= Python would add the nearest one itself, of what is private too.
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{way}", obj=self)

        def __getitem__(self, item: object) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} has no values yet, so that [{item!r:.80}] gives none: write "
                "select('column') for columns of a Table, col('column') in its expressions, or take them "
                "from what cluster.run(...) gives"
            )


def _near(name: str, kind: type, columns: Sequence[str]) -> str:
    """A column that is taken for an attribute, or what is near the name; nothing if nothing is."""
    if name in columns:
        return f": it is a column: write col({name!r}) in expressions, select({name!r}) for that column alone"
    methods = [each for each in dir(kind) if not each.startswith("_")]
    near = did_you_mean(name, [*columns, *methods])
    way = (
        "write col('...') for a column in expressions" if any(repr(each) in near for each in columns) else ""
    )
    return f": {near}{way}".rstrip() if near else ""


def _way(kind: str, name: str) -> str:
    """Where a method is called that a class of that name lacks, behind a colon; nothing if it is none."""
    is_rows = "Stream" in kind
    if name in _RAN:
        return f": nothing has run yet: write {_run_and(name, is_rows=is_rows)}"
    if name in _SORTS:
        return ": rows come in no order: write " + (
            "sorted(cluster.run(stream), key=...)"
            if is_rows
            else "cluster.run(table).sort_by('column'), or key_by(...).top_n(n, by='column') for the "
            "greatest of each key"
        )
    if name in _AGGREGATES or (name == "first" and kind not in ("Stream", "Table")):
        return f": write {_aggregated(kind, name)}"
    here = _OTHERWISE.get(name, name)
    if written := _WRITTEN.get(f"{kind}.{here}"):
        return f": write {written}"
    if is_rows and here in _OF_COLUMNS - {"to_rows"}:
        then = f"key_by() and {here}()" if here in _OF_KEYS else f"{here}()"
        return f": call to_table(schema) on the Stream first, then {then}"
    by_keys = _way_by_keys(kind, here)
    if not by_keys and (written := _WRITTEN.get(f"{'Stream' if is_rows else 'Table'}.{here}")):
        return f": write {written} before key_by()"
    return by_keys or (f": write {here}()" if name in _OTHERWISE else "")


def _run_and(name: str, *, is_rows: bool) -> str:
    """How the result of a run is had in that form."""
    if not is_rows:
        return f"cluster.run(table){_RAN[name]}"
    if _RAN[name] == ".to_pylist()":
        return "cluster.run(stream), which gives a list of rows"
    return f"to_table(schema) first, and then cluster.run(table){_RAN[name]}"


def _aggregated(kind: str, name: str) -> str:
    """How the rows of each key, or of all, are brought down to one value."""
    keyed = "key_by(...)." if kind in ("Stream", "Table") else ""
    if "Stream" in kind:
        return f"{keyed}reduce(fn), or {keyed}fold(int, lambda total, row: total + row['amount'])"
    way = f"{keyed}aggregate(total=('amount', {name!r}))"
    return f"{way}; {ONE_GROUP}" if keyed else way


def _way_by_keys(kind: str, name: str) -> str:
    """The same of methods that are there before ``key_by`` or behind it alone."""
    if kind in ("Stream", "Table"):
        if name in ("to_rows", "to_table"):
            return f": a {kind} has {'rows' if kind == 'Stream' else 'columns'} already: leave it out"
        return f": call key_by(...) first, then {name}()" if name in _OF_KEYS else ""
    if "Windowed" in kind and name in _OF_KEYS - {"aggregate", "count", "fold", "reduce"}:
        return f": say what to compute for each window, such as count(), then key_by(...) and {name}()"
    computed = f"say what to compute for each key, such as count(), and then {name}()"
    if name in _OF_SINKS or name == "key_by":
        return f": {computed}"
    if name in _OF_EXCHANGES:
        return f": {computed}; to spread records write {name}() in place of key_by()"
    if name in _OF_ALL:
        spread = "; to spread the work write rebalance() in place of key_by()" if name in _OF_ROWS else ""
        return f": call {name}() before key_by(), or {computed}{spread}"
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

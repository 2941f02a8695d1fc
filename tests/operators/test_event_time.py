"""Event time goes with records through steps that do not show it: rows, columns, one made of the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators.assign_event_time import HoldTimes
from minishuffle.operators.base import Aside
from minishuffle.operators.event_time import BESIDE, EVENT_TIME, EventTime
from minishuffle.operators.row_functions import KeyRowsByColumns
from support.cutjobs import Cut, run

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
CUTS = (Cut(1), Cut(3, seed=5, rows=2, merges=True))
GIVEN = (("ann", 5), ("bob", 20), ("ann", 50), ("ann", 70), ("bob", 130))
CLICKS = (("ann", 65), ("bob", 10), ("cy", 90))
WINDOWS = [("ann", 0, 2), ("ann", 1, 1), ("bob", 0, 1), ("bob", 2, 1)]
"""User, hour and number of records of ``GIVEN``."""
MICROSECONDS = pa.timestamp("us", "UTC")


def at(row: dict[str, Any]) -> datetime:
    return START + row["minute"] * MINUTE


def calls(given: Iterable[tuple[str, int]] = GIVEN) -> Stream[Any]:
    """Rows whose time a function gives."""
    rows = [{"user": user, "minute": minute} for user, minute in given]
    return Stream.items(rows).parallel(1).event_time(at, out_of_order=24 * HOUR)


def shown(given: Iterable[tuple[str, int]] = GIVEN) -> Stream[Any]:
    """Rows whose time stands in a field."""
    rows = [{"user": user, "minute": minute, "at": START + minute * MINUTE} for user, minute in given]
    return Stream.items(rows).parallel(1).event_time("at", out_of_order=24 * HOUR)


def columns(
    given: Iterable[tuple[str, int]] = GIVEN, *, kind: pa.DataType = MICROSECONDS, time: str = "at"
) -> Table:
    """Columns whose time stands in one of them, of that type."""
    users, minutes = zip(*given, strict=True)
    data = {
        "user": pa.array(users),
        time: pa.array([START + minute * MINUTE for minute in minutes], MICROSECONDS).cast(kind),
        "n": list(range(len(users))),
    }
    return Table.from_arrow(pa.table(data)).parallel(1).event_time(time, out_of_order=24 * HOUR)


def hidden() -> Table:
    """Columns whose time stands in none of them."""
    return columns().drop("at")


def answers(stream: StreamBase) -> list[Any]:
    found = [sorted(run(stream.collect(), cut).rows, key=repr) for cut in CUTS]  # type: ignore[attr-defined]
    assert all(each == found[0] for each in found)
    return found[0]


def values(row: Any) -> tuple[Any, ...]:
    """Of a window, as rows and as columns come."""
    return tuple(row.values()) if isinstance(row, dict) else row


def hours(windows: Iterable[Any]) -> list[tuple[str, int, int]]:
    found = map(values, windows)
    return sorted((user, (start - START) // HOUR, count) for user, start, *_, count in found)


def counted(records: Any, key: Any = "user") -> list[tuple[str, int, int]]:
    """User, hour and number of records of all windows."""
    return hours(answers(records.key_by(key).window(HOUR).count()))


def user_of(row: Any) -> str:
    """All that is left of a row."""
    return row if isinstance(row, str) else str(row["user"])


# --- through one step ---------------------------------------------------------------------------------

AGES = [{"user": "ann", "age": 1}, {"user": "bob", "age": 2}]

OF_ROWS: dict[str, Callable[[Stream[Any]], Stream[Any]]] = {
    "map": lambda rows: rows.map(user_of),
    "map_twice": lambda rows: rows.map(lambda row: [row["user"]]).map(lambda row: row[0]),
    "map_changes": lambda rows: rows.map(lambda row: {**row, "at": START}),
    "flat_map": lambda rows: rows.flat_map(lambda row: [user_of(row)]),
    "filter": lambda rows: rows.map(user_of).filter(lambda user: user != "cy"),
    "partition": lambda rows: rows.map(user_of).partition(lambda user, count: len(user) % count).filter(len),
    "rebalance": lambda rows: rows.map(user_of).rebalance().filter(bool),
    "process": lambda rows: rows.key_by("user").process(lambda row, context: [context.key]),
    "broadcast_join": lambda rows: rows.map(lambda row: {"user": row["user"]})
    .broadcast_join(Stream.items(AGES), "user")
    .map(user_of),
    "semi": lambda rows: rows.map(user_of)
    .key_by(str)
    .join(calls().map(user_of).key_by(str), "semi")
    .filter(bool),
}  # fmt: skip
OF_COLUMNS: dict[str, Callable[[Table], Table]] = {
    "select": lambda table: table.select("n", "user"),
    "select_twice": lambda table: table.select("n", "user").select("user"),
    "drop": lambda table: table.drop("at"),
    "rename": lambda table: table.rename({"at": "when"}).drop("when"),
    "with_columns": lambda table: table.with_columns(at=pc.scalar(pa.scalar(START, MICROSECONDS))),
    "filter": lambda table: table.drop("at").with_columns(m=pc.field("n") + 1).filter(pc.field("m") > 0),
    "rename_after": lambda table: table.drop("at").rename({"n": "m"}),
    "broadcast_join": lambda table: table.drop("at").broadcast_join(
        Table.from_arrow(pa.Table.from_pylist(AGES)), "user"
    ),
    "map_batches": lambda table: table.map_batches(lambda batch: batch),
    "rebalance": lambda table: table.drop("at").rebalance().with_columns(m=pc.field("n")),
    "to_rows": lambda table: table.drop("at").to_rows().to_table({"user": str, "n": int}),
}  # fmt: skip


@pytest.mark.parametrize("step", OF_ROWS)
def test_windows_of_rows_are_those_of_the_time_that_was_assigned(step: str) -> None:
    stepped = OF_ROWS[step](shown() if step in ("map_changes", "filter") else calls())
    users = sorted(map(user_of, answers(stepped)))
    assert users == sorted(user for user, _ in GIVEN), "nobody sees the times"
    assert counted(stepped, user_of) == WINDOWS


@pytest.mark.parametrize("step", OF_COLUMNS)
def test_windows_of_columns_are_those_of_the_time_that_was_assigned(step: str) -> None:
    assert counted(OF_COLUMNS[step](columns())) == WINDOWS


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.timestamp("ns"), pa.int64()], ids=str)
def test_a_time_of_any_type_goes_on_when_its_column_is_gone(kind: pa.DataType) -> None:
    assert counted(columns(kind=kind).drop("at")) == WINDOWS
    if pa.types.is_timestamp(kind):
        assert counted(OF_COLUMNS["with_columns"](columns(kind=kind))) == WINDOWS


@pytest.mark.parametrize(
    "rows", [calls().map(user_of), hidden().to_rows().map(user_of)], ids=["rows", "columns"]
)
def test_all_that_goes_by_event_time_knows_it(rows: Stream[Any]) -> None:
    keyed = rows.key_by(str)
    reduced = keyed.window(HOUR).reduce(lambda one, other: one + other)
    assert [len(users) // 3 for _, _, users in answers(reduced)] == [count for _, _, count in WINDOWS]
    assert hours(answers(keyed.session_window(MINUTE).count())) == [
        (user, minute // 60, 1) for user, minute in sorted(GIVEN)
    ]
    assert dict(answers(keyed.count())) == Counter(user for user, _ in GIVEN)


def test_each_row_that_a_row_becomes_has_its_time() -> None:
    more = Table.from_arrow(pa.table({"at": [START, START + HOUR, START], "more": [[1, 2], [3], []]}))
    timed = (
        more.parallel(1).event_time("at", out_of_order=24 * HOUR).drop("at").with_columns(user=pc.scalar("a"))
    )
    assert counted(timed.explode("more")) == [("a", 0, 2), ("a", 1, 1)]
    twice = calls().flat_map(lambda row: [user_of(row)] * 2)
    assert counted(twice, str) == [(user, hour, 2 * count) for user, hour, count in WINDOWS]


ASKED: list[int] = []
"""For how many rows ``at_noted`` was asked, in this process."""


def at_noted(row: dict[str, Any]) -> datetime:
    ASKED.append(row["minute"])
    return at(row) + (len(ASKED) - 1) // len(GIVEN) * HOUR


def test_a_function_is_asked_once_for_the_time_of_a_row() -> None:
    """One that gives another time at each call moves no row out of the window that it was in."""
    rows = [{"user": user, "minute": minute} for user, minute in GIVEN]
    timed = Stream.items(rows).parallel(1).event_time(at_noted, out_of_order=24 * HOUR)
    for step in (timed, timed.filter(bool), timed.filter(bool).map(dict)):
        ASKED.clear()
        windows = run(step.key_by("user").window(HOUR).count().collect(), Cut(1)).rows
        assert (hours(windows), len(ASKED)) == (WINDOWS, len(GIVEN))
    assert run(timed.collect(), Cut(1)).rows == rows


# --- from rows to columns and back --------------------------------------------------------------------


def test_columns_of_the_rows_stay_keys_and_become_columns_of_a_table() -> None:
    rows = calls().map(lambda row: {"user": row["user"], "n": 1})
    assert counted(rows) == WINDOWS
    for schema in ({"user": str, "n": int}, pa.schema({"user": pa.string(), "n": pa.int64()})):
        table = rows.to_table(schema)
        assert [list(row) for row in run(table.collect(), Cut(2)).rows] == [["user", "n"]] * 5
        found = run(table.key_by("user").window(HOUR).aggregate(n=("n", "sum")).collect(), Cut(2)).rows
        assert hours(found) == WINDOWS
        assert counted(table.to_rows().map(user_of), str) == WINDOWS
    with pytest.raises(UnknownName, match="no column 'age' to key by: the row has user, n"):
        run(rows.key_by("age").window(HOUR).count().collect(), Cut(1))


def test_a_table_that_hides_its_time_gives_rows_that_have_it() -> None:
    rows = calls().to_table({"user": pa.string(), "minute": pa.int64()}).select("user").to_rows()
    assert answers(rows) == [{"user": user} for user in sorted(user for user, _ in GIVEN)]
    assert counted(rows) == WINDOWS


def test_rows_with_a_time_by_function_keep_it_as_a_table() -> None:
    for table in (calls().to_table({"user": str, "minute": int}), calls().to_table()):
        assert counted(table) == WINDOWS
        assert [list(row) for row in answers(table)] == [["user", "minute"]] * 5


def test_nobody_sees_the_column_of_times() -> None:
    table = hidden()
    assert table.plan.gives.columns == ("user", "n")
    assert [list(row) for row in answers(table)] == [["user", "n"]] * 5
    assert [list(row) for row in answers(table.to_rows())] == [["user", "n"]] * 5
    tops = table.key_by("user").top_n(1, "n")
    assert [list(row) for row in answers(tops)] == [["user", "n"]] * 2
    seen = table.map_batches(lambda batch: pa.table({"names": [",".join(batch.schema.names)]}))
    assert {row["names"] for row in run(seen.collect(), Cut(1)).rows} == {"user,n"}
    again = table.with_columns(at=pc.field("n") * 2).event_time("at")
    assert [list(row) for row in answers(again.drop("at"))] == [["user", "n"]] * 5
    small = Table.from_arrow(pa.table({"user": ["ann", "bob"]}))
    assert [list(row) for row in answers(small.broadcast_join(table, "user"))] == [["user", "n"]] * 5


# --- functions of batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("table", [columns, hidden])
def test_a_function_of_batches_may_keep_the_time_or_give_another(
    declared: bool, table: Callable[[], Table]
) -> None:
    schema = {"user": "string", "n": "int64"} if declared else None

    def mapped(fn: Callable[[pa.RecordBatch], Any]) -> Table:
        return table().map_batches(fn, columns=["user", EVENT_TIME, "n"], schema=schema)

    def kept(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select([EVENT_TIME, "user", "n"]).filter(pc.field("user") == "ann")

    assert counted(mapped(kept)) == WINDOWS[:2]
    assert [list(row) for row in answers(mapped(kept))] == [["user", "n"]] * 3
    assert counted(mapped(kept).to_rows()) == WINDOWS[:2]

    def an_hour_later(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.field(EVENT_TIME).type == pa.int64()
        times = pc.add(batch.column(EVENT_TIME), HOUR // timedelta(microseconds=1))
        return batch.set_column(batch.schema.get_field_index(EVENT_TIME), EVENT_TIME, times)

    assert counted(mapped(an_hour_later)) == [(user, hour + 1, count) for user, hour, count in WINDOWS]
    lost = mapped(lambda batch: batch.select(["user", "n"]))
    assert len(answers(lost)) == 5
    says = "no column for the event time: the batch has user.*: keep it"
    with pytest.raises(UsageError, match=says if declared else "window needs the event time of the records"):
        counted(lost)


def test_a_schema_does_not_name_the_column_of_times() -> None:
    schema = {"n": "int64", EVENT_TIME: "int64"}
    with pytest.raises(UsageError, match=r"map_batches\(schema=...\) names EVENT_TIME.*: leave it out"):
        columns().map_batches(lambda batch: batch, columns=["n", EVENT_TIME], schema=schema)


def test_a_table_without_event_time_has_none_to_give() -> None:
    with pytest.raises(InvalidGraph, match="map_batches has no event time to give: call event_time"):
        Table.from_arrow(pa.table({"n": [1]})).map_batches(lambda batch: batch, columns=["n", EVENT_TIME])


def test_only_a_function_of_batches_loses_a_time_that_is_not_shown() -> None:
    with pytest.raises(InvalidGraph, match=r"again after map_batches\(\) that leaves it out"):
        hidden().map_batches(lambda batch: batch).key_by("user").window(HOUR)
    assert counted(hidden().to_rows()) == WINDOWS


# --- several inputs -----------------------------------------------------------------------------------

PAIRS = {
    "inner": [("ann", 1, 2), ("bob", 0, 1)],
    "left": [("ann", 0, 1), ("ann", 1, 2), ("bob", 0, 1), ("bob", 2, 1)],
    "right": [("ann", 1, 2), ("bob", 0, 1), ("cy", 1, 1)],
    "full": [("ann", 0, 1), ("ann", 1, 2), ("bob", 0, 1), ("bob", 2, 1), ("cy", 1, 1)],
    "anti": [("ann", 0, 1), ("bob", 2, 1)],
}
"""Records of one user 20 minutes apart: those in each hour of event time."""
SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "columns": (columns, columns),
    "rows": (shown, shown),
    "rows of columns": (lambda given: columns(given).to_rows(), lambda given: columns(given).to_rows()),
    "times beside": (lambda given: shown(given).map(dict), lambda given: shown(given).map(dict)),
    "left beside": (lambda given: shown(given).map(dict), shown),
    "right beside": (shown, lambda given: shown(given).map(dict)),
}


def paired(sides: str, how: Any) -> Any:
    left, right = (make(given) for make, given in zip(SIDES[sides], (GIVEN, CLICKS), strict=True))
    return left.key_by("user").join(right.key_by("user"), how=how, within=20 * MINUTE)


@pytest.mark.parametrize("how", PAIRS)
@pytest.mark.parametrize("sides", SIDES)
def test_a_pair_has_the_greater_time_of_both(sides: str, how: str) -> None:
    """A record alone has its own."""
    joined = paired(sides, how)
    by_user = "user" if isinstance(joined, Table) or how == "anti" else (lambda pair: pair[0])
    assert counted(joined, by_user) == PAIRS[how]


def test_a_right_row_alone_shows_nothing_in_the_columns_of_the_left() -> None:
    (alone,) = (row for row in answers(paired("columns", "full")) if row["user"] == "cy")
    assert alone == {"user": "cy", "at": None, "n": None, "at_right": START + 90 * MINUTE, "n_right": 2}


@pytest.mark.parametrize("how", ["left", "full"])
def test_times_that_are_keys_of_each_other_stay_where_a_function_is_shown_them(how: Any) -> None:
    left, right = columns(), columns(time="when").select("user", "when")
    joined = left.key_by("user", "at").join(right.key_by("user", "when"), how=how, within=timedelta(0))
    mapped = joined.map_batches(
        lambda batch: batch.select(["user", "at"]), schema={"user": pa.string(), "at": MICROSECONDS}
    )
    assert counted(mapped) == WINDOWS


def test_windows_of_windows_need_not_keep_their_end() -> None:
    hours = columns().key_by("user").window(HOUR).count()
    days = hours.select("user", "count").key_by("user").window(24 * HOUR).aggregate(n=("count", "sum"))
    assert [(row["user"], row["n"], row["window_start"]) for row in answers(days)] == [
        ("ann", 3, START), ("bob", 2, START)
    ]  # fmt: skip


def test_a_union_has_the_times_of_all() -> None:
    users = calls().map(user_of)
    shown = Stream.items([("cy", 5)]).event_time(lambda row: START + row[1] * MINUTE).map(lambda row: row[0])
    assert counted(users.union(shown), str) == sorted([*WINDOWS, ("cy", 0, 1)])
    timeless = users.union(Stream.items(["cy"]))
    assert timeless.plan.gives.time is None
    assert len(answers(timeless)) == 6


def test_a_union_has_the_times_of_all_whatever_their_columns() -> None:
    one, other = columns(), columns(kind=pa.timestamp("ms", "UTC"), time="when")
    twice = [(user, hour, 2 * count) for user, hour, count in WINDOWS]
    unions = [
        one.union(other),
        hidden().union(other.select("user", "n")),
        one.union(hidden()),
        hidden().union(hidden().drop("n")),
    ]
    for union in unions:
        assert counted(union) == twice
    timeless = hidden().union(Table.from_arrow(pa.table({"user": ["cy"], "n": [1]})))
    assert [list(row) for row in answers(timeless)] == [["user", "n"]] * 6
    with pytest.raises(InvalidGraph, match="window needs the event time"):
        timeless.key_by("user").window(HOUR)


@pytest.mark.parametrize("first", ["chosen", "mapped"])
def test_a_choice_of_subtasks_is_about_the_step_after_it(first: str) -> None:
    """In front of that step or behind the one before, its rows get their times or lose them."""

    def asked(row: dict[str, Any], count: int) -> int:
        assert count == 3
        return len(row["user"]) % 3

    for choose, copies in ((Stream.broadcast, 3), (lambda rows: rows.partition(asked), 1)):
        if first == "chosen":
            job = choose(calls()).map(dict).parallel(3).collect()
        else:
            job = choose(calls().map(dict).parallel(1)).collect().parallel(3)
        found = Counter(row["minute"] for row in run(job, Cut(2)).rows)
        assert found == {minute: copies for _, minute in GIVEN}
    hidden = calls().to_table({"user": str, "minute": int}).select("minute").parallel(1).broadcast()
    assert len(run(hidden.collect().parallel(3), Cut(2)).rows) == 3 * len(GIVEN)


# --- what goes aside ----------------------------------------------------------------------------------


class InOrder:
    """Two records in one split, the second of which is late."""

    def __init__(self, format: str) -> None:
        self.format = format

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        rows = [{"user": "ann", "minute": 200}, {"user": "bob", "minute": 5}][offset:]
        if self.format == "rows":
            yield rows
        else:
            yield pa.RecordBatch.from_pylist([{"user": row["user"], "at": at(row)} for row in rows])


@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_late_records_are_as_they_came_and_have_their_time(format: str) -> None:
    if format == "rows":
        timed: Any = Stream.source(InOrder(format)).parallel(1).event_time(at, watermarks="each").map(user_of)
    else:
        source = Table.source(InOrder(format), schema={"user": "string", "at": MICROSECONDS}).parallel(1)
        timed = source.event_time("at", watermarks="each").drop("at")
    keyed = timed.key_by(str if format == "rows" else "user")
    late = keyed.window(HOUR, late="side").count().late
    assert run(late.collect(), Cut(1)).rows == ["bob" if format == "rows" else {"user": "bob"}]
    assert late.plan.gives.time == BESIDE
    says = "'bob'" if format == "rows" else "{'user': 'bob'}"
    with pytest.raises(UsageError, match=f"too late: {says} is of .* raise out_of_order="):
        run(keyed.window(HOUR, late="fail").count().collect(), Cut(1))


def test_side_outputs_have_the_times_of_their_rows() -> None:
    parted = calls().map(lambda row: row["user"] if row["minute"] % 20 else Aside("odd", row["user"]),
                         sides=["odd"])  # fmt: skip
    assert sorted(run(parted.side("odd").collect(), Cut(2)).rows) == ["bob"]
    assert counted(parted.side("odd"), str) == [("bob", 0, 1)]


def boom(row: Any) -> Any:
    raise ValueError("boom")


@pytest.mark.parametrize("method", ["map", "filter", "flat_map", "key_by"])
def test_what_is_told_of_a_record_is_the_row(method: str) -> None:
    rows = calls(GIVEN[:1]).map(user_of)
    with pytest.raises(ValueError, match="boom") as raised:
        ended = getattr(rows, method)(boom)
        run((ended.window(HOUR).count() if method == "key_by" else ended).collect(), Cut(1))
    assert "by the record 'ann'" in "".join(raised.value.__notes__)
    dead = getattr(rows, method)(boom, on_error="dead_letter")
    log = run((dead.window(HOUR).count() if method == "key_by" else dead).collect(), Cut(1)).log
    assert [line.endswith("record 'ann'") for line in log] == [True]
    if method != "key_by":
        (error,) = run(getattr(rows, method)(boom, on_error="side").errors.collect(), Cut(1)).rows
        assert error["record"] == "ann"


@pytest.mark.parametrize("method", ["map", "filter", "flat_map", "to_table"])
@pytest.mark.parametrize("rows", [calls, shown])
def test_an_error_has_the_time_of_its_record(method: str, rows: Callable[..., Stream[Any]]) -> None:
    given = {"minute": pa.int64()} if method == "to_table" else boom
    errors = getattr(rows(GIVEN), method)(given, on_error="side").errors
    assert counted(errors, lambda error: error["record"]["user"]) == WINDOWS


def test_a_row_that_cannot_be_sent_is_an_error_of_its_batch() -> None:
    made = calls().map(lambda row: {row["user"]}, on_error="side")
    windows = made.errors.key_by("operator").window(HOUR).count().collect("errors")
    both = Stream.together(windows, made.rebalance().collect("rows"))
    assert sum(row[2] for row in run(both, Cut(1)).rows) == len(GIVEN)


def test_times_are_put_beside_rows_and_go_with_their_keys() -> None:
    out: list[Any] = []
    HoldTimes(EventTime(fn=len, shift=1)).process(Batch(["abc", ""]), 0, out.append)
    HoldTimes(None).process(Batch(["abc"]), 0, out.append)
    rows = Batch([{"k": 1}], None, out[0].times[:1])
    KeyRowsByColumns(("k",)).process(rows, 0, out.append)
    held, plain, keyed = out
    assert (held.payload, held.times.tolist(), plain.times) == (["abc", ""], [4, 1], None)
    assert (keyed.keys, keyed.payload, keyed.times.tolist()) == ([1], [{"k": 1}], [4])

"""Event time goes with rows through functions that do not keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.operators.base import Aside
from minishuffle.dataflow.operators.eventtime import HoldTimes
from minishuffle.dataflow.operators.functions import KeyRowsByColumns
from minishuffle.dataflow.operators.times import BESIDE, EventTime
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import UnknownName, UsageError
from minishuffle.exchange.batch import Batch
from support.cutjobs import Cut, run

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
CUTS = (Cut(1), Cut(2, rows=1), Cut(3, seed=5, rows=2, merges=True))
GIVEN = (("ann", 5), ("bob", 20), ("ann", 50), ("ann", 70), ("bob", 130))
WINDOWS = [("ann", 0, 2), ("ann", 1, 1), ("bob", 0, 1), ("bob", 2, 1)]
"""User, hour and number of records of ``GIVEN``."""


def at(row: dict[str, Any]) -> datetime:
    return START + row["minute"] * MINUTE


def calls(given: Iterable[tuple[str, int]] = GIVEN) -> Stream[Any]:
    rows = [{"user": user, "minute": minute} for user, minute in given]
    return Stream.items(rows).parallel(1).event_time(at, out_of_order=24 * HOUR)


def shown(given: Iterable[tuple[str, int]]) -> Stream[Any]:
    """The same with the time in a column."""
    rows = [{"user": user, "minute": minute, "at": START + minute * MINUTE} for user, minute in given]
    return Stream.items(rows).parallel(1).event_time("at", out_of_order=24 * HOUR)


def answers(stream: Stream[Any]) -> list[Any]:
    found = [sorted(run(stream.collect(), cut).rows, key=repr) for cut in CUTS]
    assert all(each == found[0] for each in found)
    return found[0]


def hours(windows: Iterable[Any]) -> list[tuple[str, int, int]]:
    return sorted((user, (start - START) // HOUR, count) for user, start, *_, count in windows)


def user_of(row: dict[str, Any]) -> str:
    """All that is left of a row."""
    return str(row["user"])


STEPS: dict[str, Callable[[Stream[Any]], Stream[Any]]] = {
    "map": lambda rows: rows.map(user_of),
    "map_twice": lambda rows: rows.map(lambda row: [row["user"]]).map(lambda row: row[0]),
    "flat_map": lambda rows: rows.flat_map(lambda row: [user_of(row)]),
    "filter": lambda rows: rows.map(user_of).filter(lambda user: user != "cy"),
    "partition": lambda rows: rows.map(user_of).partition(lambda user, count: len(user) % count).filter(len),
    "rebalance": lambda rows: rows.map(user_of).rebalance().filter(bool),
    "process": lambda rows: rows.key_by("user").process(lambda row, context: [context.key]),
    "broadcast_join": lambda rows: rows.map(lambda row: {"user": row["user"]})
    .broadcast_join(Stream.items([{"user": "ann", "age": 1}, {"user": "bob", "age": 2}]), "user")
    .map(lambda row: row["user"]),
    "semi": lambda rows: rows.map(user_of)
    .key_by(str)
    .join(calls().map(user_of).key_by(str), "semi")
    .filter(bool),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_windows_are_those_of_the_time_that_was_assigned(step: str) -> None:
    stepped = STEPS[step](calls())
    assert answers(stepped) == sorted((user for user, _ in GIVEN), key=repr), "nobody sees the times"
    assert hours(answers(stepped.key_by(lambda user: user).window(HOUR).count())) == WINDOWS
    reduced = stepped.key_by(lambda user: user).window(HOUR).reduce(lambda one, other: one + other)
    assert [len(users) // 3 for _, _, users in answers(reduced)] == [count for _, _, count in WINDOWS]
    assert hours(answers(stepped.key_by(str).session_window(MINUTE).count())) == [
        (user, minute // 60, 1) for user, minute in sorted(GIVEN)
    ]
    counted = stepped.key_by(str).count()
    assert dict(answers(counted)) == Counter(user for user, _ in GIVEN)


def test_a_column_that_a_function_leaves_out_or_changes_is_the_time_that_it_was() -> None:
    timed = shown(GIVEN)
    for step in (user_of, lambda row: {**row, "at": START}):
        stepped = timed.map(step).key_by(lambda row: row if isinstance(row, str) else row["user"])
        assert hours(answers(stepped.window(HOUR).count())) == WINDOWS


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


def test_columns_of_the_rows_stay_keys_and_become_columns_of_a_table() -> None:
    rows = calls().map(lambda row: {"user": row["user"], "n": 1})
    assert hours(answers(rows.key_by("user").window(HOUR).count())) == WINDOWS
    for schema in ({"user": str, "n": int}, pa.schema({"user": pa.string(), "n": pa.int64()})):
        table = rows.to_table(schema)
        assert [list(row) for row in run(table.collect(), Cut(2)).rows] == [["user", "n"]] * 5
        found = run(table.key_by("user").window(HOUR).aggregate(n=("n", "sum")).collect(), Cut(2)).rows
        assert hours((row["user"], row["window_start"], row["n"]) for row in found) == WINDOWS
        back = table.to_rows().map(user_of).key_by(str)
        assert hours(answers(back.window(HOUR).count())) == WINDOWS
    with pytest.raises(UnknownName, match="no column 'age' to key by: the row has user, n"):
        run(rows.key_by("age").window(HOUR).count().collect(), Cut(1))


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "anti"])
@pytest.mark.parametrize("paired", [(True, True), (True, False), (False, True)])
def test_a_pair_has_the_greater_time_of_both(how: Any, paired: tuple[bool, bool]) -> None:
    """Against rows that show their times; a record alone has its own."""
    clicks = (("ann", 65), ("bob", 10), ("cy", 90))

    def counted(mapped: tuple[bool, bool]) -> list[Any]:
        left, right = (
            shown(given).map(dict) if is_mapped else shown(given)
            for given, is_mapped in zip((GIVEN, clicks), mapped, strict=True)
        )
        joined = left.key_by("user").join(right.key_by("user"), how, 20 * MINUTE)
        key = (lambda row: row["user"]) if how == "anti" else (lambda row: row[0])
        return hours(answers(joined.key_by(key).window(HOUR).count()))

    assert counted(paired) == counted((False, False)) != []


def test_a_union_has_the_times_of_all() -> None:
    users = calls().map(user_of)
    shown = Stream.items([("cy", 5)]).event_time(lambda row: START + row[1] * MINUTE).map(lambda row: row[0])
    both = users.union(shown)
    assert hours(answers(both.key_by(str).window(HOUR).count())) == sorted([*WINDOWS, ("cy", 0, 1)])
    timeless = users.union(Stream.items(["cy"]))
    assert timeless._time is None
    assert len(answers(timeless)) == 6


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


def test_side_outputs_and_late_rows_have_their_times_and_are_rows() -> None:
    parted = calls().map(lambda row: row["user"] if row["minute"] % 20 else Aside("odd", row["user"]),
                         sides=["odd"])  # fmt: skip
    assert sorted(run(parted.side("odd").collect(), Cut(2)).rows) == ["bob"]
    assert hours(answers(parted.side("odd").key_by(str).window(HOUR).count())) == [("bob", 0, 1)]
    timed = Stream.source(InOrder()).parallel(1).event_time(at, watermarks="each").map(user_of)
    late = timed.key_by(str).window(HOUR, late="side").count().late
    assert run(late.collect(), Cut(1)).rows == ["bob"]
    with pytest.raises(UsageError, match="behind the watermark: 'bob': raise out_of_order="):
        run(timed.key_by(str).window(HOUR, late="fail").count().collect(), Cut(1))
    assert late._time == BESIDE


class InOrder:
    """Two rows in one split, the second of which is late."""

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield [{"user": "ann", "minute": 200}, {"user": "bob", "minute": 5}][offset:]


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


def test_times_are_put_beside_rows_and_go_with_their_keys() -> None:
    out: list[Any] = []
    HoldTimes(EventTime(fn=len, shift=1)).process(Batch(["abc", ""]), 0, out.append)
    HoldTimes(None).process(Batch(["abc"]), 0, out.append)
    rows = Batch([{"k": 1}], None, out[0].times[:1])
    KeyRowsByColumns(("k",)).process(rows, 0, out.append)
    held, plain, keyed = out
    assert (held.payload, held.times.tolist(), plain.times) == (["abc", ""], [4, 1], None)
    assert (keyed.keys, keyed.payload, keyed.times.tolist()) == ([1], [{"k": 1}], [4])


def test_a_table_that_hides_its_time_gives_rows_that_have_it() -> None:
    table = calls().to_table({"user": pa.string(), "minute": pa.int64()}).select("user")
    rows = table.to_rows()
    assert answers(rows) == [{"user": user} for user in sorted(user for user, _ in GIVEN)]
    assert hours(answers(rows.key_by("user").window(HOUR).count())) == WINDOWS


@pytest.mark.parametrize("method", ["map", "filter", "flat_map", "to_table"])
@pytest.mark.parametrize("rows", [calls, shown])
def test_an_error_has_the_time_of_its_record(method: str, rows: Callable[..., Stream[Any]]) -> None:
    given = {"minute": pa.int64()} if method == "to_table" else boom
    errors = getattr(rows(GIVEN), method)(given, on_error="side").errors
    windows = errors.key_by(lambda error: error["record"]["user"]).window(HOUR).count()
    assert hours(answers(windows)) == WINDOWS


def test_a_row_that_cannot_be_sent_is_an_error_of_its_batch() -> None:
    made = calls().map(lambda row: {row["user"]}, on_error="side")
    windows = made.errors.key_by("operator").window(HOUR).count().collect("errors")
    both = Stream.together(windows, made.rebalance().collect("rows"))
    assert sum(row[2] for row in run(both, Cut(1)).rows) == len(GIVEN)

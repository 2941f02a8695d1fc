"""Functions with state and timers: what they know, when timers fire, what is kept, what is freed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import FatalRecord, UsageError, WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.operators import keyed_process
from minishuffle.operators.base import (
    END_OF_TIME,
    Aside,
    Idle,
    TaskContext,
    Watermark,
)
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.keyed_process import ProcessContext, ProcessRows
from support.batches import shown

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIME = EventTime(column="t")


def moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def micros(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


class Run:
    """An operator with a clock that stands still until it is set; ``out`` has rows and marks, ``times`` the
    event times of the rows."""

    def __init__(self, operator: ProcessRows) -> None:
        self.operator = operator
        self.out: list[Any] = []
        self.times: list[int] = []
        self.now = 1000.0
        self.log: list[str] = []
        self.context = TaskContext(
            "job", "task", 0, 1, 1, now=lambda: self.now, wall=lambda: self.now, log=self.log.append
        )
        operator.open(self.context)

    def emit(self, item: Any) -> None:
        if isinstance(item, Batch) and item.times is not None:
            self.times += item.times.tolist()
        item = shown(item)
        self.out += item if isinstance(item, list) else [item]

    def take(self, *records: tuple[Any, int]) -> None:
        rows = [{"k": key, "t": time} for key, time in records]
        self.operator.process(Batch(rows, [key for key, _ in records]), 0, self.emit)

    def watermark(self, time: int) -> None:
        self.operator.on_mark(Watermark(time), 0, self.emit)

    def clock(self, now: float) -> None:
        """The task's loop: the operator is called if its time has come."""
        self.now = now
        due = self.operator.deadline()
        if due is not None and due <= now:
            self.operator.on_clock(now, self.emit)


def nothing(row: Any, context: ProcessContext) -> None:
    """Keeps nothing."""


def fired(at: datetime, context: ProcessContext) -> list[Any]:
    return [("fired", context.key, micros(at))]


def timer_in(delay: int, clock: Any = "event") -> Callable[[Any, ProcessContext], None]:
    def on_record(row: Any, context: ProcessContext) -> None:
        assert context.time is not None
        context.set_timer(context.time + timedelta(microseconds=delay), clock)

    return on_record


def counting(row: Any, context: ProcessContext) -> list[Any]:
    context.state["n"] = context.state.get("n", 0) + 1
    return [(context.key, context.state["n"])]


def test_each_key_has_its_own_state() -> None:
    run = Run(ProcessRows(counting))
    run.take(("a", 1), ("b", 2), ("a", 3))
    run.take((1, 4), (True, 5), (1.0, 6), (None, 7), (None, 8))
    assert run.out == [("a", 1), ("b", 1), ("a", 2), (1, 1), (1, 2), (1, 3), (None, 1), (None, 2)]


def test_what_is_given_happened_when_its_record_did_or_at_the_time_of_its_timer() -> None:
    def on_record(row: Any, context: ProcessContext) -> list[Any]:
        context.set_timer(row["t"] + 10)
        context.set_timer(row["t"] + 1_000_000_020, clock="wall")
        return [row["t"], Aside("odd", row["t"])]

    operator = ProcessRows(on_record, fired, TIME)
    operator.side_tags = {"odd": "side-1"}
    run = Run(operator)
    run.take(("a", 3), ("b", 4))
    assert (run.out, run.times) == ([("side-1", [3, 4]), 3, 4], [3, 4])
    run.watermark(13)
    assert run.times[2:] == [13], "the timer's"
    run.clock(1000.0 + 24e-6)
    assert run.times[3:] == [14, 14], "the first that is not behind the watermark"
    early = Run(ProcessRows(on_record, fired, TIME))
    early.operator.side_tags = {"odd": "side-1"}
    early.take(("a", 3))
    early.clock(1000.0 + 24e-6)
    assert early.times[1:] == [1_000_000_023], "without a watermark the clock's"


@pytest.mark.parametrize("time", [None, TIME])
def test_a_row_for_a_side_output_that_is_not_there_is_no_fault_of_the_record(time: EventTime | None) -> None:
    operator = ProcessRows(lambda row, context: [Aside("odd", row)], time=time, on_error="skip")
    with pytest.raises(WrongResult, match=r"process: .* write sides=\['odd'\]"):
        Run(operator).take(("a", 3))


def test_what_the_context_knows() -> None:
    seen: list[Any] = []

    def on_record(row: Any, context: ProcessContext) -> None:
        seen.append((context.key, context.time, context.watermark))
        context.set_timer(7)

    def on_timer(at: datetime, context: ProcessContext) -> None:
        seen.append((at, context.key, context.time, context.watermark))

    run = Run(ProcessRows(on_record, on_timer, TIME))
    run.take(("a", 3))
    run.watermark(2)
    run.take(("b", 4))
    run.watermark(9)
    assert seen == [
        ("a", moment(3), None),
        ("b", moment(4), moment(2)),
        (moment(7), "a", moment(7), moment(9)),
        (moment(7), "b", moment(7), moment(9)),
    ]
    seen.clear()
    without = Run(ProcessRows(on_record, on_timer))
    without.take(("a", 3))
    assert seen == [("a", None, None)]


def test_timers_fire_in_order_of_time_and_before_the_watermark() -> None:
    run = Run(ProcessRows(timer_in(5), fired, TIME))
    run.take(("a", 10), ("b", 3), ("a", 3), ("b", 10), ("a", 10))
    run.watermark(7)
    run.watermark(8)
    run.watermark(20)
    assert run.out == [
        Watermark(7),
        ("fired", "b", 8),
        ("fired", "a", 8),
        Watermark(8),
        ("fired", "a", 15),
        ("fired", "b", 15),
        Watermark(20),
    ]
    assert run.operator.state_rows() == 0


def test_timers_of_event_time_fire_when_time_ends_and_those_of_the_clock_do_not() -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        context.set_timer(50)
        context.set_timer(moment(60), "wall")

    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        context.set_timer(at + timedelta(hours=1))
        return fired(at, context)

    run = Run(ProcessRows(on_record, on_timer))
    run.now = 0.0
    run.take(("a", 1))
    run.watermark(END_OF_TIME)
    assert run.out == [("fired", "a", 50), Watermark(END_OF_TIME)]
    assert run.operator.deadline() is None


def test_a_timer_may_set_the_next() -> None:
    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        context.set_timer(at + timedelta(microseconds=10))
        return fired(at, context)

    run = Run(ProcessRows(timer_in(0), on_timer, TIME))
    run.take(("a", 1), ("b", 15))
    run.watermark(22)
    assert run.out[:-1] == [("fired", "a", 1), ("fired", "a", 11), ("fired", "b", 15), ("fired", "a", 21)]


def test_timers_of_the_clock_fire_by_the_clock() -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        context.set_timer(moment(1_001_500_000), "wall")
        context.set_timer(moment(1_001_000_001), "wall")

    run = Run(ProcessRows(on_record, fired))
    run.take(("a", 1))
    run.watermark(10**15)
    assert run.operator.deadline() == 1001.000001
    run.clock(1001.0)
    assert run.out == [Watermark(10**15)]
    run.clock(1001.000001)
    assert run.out[1:] == [("fired", "a", 1_001_000_001)]
    run.clock(1002.0)
    assert run.out[2:] == [("fired", "a", 1_001_500_000)]
    assert run.operator.deadline() is None
    assert run.operator.state_rows() == 0


@pytest.mark.parametrize("step", [-3600, 3600])
def test_timers_of_the_clock_fire_once_and_in_time_when_it_is_set(step: int) -> None:
    """Whoever sets a timer reads the system clock; the clock of the operator does not follow so far."""

    def on_record(row: Any, context: ProcessContext) -> None:
        context.set_timer(micros_now() + 10_000_000, "wall")

    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        if context.key == "a":
            context.set_timer(at + timedelta(seconds=10), "wall")
        return fired(at, context)

    run = Run(ProcessRows(on_record, on_timer))
    system = 0

    def micros_now() -> int:
        return round(run.now * 1_000_000) + system * 1_000_000

    run.context.lead = lambda: float(system)
    run.take(("a", 1))  # Set before the step, at 1,010 seconds.
    run.now, system = 1003.0, step
    run.take(("b", 1))
    assert run.operator.deadline() == 1010.0
    run.clock(1009.999)
    assert run.out == []
    run.clock(1010.0)
    assert run.out == [("fired", "a", 1_010_000_000)]
    run.clock(1012.999)
    assert len(run.out) == 1
    run.clock(1013.0)
    assert run.out[1:] == [("fired", "b", (1013 + step) * 1_000_000)]
    # The timer that follows its own time by ten seconds has one of the clock as it was before.
    assert run.operator.deadline() == 1020.0
    run.clock(1020.0)
    assert run.out[2:] == [("fired", "a", 1_020_000_000)]
    assert run.operator.deadline() == 1030.0


def test_timers_that_are_read_back_are_due_by_the_clock_there() -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        context.set_timer(moment(1_005_000_000), "wall")

    before = Run(ProcessRows(on_record, fired))
    before.take(("a", 1))
    after = Run(ProcessRows(on_record, fired))
    after.context.lead = lambda: 2.0
    after.operator.read_state(before.operator.write_state())
    assert after.operator.deadline() == 1003.0


def test_timers_may_be_deleted() -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        context.set_timer(5)
        context.delete_timer(5)
        context.delete_timer(moment(6))
        context.set_timer(5, "wall")
        context.delete_timer(5)

    run = Run(ProcessRows(on_record, fired))
    run.take(("a", 1))
    run.watermark(10)
    assert run.out == [Watermark(10)]
    run.clock(1001.0)
    assert run.out[1:] == [("fired", "a", 5)]


def test_idleness_passes() -> None:
    run = Run(ProcessRows(nothing))
    run.operator.on_mark(Idle(), 0, run.emit)
    assert run.out == [Idle()]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40)) | st.integers(0, 40).map(lambda time: (None, time)),
        max_size=25,
    )
)
def test_sessions_agree_with_a_loop_over_records(steps: list[tuple[int | None, int]]) -> None:
    """Counts a key's records until none has come for 5 us; state and timers together."""

    def on_record(row: Any, context: ProcessContext) -> None:
        state = context.state
        if "until" in state:
            context.delete_timer(state["until"])
        state["n"] = state.get("n", 0) + 1
        state["until"] = max(state.get("until", 0), row["t"] + 5)
        context.set_timer(state["until"])

    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        rows = [(micros(at), context.key, context.state["n"])]
        context.state.clear()
        return rows

    run = Run(ProcessRows(on_record, on_timer, TIME))
    expected: list[Any] = []
    sessions: dict[int, list[int]] = {}
    reached = -1
    for key, time in [*steps, (None, 1000)]:
        if key is not None:
            run.take((key, time))
            until, number = sessions.get(key, [0, 0])
            sessions[key] = [max(until, time + 5), number + 1]
        elif time > reached:
            reached = time
            run.watermark(time)
            due = sorted((until, key, n) for key, (until, n) in sessions.items() if until <= time)
            expected += due
            sessions = {key: session for key, session in sessions.items() if session[0] > time}
    results = [item for item in run.out if not isinstance(item, Watermark)]
    assert sorted(results) == sorted(expected)
    assert run.operator.state_rows() == 0


# --- keys, and what goes on elsewhere ---------------------------------------------------------------


def test_a_key_is_shown_as_the_first_record_since_its_state_was_gone_brought_it() -> None:
    def on_record(row: Any, context: ProcessContext) -> list[Any]:
        context.state["n"] = row["t"]
        if not row["t"]:
            context.state.clear()
        return [repr(context.key)]

    run = Run(ProcessRows(on_record, ttl=10.0))
    run.take((1, 0), (1.0, 1), (True, 1), (1, 0), (Decimal(1), 0), (1, 0), (True, 1))
    assert run.out == ["1", "1.0", "1.0", "1.0", "Decimal('1')", "1", "True"]
    run.take((1, 1), ((1, "a"), 1))
    run.take(((True, "a"), 1), ((True, "b"), 1), ((1, "b"), 1))
    assert run.out[7:] == ["True", "(1, 'a')", "(1, 'a')", "(True, 'b')", "(True, 'b')"]
    run.now = 1010.0
    run.take((1, 1), (True, 1))
    assert run.out[12:] == ["1", "1"], "the state was gone by its age"


def test_state_timers_and_ages_go_on_where_they_are_read() -> None:
    def on_record(row: Any, context: ProcessContext) -> list[Any]:
        context.set_timer(row["t"] + 5)
        return counting(row, context)

    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        return [("fired", context.key, dict(context.state))]

    before = Run(ProcessRows(on_record, on_timer, TIME, ttl=10.0))
    before.context.paused_seconds = lambda: 100.0
    before.context.wall = lambda: before.now + 100.0
    before.take((True, 1))
    before.now = 1004.0
    before.take(("b", 2), ("b", 2))
    after = Run(ProcessRows(on_record, on_timer, TIME, ttl=10.0))
    after.now = 1110.0  # The paused time of the one before has passed for both.
    after.operator.read_state(before.operator.write_state())
    assert after.operator.state_rows() == 2
    after.watermark(7)
    assert after.out == [("fired", True, {}), ("fired", "b", {"n": 2}), Watermark(7)]
    after.take(("b", 8), (1, 8))
    assert after.out[3:] == [("b", 3), (1, 1)]


# --- time to live ---------------------------------------------------------------------------------


def test_state_that_was_not_touched_for_its_time_is_gone() -> None:
    run = Run(ProcessRows(counting, ttl=10.0))
    run.take(("a", 1), ("b", 1))
    run.now = 1009.0
    run.take(("a", 2))
    run.now = 1010.0
    run.take(("b", 2))
    run.now = 1018.9
    run.take(("a", 3))
    assert run.out[2:] == [("a", 2), ("b", 1), ("a", 3)]


def test_the_time_of_a_pause_is_no_time_without_a_touch() -> None:
    """``now`` of the task's context goes without it too, and its wall clock does not."""
    run = Run(ProcessRows(counting, ttl=10.0))
    paused = 0.0
    run.context.paused_seconds = lambda: paused
    run.context.wall = lambda: run.now + paused
    run.take(("a", 1))
    paused = 100.0
    run.clock(1009.0)
    assert run.operator.state_rows() == 1
    run.take(("a", 2))
    assert run.out == [("a", 1), ("a", 2)]
    paused = 200.0
    run.clock(1018.9)
    assert run.operator.state_rows() == 1
    run.clock(1023.0)
    assert run.operator.state_rows() == 0


def test_a_timer_of_the_wall_clock_that_came_due_in_a_pause_fires_when_that_is_over() -> None:
    """In the order of their times, and no later."""
    run = Run(ProcessRows(timer_in(0, "wall"), fired, time=TIME))
    paused = 0.0
    run.context.paused_seconds = lambda: paused
    run.context.wall = lambda: run.now + paused
    run.take(("b", 1_020_000_000), ("a", 1_010_000_000), ("c", 2_000_000_000))
    paused = 50.0
    run.clock(1000.1)
    assert run.out == [("fired", "a", 1_010_000_000), ("fired", "b", 1_020_000_000)]


def test_state_is_freed_by_the_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_process, "SWEEP_KEYS", 10)
    operator = ProcessRows(counting, ttl=10.0)
    run = Run(operator)
    run.take(*((key, 1) for key in range(95)))
    run.clock(1005.0)
    run.take((3, 1))
    assert operator.state_rows() == 95
    for looks in range(1, 10):
        run.clock(1010.0)
        assert operator.state_rows() == 95 - 10 * looks
    run.clock(1010.0)
    assert [key for key, _ in operator._state.items()] == [3]
    due = operator.deadline()
    assert due is not None
    assert due > 1010.0
    run.clock(1016.0)
    assert operator.state_rows() == 0
    assert operator.deadline() is None


def test_timers_outlive_the_state() -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        context.state["n"] = 1
        context.set_timer(500)

    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        return [(context.key, dict(context.state))]

    for sweeps in (True, False):
        run = Run(ProcessRows(on_record, on_timer, ttl=10.0))
        run.take(("a", 1))
        if sweeps:
            run.clock(1020.0)
            assert list(run.operator._state.items()) == [("a", {})]
        run.now = 1040.0
        run.watermark(500)
        assert run.out == [("a", {}), Watermark(500)]
        assert run.operator.state_rows() == 0


def test_empty_state_is_not_kept() -> None:
    operator = ProcessRows(lambda row, context: context.state.pop("n", None))
    run = Run(operator)
    run.take(*((key, 1) for key in range(50)), *((Decimal(key), 1) for key in range(50)))
    assert operator.state_rows() == 0
    assert operator._state._stores[None]._shown == {}


# --- errors ---------------------------------------------------------------------------------------


def failing(row: Any, context: ProcessContext) -> list[Any]:
    context.state["n"] = context.state.get("n", 0) + 1
    return [(row["t"], 1 / (row["t"] - 2))]


def test_a_record_whose_function_raises_fails_the_task_or_is_dropped_alone() -> None:
    with pytest.raises(ZeroDivisionError) as failure:
        Run(ProcessRows(failing)).take(("a", 2))
    assert failure.value.__notes__ == ["raised in operator 'process' by the record {'k': 'a', 't': 2}"]
    run = Run(ProcessRows(failing, on_error="dead_letter"))
    run.take(("a", 1), ("a", 2), ("a", 3))
    assert run.out == [(1, -1.0), (3, 1.0)]
    assert run.context.counters.user_errors == {"dead_letter": 1}
    assert len(run.log) == 1


@pytest.mark.parametrize("on_error", ["fail", "dead_letter"])
def test_a_timer_that_ends_its_process_is_dealt_with_as_if_its_function_raised(on_error: Any) -> None:
    run, asked = Run(ProcessRows(timer_in(0), fired, TIME, on_error=on_error)), list[Any]()

    def alone(record: Any) -> str | None:
        asked.append(record)
        return "took it" if record[2] == "b" else None

    run.context.alone = alone
    run.take(("a", 1), ("b", 2), ("c", 3))
    assert asked == [], "rows are looked at in front of the operator"
    if on_error == "fail":
        with pytest.raises(
            FatalRecord, match=r"'process', for a timer of the event clock of key 'b', took it: "
        ):
            run.watermark(5)
        return
    run.watermark(5)
    assert run.out == [("fired", "a", 1), ("fired", "c", 3), Watermark(5)]
    assert asked == [["timer", "event", key, time] for key, time in [("a", 1), ("b", 2), ("c", 3)]]
    assert (
        run.operator.state_rows() == 0 and len(run.log) == 1 and "of key 'b', took it: record" in run.log[0]
    )


def test_a_generator_that_raises_half_way_gives_nothing() -> None:
    def on_record(row: Any, context: ProcessContext) -> Any:
        yield row["t"]
        if row["t"] == 2:
            raise ValueError

    run = Run(ProcessRows(on_record, on_error="skip"))
    run.take(("a", 1), ("a", 2), ("a", 3))
    assert run.out == [1, 3]


def test_a_timer_whose_function_raises_is_dropped_alone() -> None:
    def on_timer(at: datetime, context: ProcessContext) -> list[Any]:
        if context.key == "b":
            raise ValueError
        return fired(at, context)

    run = Run(ProcessRows(timer_in(0), on_timer, TIME, on_error="skip"))
    run.take(("a", 1), ("b", 2), ("c", 3))
    run.watermark(5)
    assert run.out == [("fired", "a", 1), ("fired", "c", 3), Watermark(5)]
    assert run.operator.state_rows() == 0


@pytest.mark.parametrize(
    ("on_record", "on_timer", "told"),
    [
        (timer_in(1), None, r"set_timer needs a function for timers: process\(on_record, on_timer\)"),
        (timer_in(1, "sun"), fired, "clock is 'sun': write 'event' or 'wall'"),
        (lambda row, context: context.set_timer("noon"), fired, "takes a datetime or whole .* not 'noon'"),
        (lambda row, context: context.set_timer(10**18), fired, "outside the years 1 to 9999"),
        (
            lambda row, context: row,
            None,
            r"the function gave {'k': .*}, which is no list of rows: return \[row\] for one",
        ),
    ],
    ids=["no function", "clock", "time", "range", "result"],
)
def test_mistakes_are_told_even_where_errors_are_skipped(on_record: Any, on_timer: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Run(ProcessRows(on_record, on_timer, TIME, on_error="skip")).take(("a", 1))


def test_a_timer_that_would_fire_for_ever_is_refused() -> None:
    def on_timer(at: datetime, context: ProcessContext) -> None:
        context.set_timer(at)

    run = Run(ProcessRows(timer_in(0), on_timer, TIME))
    run.take(("a", 1))
    with pytest.raises(
        UsageError, match="on_timer sets a timer that is not after its own: it would fire for"
    ):
        run.watermark(1)


def test_a_key_without_state_is_no_state_that_is_lost_when_its_function_raises() -> None:
    def ill(row: Any, context: ProcessContext) -> None:
        if context.key == "kept":
            context.state["n"] = 1
        raise ValueError("ill")

    for key, rows in (("empty", 0), ("kept", 1)):
        run = Run(ProcessRows(ill))
        with pytest.raises(ValueError, match="ill"):
            run.take((key, 1))
        assert run.operator.state_rows() == rows

from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs.history import (
    REPLY_BYTES_MAX,
    REPLY_EVENTS_MAX,
    REPLY_LINES_MAX,
    TEXT_CHARS_MAX,
    History,
)
from minishuffle.errors import PartitionNotFound, PeerLost, TaskCancelled, TaskFailed
from minishuffle.wire.messages import ErrorInfo
from minishuffle.wire.requests import JobEvent


def blame(history: History, *causes: tuple[int, str], verdict: bool = False) -> None:
    for code, text in causes:
        history.blame(ErrorInfo(code=code, text=text), verdict=verdict)
        history.validate()


def texts(history: History) -> list[str]:
    return [cause.text for cause in history.causes]


def test_events_are_numbered_and_the_oldest_are_dropped() -> None:
    history = History()
    for number in range(limits.JOB_EVENTS_KEPT + 5):
        history.note(float(number), "running", "x" * (2 * TEXT_CHARS_MAX))
    history.validate()
    events: list[JobEvent] = []
    while more := history.events_after(events[-1].number if events else 0, False).events:
        assert len(more) <= REPLY_EVENTS_MAX
        events += more
    assert [event.number for event in events] == list(range(6, limits.JOB_EVENTS_KEPT + 6))
    assert len(events[0].text) == TEXT_CHARS_MAX
    last = history.events_after(events[-2].number, True)
    assert (last.events, last.terminal) == ([events[-1]], True)
    assert not history.has_events(events[-1].number) and history.has_events(events[-2].number)
    assert history.events_after(events[-1].number + 7, False).events == []


def test_a_failure_keeps_its_traceback_within_bounds_and_the_first_stays() -> None:
    history = History()
    frames = "first frame" + "x" * limits.EVENT_TRACEBACK_CHARS_MAX + "last frame"
    history.note(0.0, "task running", "map[0]")
    history.note(0.0, "task failed", "map[0]: ValueError: no", traceback=frames)
    first = history.first_failure
    assert first is not None and first.number == 2
    assert len(first.traceback) <= limits.EVENT_TRACEBACK_CHARS_MAX
    assert first.traceback.startswith("first frame") and first.traceback.endswith("last frame")
    for _ in range(limits.JOB_EVENTS_KEPT):
        history.note(1.0, "task failed", "map[0]: ValueError: again")
    assert history.first_failure == first and first not in history.events_after(0, True).events
    again = History()
    again.recall(history.record(), ())
    assert again.first_failure == first


def test_log_lines_are_counted_on_when_the_oldest_are_dropped() -> None:
    history = History()
    history.log(["a", "b"])
    first = history.logs_after(0, False)
    assert (first.lines, first.next) == (["a", "b"], 2)
    history.log(["c" * (limits.LOG_LINE_CHARS_MAX + 1)])
    assert history.has_lines(first.next)
    second = history.logs_after(first.next, False)
    assert (second.lines, second.next) == (["c" * limits.LOG_LINE_CHARS_MAX], 3)
    history.log(f"line {i}" for i in range(limits.JOB_LOG_LINES_KEPT))
    history.validate()
    lines, after = [], 0
    while found := (reply := history.logs_after(after, True)).lines:
        assert len(found) <= REPLY_LINES_MAX
        lines, after = lines + found, reply.next
    assert lines == [f"line {i}" for i in range(limits.JOB_LOG_LINES_KEPT)]
    assert after == limits.JOB_LOG_LINES_KEPT + 3


def test_long_lines_make_the_oldest_make_room() -> None:
    history = History()
    fit = limits.JOB_LOG_CHARS_KEPT // limits.LOG_LINE_CHARS_MAX
    history.log(str(number).rjust(limits.LOG_LINE_CHARS_MAX) for number in range(fit + 3))
    history.validate()
    first = history.logs_after(0, True)
    assert first.lines[0].strip() == "3"
    assert first.next == fit + 3 > 200


def test_rows_come_in_replies_of_bounded_size() -> None:
    history = History()
    large = bytes(REPLY_BYTES_MAX - 1)
    for sink, batch in zip("xyxz", (b"a", large, b"b", large + b"too long by itself"), strict=True):
        assert history.collect(sink, batch)
    seen: list[bytes] = []
    sizes = []
    sinks: list[str] = []
    while not sizes or sizes[-1]:
        reply = history.rows_after(len(seen), False)
        seen += reply.batches
        sinks += reply.sinks
        assert reply.next == len(seen)
        sizes.append(len(reply.batches))
    assert sizes == [2, 1, 1, 0]
    assert sinks == list("xyxz")
    assert seen == [b"a", large, b"b", large + b"too long by itself"]
    assert history.rows_after(99, True).next == 4


def test_rows_above_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COLLECT_BYTES_MAX", 10)
    history = History()
    assert history.collect("rows", bytes(8))
    assert not history.collect("rows", bytes(3))
    assert history.collect("rows", bytes(2))
    history.validate()
    assert history.batches == 2


def test_the_first_cause_stays_on_top() -> None:
    history = History()
    blame(
        history, (TaskFailed.code, "division by zero"), (PeerLost.code, "peer"), (TaskFailed.code, "second")
    )
    assert texts(history) == ["division by zero", "second", "peer"]


def test_what_follows_from_a_lost_worker_comes_after_it_though_reported_before() -> None:
    history = History()
    followers = [(PeerLost.code, "peer"), (PartitionNotFound.code, "gone"), (TaskCancelled.code, "cancelled")]
    blame(history, *followers)
    assert texts(history) == ["peer", "gone", "cancelled"]
    blame(history, (PeerLost.code, "worker 2 was lost"), verdict=True)
    assert texts(history) == ["worker 2 was lost", "peer", "gone", "cancelled"]


def test_causes_are_bounded_and_followers_go_first() -> None:
    history = History()
    kept = limits.ERROR_CAUSES_KEPT
    blame(history, *[(PeerLost.code, f"peer {i}") for i in range(kept + 3)])
    blame(history, *[(TaskFailed.code, f"cause {i}") for i in range(kept - 1)])
    assert texts(history) == [*(f"cause {i}" for i in range(kept - 1)), "peer 0"]
    blame(history, (TaskFailed.code, "one more"), (TaskFailed.code, "too many"))
    assert texts(history) == [*(f"cause {i}" for i in range(kept - 1)), "one more"]

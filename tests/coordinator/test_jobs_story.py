from __future__ import annotations

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs import REPLY_BYTES_MAX, TEXT_CHARS_MAX, Story
from minishuffle.errors import PartitionNotFound, PeerLost, TaskCancelled, TaskFailed
from minishuffle.wire.messages import ErrorInfo


def blame(story: Story, *causes: tuple[int, str], verdict: bool = False) -> None:
    for code, text in causes:
        story.blame(ErrorInfo(code=code, text=text), verdict=verdict)
        story.validate()


def texts(story: Story) -> list[str]:
    return [cause.text for cause in story.causes]


def test_events_are_numbered_and_the_oldest_are_dropped() -> None:
    story = Story()
    for number in range(limits.JOB_EVENTS_KEPT + 5):
        story.note(float(number), "running", "x" * (2 * TEXT_CHARS_MAX))
    story.validate()
    events = story.events_after(0, False).events
    assert [events[0].number, events[-1].number] == [6, limits.JOB_EVENTS_KEPT + 5]
    assert len(events[0].text) == TEXT_CHARS_MAX
    last = story.events_after(events[-2].number, True)
    assert (last.events, last.over) == ([events[-1]], True)
    assert not story.has_events(events[-1].number) and story.has_events(events[-2].number)
    assert story.events_after(events[-1].number + 7, False).events == []


def test_log_lines_are_counted_on_when_the_oldest_are_dropped() -> None:
    story = Story()
    story.log(["a", "b"])
    first = story.logs_after(0, False)
    assert (first.lines, first.next) == (["a", "b"], 2)
    story.log(["c" * (limits.LOG_LINE_CHARS_MAX + 1)])
    assert story.has_lines(first.next)
    second = story.logs_after(first.next, False)
    assert (second.lines, second.next) == (["c" * limits.LOG_LINE_CHARS_MAX], 3)
    story.log(f"line {i}" for i in range(limits.JOB_LOG_LINES_KEPT))
    story.validate()
    everything = story.logs_after(0, True)
    assert everything.lines[0] == "line 0"
    assert (len(everything.lines), everything.next) == (
        limits.JOB_LOG_LINES_KEPT,
        limits.JOB_LOG_LINES_KEPT + 3,
    )
    assert story.logs_after(everything.next, True).lines == []


def test_rows_come_in_replies_of_bounded_size() -> None:
    story = Story()
    large = bytes(REPLY_BYTES_MAX - 1)
    for batch in (b"a", large, b"b", large + b"too long by itself"):
        assert story.collect(batch)
    seen: list[bytes] = []
    sizes = []
    while not sizes or sizes[-1]:
        reply = story.rows_after(len(seen), False)
        seen += reply.batches
        assert reply.next == len(seen)
        sizes.append(len(reply.batches))
    assert sizes == [2, 1, 1, 0]
    assert seen == [b"a", large, b"b", large + b"too long by itself"]
    assert story.rows_after(99, True).next == 4


def test_rows_above_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COLLECT_BYTES_MAX", 10)
    story = Story()
    assert story.collect(bytes(8))
    assert not story.collect(bytes(3))
    assert story.collect(bytes(2))
    story.validate()
    assert story.batches == 2


def test_the_first_cause_stays_on_top() -> None:
    story = Story()
    blame(story, (TaskFailed.code, "division by zero"), (PeerLost.code, "peer"), (TaskFailed.code, "second"))
    assert texts(story) == ["division by zero", "second", "peer"]


def test_what_follows_from_a_lost_worker_comes_after_it_though_reported_before() -> None:
    story = Story()
    followers = [(PeerLost.code, "peer"), (PartitionNotFound.code, "gone"), (TaskCancelled.code, "cancelled")]
    blame(story, *followers)
    assert texts(story) == ["peer", "gone", "cancelled"]
    blame(story, (PeerLost.code, "worker 2 was lost"), verdict=True)
    assert texts(story) == ["worker 2 was lost", "peer", "gone", "cancelled"]


def test_causes_are_bounded_and_followers_go_first() -> None:
    story = Story()
    kept = limits.ERROR_CAUSES_KEPT
    blame(story, *[(PeerLost.code, f"peer {i}") for i in range(kept + 3)])
    blame(story, *[(TaskFailed.code, f"cause {i}") for i in range(kept - 1)])
    assert texts(story) == [*(f"cause {i}" for i in range(kept - 1)), "peer 0"]
    blame(story, (TaskFailed.code, "one more"), (TaskFailed.code, "too many"))
    assert texts(story) == [*(f"cause {i}" for i in range(kept - 1)), "one more"]

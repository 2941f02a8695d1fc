"""Rows and lines on their way to the coordinator: bounded, in order, and in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle import limits
from minishuffle.errors import TaskCancelled
from minishuffle.exchange.collected import pack_collected, unpack_collected
from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId
from minishuffle.wire.messages import LogLines
from minishuffle.wire.reports import Collected
from minishuffle.worker.reports.outbox import REST_SECONDS, Outbox, OutboxSender
from minishuffle.worker.tasks.handoff import TaskPaths

if TYPE_CHECKING:
    from conftest import Turns

SECONDS_MAX = 20.0
PathsOf = Callable[..., TaskPaths]


def outbox_of(paths: TaskPaths, notify: Callable[[Outbox], None], operator: int = 0) -> Outbox:
    subtask = SubtaskId(JobId("j1"), OperatorId(operator), 0)
    return Outbox(AttemptId(subtask, 1), paths, notify)


class Link:
    """Takes messages while it is writable."""

    def __init__(self, turns: Turns) -> None:
        self.writable = True
        self.sent: list[Any] = []
        self.rests: list[tuple[float, Callable[[], None]]] = []
        self.sender = OutboxSender(
            lambda: 1,
            self.sent.append,
            lambda: self.writable,
            turns.call_soon,
            lambda *rest: self.rests.append(rest),
        )


@pytest.fixture
def link(turns: Turns) -> Link:
    return Link(turns)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASK_UNSENT_BYTES_MAX", 1_000)
    monkeypatch.setattr(limits, "LOG_MESSAGE_BYTES", 300)


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_rows_and_lines_keep_their_order(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    outbox = outbox_of(paths_of(), link.sender.notify)
    outbox.log("a")
    outbox.log("b")
    outbox.collect(b"rows", 3)
    outbox.log("c")
    assert outbox.unsent_rows == 3
    for _ in range(4):
        turns.turn()
    assert outbox.unsent_rows == 0
    first, second, third = link.sent
    assert (first.lines, second.payload, third.lines) == (["a", "b"], b"rows", ["c"])
    assert second.attempt == AttemptId.of("j1", 0, 0, 1)
    outbox.drain()


def test_rows_are_numbered_from_the_snapshot_and_those_that_the_client_has_left_out(
    turns: Turns, paths_of: PathsOf, link: Link
) -> None:
    outbox = Outbox(AttemptId.of("j1", 0, 0, 2), paths_of(), link.sender.notify, known=15)
    outbox.begin_at(10)
    assert [outbox.leave_out(rows) for rows in (3, 4, 4)] == [3, 2, 0]
    outbox.collect(b"rows", 2)
    outbox.collect(b"rows", 3)
    assert (outbox.rows_collected, outbox.unsent_rows) == (20, 5)
    for _ in range(3):
        turns.turn()
    assert [(each.first_row, each.rows) for each in link.sent] == [(15, 2), (17, 3)]
    outbox.acknowledge(2)
    outbox.acknowledge(3)
    outbox.settle()


@pytest.mark.usefixtures("long_waits")
def test_a_snapshot_waits_until_the_coordinator_has_the_rows(
    turns: Turns, paths_of: PathsOf, link: Link
) -> None:
    outbox = outbox_of(paths_of(), link.sender.notify)
    outbox.collect(b"rows", 2)
    turns.turn()
    turns.turn()
    assert len(link.sent) == 1
    thread = in_thread(outbox.settle)
    thread.join(0.05)
    assert thread.is_alive()
    outbox.acknowledge(2)
    turns.turn()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


@pytest.mark.usefixtures("_small", "long_waits")
def test_a_task_waits_while_too_much_is_unsent(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    link.writable = False
    outbox = outbox_of(paths_of(), link.sender.notify)
    count = 0

    def say() -> None:
        nonlocal count
        for _ in range(100):
            outbox.log("x" * 36)
            count += 1
        outbox.drain()

    thread = in_thread(say)
    thread.join(0.2)
    assert (count, link.sent) == (10, [])
    link.writable = True
    while thread.is_alive():
        link.sender.pump()
        turns.turn()
    lines = [message.lines for message in link.sent]
    assert sum(map(len, lines)) == 100
    assert max(map(len, lines)) == 3


@pytest.mark.usefixtures("_small", "long_waits")
def test_a_cancel_ends_the_wait(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    link.writable = False
    paths = paths_of()
    outbox = outbox_of(paths, link.sender.notify)
    raised: list[Exception] = []

    def say() -> None:
        try:
            while True:
                outbox.log("x")
        except TaskCancelled as error:
            raised.append(error)

    thread = in_thread(say)
    thread.join(0.1)
    paths.cancel()
    thread.join(SECONDS_MAX)
    assert raised


@pytest.mark.usefixtures("_small")
def test_what_is_larger_than_the_limit_goes_alone(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    outbox = outbox_of(paths_of(), link.sender.notify)
    outbox.collect(b"x" * 5_000, 1)
    turns.turn()
    assert [len(message.payload) for message in link.sent] == [5_000]


@pytest.mark.usefixtures("_small")
def test_tasks_take_turns(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    link.writable = False
    first, second = (outbox_of(paths_of(), link.sender.notify, number) for number in (0, 1))
    for outbox in (first, second):
        for _ in range(3):
            outbox.collect(b"x", 1)
    turns.turn()
    link.writable = True
    link.sender.pump()
    assert len(link.sent) == 2, "one of each in a turn of the loop"
    for _ in range(3):
        turns.turn()
    assert [message.attempt.subtask.operator for message in link.sent] == [0, 1] * 3


def test_the_last_lines_go_out_in_front_of_the_report(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    link.writable = False
    outbox = outbox_of(paths_of(), link.sender.notify)
    outbox.log("dead letter")
    outbox.collect(b"of no use", 1)
    outbox.log("last words")
    turns.turn()
    link.sender.end(outbox, rows=False)
    assert [message.lines for message in link.sent] == [["dead letter"], ["last words"]]
    link.writable = True
    link.sender.pump()
    assert len(link.sent) == 2
    assert not any(isinstance(message, Collected) for message in link.sent)
    assert all(isinstance(message, LogLines) for message in link.sent)


def test_the_rows_of_a_failed_attempt_go_out_in_front_of_the_report(
    turns: Turns, paths_of: PathsOf, link: Link
) -> None:
    link.writable = False
    outbox = outbox_of(paths_of(), link.sender.notify)
    for payload in (b"first", b"second"):
        outbox.collect(payload, 1)
    outbox.log("last words")
    turns.turn()
    link.sender.end(outbox, rows=True)
    assert [message.payload for message in link.sent[:2]] == [b"first", b"second"]
    assert link.sent[2].lines == ["last words"]


SMALL = [pa.record_batch({"n": [number]}) for number in range(5)]


def numbers_in(messages: list[Any]) -> list[list[int]]:
    return [unpack_collected(message.payload).column("n").to_pylist() for message in messages]  # type: ignore[union-attr]


def test_small_record_batches_wait_for_others_behind_the_first(
    turns: Turns, paths_of: PathsOf, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = outbox_of(paths_of(), link.sender.notify)
    for batch in SMALL[:4]:
        outbox.gather(batch, 10)
        turns.turn()
    assert numbers_in(link.sent) == [[0]] and outbox.unsent_rows == 3
    assert [seconds for seconds, _ in link.rests] == [REST_SECONDS]
    link.rests.pop()[1]()
    assert numbers_in(link.sent) == [[0], [1, 2, 3]] and link.sent[1].rows == 3
    assert (outbox.unsent_rows, outbox.unsent_bytes) == (0, 0)

    outbox.gather(SMALL[4], 10)
    turns.turn()
    link.rests.pop()[1]()
    assert numbers_in(link.sent[2:]) == [[4]]
    link.rests.pop()[1]()
    assert not link.rests, "nothing is there that waits"

    monkeypatch.setattr(limits, "GATHERED_BYTES", 20)
    for batch in SMALL:
        outbox.gather(batch, 10)
        turns.turn()
    assert numbers_in(link.sent[3:]) == [[0], [1, 2], [3, 4]], "so many do not wait"


def test_what_is_to_go_at_once_does_not_wait(turns: Turns, paths_of: PathsOf, link: Link) -> None:
    outbox = outbox_of(paths_of(), link.sender.notify)
    outbox.gather(SMALL[0], 10)
    turns.turn()
    other = pa.record_batch({"n": [0.5]})
    for batch in (SMALL[1], other, SMALL[2]):
        outbox.gather(batch, 10)
    outbox.collect(pack_collected(SMALL[3]), 1)
    outbox.hurry()
    for _ in range(4):
        turns.turn()
    assert numbers_in(link.sent) == [[0], [1], [0.5], [2], [3]]
    outbox.gather(SMALL[4], 10)
    turns.turn()
    link.sender.end(outbox, rows=True)
    assert numbers_in(link.sent[5:]) == [[4]]
    outbox.drain()


# --- without a coordinator ------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small", "long_waits")
def test_lines_are_dropped_and_counted_while_there_is_nobody_and_rows_wait(
    turns: Turns, paths_of: PathsOf, link: Link
) -> None:
    link.writable = False
    away = False
    paths = paths_of()
    subtask = SubtaskId(JobId("j1"), OperatorId(0), 0)
    outbox = Outbox(AttemptId(subtask, 1), paths, link.sender.notify, lambda: away)
    begun = threading.Event()

    def say() -> None:
        for number in range(100):
            outbox.log("x" * 36)
            if number == 9:
                begun.set()
        outbox.collect(b"x" * 50, 1)

    thread = in_thread(say)
    assert begun.wait(SECONDS_MAX)
    away = True
    paths.bell.ring()
    while outbox._lines_dropped < 90 and thread.is_alive():
        turns.turn()
        thread.join(0.001)
    assert thread.is_alive(), "rows wait"
    away, link.writable = False, True
    while thread.is_alive():
        link.sender.pump()
        turns.turn()
    outbox.log("the next")
    for _ in range(4):
        turns.turn()
    lines = [line for message in link.sent if isinstance(message, LogLines) for line in message.lines]
    assert lines[10:] == ["90 lines were dropped here while there was no coordinator", "the next"]

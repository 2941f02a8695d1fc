"""How a write ends: what the program is told why, tickets, and receipts that come when they are true."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.errors import (
    PeerLost,
    ShuffleError,
    Superseded,
    TaskFailed,
    UnknownName,
    UsageError,
)
from minishuffle.limits import CREDIT_MAX
from minishuffle.remote import writer as writing
from minishuffle.remote.writer import StreamWriter, commit_write
from minishuffle.wire.clients import OpenUpstream, UpstreamOpened
from minishuffle.wire.handshake import HandshakeRefused
from minishuffle.wire.messages import ErrorInfo, WorkerAddress
from minishuffle.wire.requests import JobInfo
from minishuffle.worker.tasks.handoff import TaskBell

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 30.0
Rows = Callable[[int, int], pa.RecordBatch]


class Told:
    """A coordinator that says in turn what became of the job, and of a new attempt."""

    cluster = "local"
    secret = b"secret"
    tls = None

    def __init__(self, state: str, *answers: Any, causes: list[ErrorInfo] | None = None) -> None:
        self.job = JobInfo.model_construct(
            job="j1", name="count", state=state, causes=causes or [], submitted_at=0.0
        )
        self.answers = list(answers)

    def request(self, message: Any, seconds: float = 0.0, *, away_seconds: float = 0.0) -> Any:
        if not isinstance(message, OpenUpstream):
            return self.job
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ShuffleError):
            raise answer
        return answer


def opened(complete: bool = False) -> UpstreamOpened:
    return UpstreamOpened(
        term=1,
        ticket=1,
        job="j1",
        worker=WorkerAddress(worker=1, epoch=1, host="127.0.0.1", data_port=1),
        rows=0,
        checksum=0,
        complete=complete,
        segment_bytes=4096,
    )


def explained(told: Any) -> ShuffleError:
    """What a program hears whose link broke, and which can reach no worker."""
    writer = StreamWriter(
        told, "orders", pa.schema([("n", pa.int64())]), write="w", partition=0, partitions=1, attempt=1
    )
    writer._reply = opened()
    writer._reconnects_left = 2
    with pytest.raises(ShuffleError) as caught:
        writer._reconnect(PeerLost("the link broke"))
    return caught.value


LATE = Superseded("attempt 1 comes too late")


# --- why a link is gone --------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["created", "running"])
def test_a_link_that_broke_while_the_job_goes_on_is_lost_and_may_be_tried_again(state: str) -> None:
    error = explained(Told(state, opened()))
    assert isinstance(error, PeerLost) and "127.0.0.1:1" in str(error)


@pytest.mark.parametrize("state", ["canceling", "canceled", "failing", "failed", "finished"])
def test_the_end_of_the_job_explains_a_link_that_broke(state: str) -> None:
    causes = [ErrorInfo(code=60, text="count[0]: boom")] if state == "failed" else []
    error = explained(Told(state, opened(), causes=causes))
    assert isinstance(error, TaskFailed)
    assert f"job j1 (count) is {state}, and its stream 'orders' is still being written" in str(error)
    assert ("count[0]: boom" in str(error)) == bool(causes)


def test_an_attempt_that_was_superseded_waits_for_the_end_of_the_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "SUPERSEDED_LOOK_SECONDS", 0.0)
    told = Told("running", LATE, LATE, opened(complete=True))
    error = explained(told)
    assert isinstance(error, Superseded) and "another attempt has written the partition" in str(error)
    assert len(told.answers) == 1


def test_an_attempt_that_was_superseded_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SUPERSEDED_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(writing, "SUPERSEDED_SECONDS_MAX", -1.0)
    assert explained(Told("running", LATE)) is LATE


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(UnknownName("no running job"), UnknownName), (PeerLost("it is gone"), PeerLost)],
)
def test_what_the_coordinator_says_instead_is_told(answer: ShuffleError, kind: type[ShuffleError]) -> None:
    assert type(explained(Told("running", answer))) is kind


# --- receipts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_write_is_not_finished_before_the_job_took_it(field: Any, rows: Rows) -> None:
    handle = field.submit(hold=True, parallelism=1)
    # All of it fits into buffers: the program has nothing left to write, and waits for its receipt.
    with ThreadPoolExecutor(1) as pool, field.writer() as writer:
        for step in range(10):
            writer.write(rows(step * 100, 100))
        receipt = pool.submit(writer.finish)
        with pytest.raises(UsageError, match="partitions 0 of the write are not complete"):
            commit_write(field.access, "orders", "w", [0])
        assert not receipt.done()
        field.go()
        assert receipt.result(SECONDS_MAX) == 1000
    commit_write(field.access, "orders", "w", [0])
    assert sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows) == list(range(1000))


def test_a_receipt_is_not_waited_for_longer_than_it_takes(
    field: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes the program: each look at the connection took up to 20 ms."""
    slept: list[bool] = []
    monkeypatch.setattr(
        TaskBell, "wait", lambda bell, seconds: slept.append(not bell._rung.wait(SECONDS_MAX))
    )
    handle = field.submit(hold=True, parallelism=1)
    with ThreadPoolExecutor(1) as pool, field.writer() as writer:
        writer.write(rows(0, 100))
        receipt = pool.submit(writer.finish)
        field.go()
        assert receipt.result(2 * SECONDS_MAX) == 100
    assert slept and not any(slept)
    commit_write(field.access, "orders", "w", [0])
    assert handle.wait(SECONDS_MAX).state == "finished"


def test_a_channel_that_ended_early_is_no_receipt(field: Any, rows: Rows, until: Any) -> None:
    """It ends alone, as by an absurd credit; the worker may then close the connection, or not yet."""
    handle = field.submit(hold=True, parallelism=1)
    with ThreadPoolExecutor(1) as pool, field.writer() as writer:
        writer.write(rows(0, 1000))
        until(lambda: writer._attached, "the request of the worker")
        first = writer._connection
        producers = first.link.connection.producers
        first.run(
            lambda: [producers.on_credit(channel, CREDIT_MAX + 1) for channel in list(producers.channels)]
        )
        assert writer._partition.subpartitions[0].view is None
        receipt = pool.submit(writer.finish)
        field.go()  # a task that waits for it cannot be restarted
        assert receipt.result(2 * SECONDS_MAX) == 1000
        assert writer._connection is not first
    commit_write(field.access, "orders", "w", [0])
    assert sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows) == list(range(1000))


def test_a_commit_that_was_refused_has_ended_nothing(field: Any, rows: Rows) -> None:
    handle = field.submit()
    with field.writer(0, partitions=2) as writer:
        writer.write(rows(0, 10))
        writer.finish()
    with pytest.raises(UsageError, match="partitions 1 of the write are not complete"):
        commit_write(field.access, "orders", "w", [0, 1])
    with field.writer(1, partitions=2) as writer:
        writer.write(rows(10, 10))
        writer.finish()
    commit_write(field.access, "orders", "w", [0, 1])
    assert sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows) == list(range(20))


# --- ends in the middle --------------------------------------------------------------------------


def test_a_writer_that_waits_for_a_job_hears_of_its_cancellation(field: Any, rows: Rows, until: Any) -> None:
    handle = field.submit(hold=True, parallelism=1)
    written = threading.Event()

    def write() -> None:
        with field.writer() as writer:
            writer.write(rows(0, 1000))
            written.set()
            for _ in range(100_000):
                writer.write(rows(0, 1000))

    with ThreadPoolExecutor(1) as pool:
        writes = pool.submit(write)
        assert written.wait(SECONDS_MAX)
        until(lambda: handle.info().state == "running", "the job")
        handle.cancel()
        field.go()
        with pytest.raises(TaskFailed, match=rf"job {handle.id} \(job\) is cancel.*stream 'orders'"):
            writes.result(SECONDS_MAX)


def test_a_writer_whose_link_broke_says_so_again_and_never_gives_a_receipt(
    field: Any, rows: Rows, cut: Any
) -> None:
    field.submit(hold=True, parallelism=1)
    with field.writer() as writer:
        writer.write(rows(0, 1000))
        cut(writer)
        field.go()
        for call in (lambda: writer.write(rows(0, 60_000)), writer.finish):
            with pytest.raises(PeerLost):
                call()


def test_a_ticket_opens_the_door_once(field: Any, stray: Any) -> None:
    field.submit(parallelism=1)
    with field.writer() as writer, pytest.raises(HandshakeRefused, match="is not expected here"):
        stray(field, writer._opened.ticket)

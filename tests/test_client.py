import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from minishuffle import client as client_module
from minishuffle.api.stream import Stream
from minishuffle.client import Client, JobHandle, JobResult
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    RowsLost,
    TaskCancelled,
    TaskFailed,
    UnknownName,
    UsageError,
    WrongColumns,
)
from minishuffle.exchange.elements import pack_rows
from minishuffle.ids import Address
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import ControlMessage, ErrorInfo, WorkerReport
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    CancelSubmission,
    ClusterStatus,
    GetEvents,
    GetRows,
    JobEvent,
    JobEvents,
    JobInfo,
    JobLogs,
    JobRows,
    PauseJob,
    ShowJob,
    SubmitJob,
    TaskInfo,
    WaitJob,
    WaitPause,
    WorkerInfo,
)

Answer = Callable[[ControlMessage], ControlMessage]


class ScriptedLink:
    """Answers requests with a function; counts how many links were opened and closed."""

    answer: Answer
    opened = 0
    closed = 0

    def __init__(self, *_: Any, tls: object) -> None:
        type(self).opened += 1

    def request(self, message: ControlMessage, timeout: float) -> ControlMessage:
        assert timeout > 0
        return type(self).answer(message)

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLink]:
    class Link(ScriptedLink):
        pass

    monkeypatch.setattr(client_module, "BlockingControlClient", Link)
    return Link


def connect() -> Client:
    return Client("127.0.0.1:1", b"s" * 32)


def job(state: str, **fields: Any) -> JobInfo:
    return JobInfo(job="j1", name="words", state=state, submitted_at=10.0, ended_at=12.5, **fields)


def task(index: int, result: Any) -> TaskInfo:
    return TaskInfo(
        operator=1,
        name="count",
        index=index,
        attempt=1,
        state="finished",
        worker=1,
        counters=TaskCounters(records_in=index),
        result=msgpack.packb(result),
    )


def scripted(*replies: ControlMessage) -> Answer:
    left = list(replies)
    return lambda message: left.pop(0)


def test_requests_of_two_threads_wait_for_each_other(link: type[ScriptedLink]) -> None:
    """Each would take the reply to the other's for its own."""
    began, goes_on, asked = threading.Event(), threading.Event(), []

    def answer(message: ControlMessage) -> ControlMessage:
        asked.append(type(message))
        if isinstance(message, ShowJob):
            began.set()
            assert goes_on.wait(10.0)
            return job("running")
        return Accepted()

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    client = connect()
    first = threading.Thread(target=client.request, args=(ShowJob(job="j1"), JobInfo))
    second = threading.Thread(target=client.cancel, args=("j1",))
    first.start()
    assert began.wait(10.0)
    second.start()
    second.join(0.05)
    assert asked == [ShowJob]
    goes_on.set()
    first.join(10.0)
    second.join(10.0)
    assert asked == [ShowJob, CancelJob]


def test_wait_gives_rows_results_and_counters(link: type[ScriptedLink]) -> None:
    def answer(message: ControlMessage) -> ControlMessage:
        match message:
            case WaitJob():
                tasks = [task(0, {"rows": 3}), task(1, 4)]
                return job("finished", tasks=tasks, collects=["x", "y", "none"])
            case GetRows(after=0):
                batches = [pack_rows(rows) for rows in (["a", 1], [("b", 2)], ["c"])]
                return JobRows(batches=batches, next=2, terminal=False, sinks=["x", "y", "x"])
            case GetRows(after=2):
                return JobRows(batches=[], next=2, terminal=True)
        return job("finished")

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    result = connect().handle("j1").wait(timeout=5)
    assert result.rows == ["a", 1, "c", ("b", 2)]
    assert result.collected == {"x": ["a", 1, "c"], "y": [("b", 2)], "none": []}
    assert list(connect().handle("j1").rows(sink="y")) == [("b", 2)]
    assert [(sink.name, sink.index, sink.value) for sink in result.results] == [
        ("count", 0, {"rows": 3}),
        ("count", 1, 4),
    ]
    assert result.tasks[1].counters.records_in == 1
    assert result.seconds == 2.5


def test_late_records_are_warned_of_and_counted(
    link: type[ScriptedLink], caplog: pytest.LogCaptureFixture
) -> None:
    counters = TaskCounters(records_late=2, late_dropped=2, user_errors={"skip": 5})
    task = TaskInfo(
        operator=0, name="window", index=0, attempt=1, state="finished", worker=1, counters=counters
    )

    def answer(message: ControlMessage) -> ControlMessage:
        if isinstance(message, GetRows):
            return JobRows(batches=[pack_rows(["a", "b"])] * (message.after == 0), next=1, terminal=True)
        return job("finished").model_copy(update={"tasks": [task], "files_listed": 3})

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    result = connect().handle("j1").wait(timeout=5)
    assert (result.left_out["late"], result.left_out["skipped"], result.left_out["dropped"]) == (2, 5, 0)
    assert repr(result).endswith("rows={'collect': 2}, files=3, left_out={'late': 2, 'skipped': 5})")
    connect().handle("j1").wait(timeout=5, warn=False)
    (warned,) = caplog.messages
    assert "2 records came too late and were dropped: raise out_of_order=" in warned


def test_the_first_failure_is_warned_of_while_the_job_goes_on(
    link: type[ScriptedLink], caplog: pytest.LogCaptureFixture
) -> None:
    failure = JobEvent(
        number=1, at=0.0, kind="task failed", text="map[0]: KeyError: 'a'", traceback="File x\n"
    )
    states, asked = ["running", "running", "running", "finished"], list[float]()

    def answer(message: ControlMessage) -> ControlMessage:
        if not isinstance(message, WaitJob):
            return job("running")
        asked.append(message.wait_seconds)
        return job(states[len(asked) - 1]).model_copy(update={"first_failure": failure})

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    assert connect().handle("j1").wait_until_over().state == "finished"
    assert asked == [1.0, 2.0, 4.0, 5.0]
    assert caplog.messages == ["job j1 (words) restarts a task and goes on: map[0]: KeyError: 'a'\nFile x"]


BATCH = pa.record_batch({"k": [1, None]})


def ended(**batches: list[Any]) -> JobResult:
    return JobResult("j1", "words", "finished", [], [], 1.0, batches)


def test_columns_stay_columns_until_rows_are_asked_for() -> None:
    result = ended(collect=[BATCH, BATCH], rows=[[1]])
    assert result.table().equals(pa.Table.from_batches([BATCH, BATCH]))
    assert result.to_pandas()["k"].sum() == 2
    assert result.to_polars()["k"].to_list() == [1, None, 1, None]
    assert result.rows == [{"k": 1}, {"k": None}] * 2 + [1]


@pytest.mark.parametrize("name", ["rows", "none"])
def test_rows_of_a_stream_are_no_table(name: str) -> None:
    with pytest.raises(UsageError, match=rf"'{name}' is one of a stream.*call to_table\(\) before collect"):
        ended(rows=[[{"k": 1}]], none=[]).table(name)


def test_a_sink_that_is_not_there_is_named_with_those_that_are() -> None:
    assert ended(late=[BATCH]).table().num_rows == 2
    with pytest.raises(UnknownName, match="no collect sink 'collect': it has 'late', 'rest'"):
        ended(late=[BATCH], rest=[BATCH]).table()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_what_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minishuffle.client.find_spec", {}.get)
    with pytest.raises(UsageError, match=rf"needs the package {package}.*pip install {package}"):
        getattr(ended(collect=[BATCH]), f"to_{package}")()


def test_rows_of_a_coordinator_that_names_no_sinks_are_those_of_its_one(link: type[ScriptedLink]) -> None:
    def answer(message: ControlMessage) -> ControlMessage:
        match message:
            case GetRows(after=0):
                return JobRows(batches=[pack_rows([1]), pack_rows([2])], next=2, terminal=False)
            case GetRows(after=2):
                return JobRows(batches=[], next=2, terminal=True)
        return job("finished")

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    assert connect().handle("j1").wait(timeout=5).collected == {"collect": [1, 2]}


def test_rows_wait_with_a_long_poll_and_not_with_a_sleep(
    link: type[ScriptedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GetRows] = []
    replies = scripted(
        JobRows(batches=[], next=0, terminal=False),
        JobRows(batches=[pack_rows([1])], next=1, terminal=False, sinks=["collect"]),
        JobRows(batches=[], next=1, terminal=True),
    )

    def answer(message: ControlMessage) -> ControlMessage:
        if isinstance(message, ShowJob):
            return job("finished")
        assert isinstance(message, GetRows)
        asked.append(message)
        return replies(message)

    def no_sleep(seconds: float) -> None:
        raise AssertionError("a client that waits for rows polls")

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    monkeypatch.setattr(time, "sleep", no_sleep)
    assert list(JobHandle(connect(), "j1", "words", 1).rows()) == [1]
    assert [message.after for message in asked] == [0, 0, 1]
    assert all(message.wait_seconds > 0 for message in asked)


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[31m", "x" * 129, None])
def test_a_name_that_cannot_be_shown_is_refused_before_anything_is_asked(
    link: type[ScriptedLink], name: Any
) -> None:
    with pytest.raises(UsageError, match="a job's name has 1 to 128 bytes, all printable, not"):
        connect().submit(Stream.items([1]).collect(), name=name)
    assert link.opened == 0


@pytest.mark.parametrize("given", [{"drop_state": ["count"]}, {"trust_snapshot": True}])
def test_what_is_of_a_savepoint_is_refused_without_one(link: type[ScriptedLink], given: Any) -> None:
    with pytest.raises(UsageError, match="drop_state and trust_snapshot go with restore_from"):
        connect().submit(Stream.items([1]).collect(), parallelism=1, **given)
    assert link.opened == 0


def test_a_failed_job_raises_its_first_cause_with_the_users_traceback(link: type[ScriptedLink]) -> None:
    causes = [
        ErrorInfo(
            code=60, text="ValueError: no", traceback="Traceback\n  in f\nValueError: no\n", task="map[1]"
        ),
        ErrorInfo(code=40, text="then the connection went"),
    ]
    link.answer = staticmethod(lambda message: job("failed", causes=causes))  # type: ignore[assignment]
    with pytest.raises(TaskFailed) as caught:
        connect().handle("j1").wait()
    assert str(caught.value).splitlines() == [
        "job j1 (words) failed: map[1]: ValueError: no",
        "Traceback",
        "  in f",
        "ValueError: no",
    ]


def test_a_job_that_failed_at_a_limit_names_it_under_the_first_cause(link: type[ScriptedLink]) -> None:
    causes = [
        ErrorInfo(code=17, text="ValueError: no", task="map[1]"),
        ErrorInfo(code=40, text="then the connection went"),
        ErrorInfo(code=50, text="map[1] failed 10 times within 300 s", task="map[1]"),
    ]
    link.answer = staticmethod(lambda message: job("failed", causes=causes))  # type: ignore[assignment]
    with pytest.raises(TaskFailed) as caught:
        connect().handle("j1").wait()
    assert str(caught.value).splitlines() == [
        "job j1 (words) failed: map[1]: ValueError: no",
        "map[1] failed 10 times within 300 s",
    ]
    assert caught.value.number == WrongColumns.number
    assert caught.value.__notes__ == [f"(minishuffle explain {WrongColumns.number})"]


FAILED = JobEvent(
    number=1, at=0.0, kind="task failed", text="map[1]: ValueError: no", traceback="own frame\n"
)


def lossy(message: ControlMessage) -> ControlMessage:
    """The answers about a job that lost rows."""
    if isinstance(message, GetEvents):
        return JobEvents(events=[FAILED], terminal=True)
    if isinstance(message, GetRows):
        batches = [pack_rows([1, 2])] if message.after == 0 else []
        return JobRows(batches=batches, next=1, terminal=True, sinks=["collect"] * len(batches))
    return job(
        "finished_with_loss",
        restarts={"lost": 2},
        rows_dropped={"failed_batch": 3, "late": 1},
        first_failure=FAILED,
    )


def test_a_job_that_lost_rows_raises_unless_that_is_allowed(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(lossy)  # type: ignore[assignment]
    handle = connect().handle("j1")
    with pytest.raises(RowsLost) as caught:
        handle.wait()
    assert str(caught.value) == (
        "job j1 (words) finished, but rows were lost in 2 restarts, the first after: map[1]: ValueError: "
        "no; lost: 3 in batches that failed, 1 late; see job.events(). Its results are given out with "
        "allow_loss=True\nown frame"
    )
    result = handle.wait(allow_loss=True)
    assert (result.state, result.rows) == ("finished_with_loss", [1, 2])


def test_rows_of_a_job_that_lost_some_are_given_before_it_raises(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(lossy)  # type: ignore[assignment]
    handle = connect().handle("j1")
    rows = handle.rows()
    assert [next(rows), next(rows)] == [1, 2]
    with pytest.raises(RowsLost):
        next(rows)
    assert list(handle.rows(allow_loss=True)) == [1, 2]


def test_rows_lost_by_a_suspicion_name_it_and_the_setting(link: type[ScriptedLink]) -> None:
    said = "worker 2 gets no answer from worker 1"
    suspected = JobEvent(number=1, at=0.0, kind="worker suspected", text=said)

    def answer(message: ControlMessage) -> ControlMessage:
        return (
            JobEvents(events=[suspected], terminal=True) if isinstance(message, GetEvents) else lossy(message)
        )

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    with pytest.raises(
        RowsLost, match=f"{said}, which may have been slow and not dead .raise suspect_after"
    ) as caught:
        connect().handle("j1").wait()
    assert str(caught.value).endswith("=True\nmap[1]: ValueError: no\nown frame"), "a failure that came later"


@pytest.mark.parametrize(("state", "error"), [("failed", TaskFailed), ("canceled", TaskCancelled)])
def test_rows_of_a_job_that_did_not_finish_end_with_its_error(
    link: type[ScriptedLink], state: str, error: type[Exception]
) -> None:
    def answer(message: ControlMessage) -> ControlMessage:
        if isinstance(message, GetRows):
            batches = [pack_rows([1])] if message.after == 0 else []
            return JobRows(batches=batches, next=1, terminal=True, sinks=["collect"] * len(batches))
        return job(state)

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    rows = iter(connect().handle("j1"))
    assert next(rows) == 1
    with pytest.raises(error, match="j1"):
        next(rows)


def test_a_cancelled_job_raises(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(lambda message: job("canceled"))  # type: ignore[assignment]
    with pytest.raises(TaskCancelled, match="j1"):
        connect().handle("j1").wait()


def test_a_wait_that_is_too_short_says_what_the_job_does(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(lambda message: job("running"))  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match=r"job j1 \(words\) is still running after 0.0 s"):
        connect().handle("j1").wait(timeout=0.0)


def test_an_error_reply_keeps_the_connection_and_a_broken_one_is_replaced(link: type[ScriptedLink]) -> None:
    def refuse(message: ControlMessage) -> ControlMessage:
        raise UnknownName("there is no job j9")

    def lose(message: ControlMessage) -> ControlMessage:
        raise PeerLost("gone")

    client = connect()
    link.answer = staticmethod(refuse)  # type: ignore[assignment]
    with pytest.raises(UnknownName):
        client.job("j9")
    assert (link.opened, link.closed) == (1, 0)
    link.answer = staticmethod(lose)  # type: ignore[assignment]
    with pytest.raises(PeerLost):
        client.job("j1")
    assert (link.opened, link.closed) == (1, 1)
    link.answer = staticmethod(lambda message: job("running"))  # type: ignore[assignment]
    assert client.job("j1").state == "running"
    assert link.opened == 2


def test_an_interrupted_request_leaves_no_reply_behind(link: type[ScriptedLink]) -> None:
    def interrupt(message: ControlMessage) -> ControlMessage:
        if isinstance(message, CancelJob):
            return Accepted()
        raise KeyboardInterrupt

    link.answer = staticmethod(interrupt)  # type: ignore[assignment]
    client = connect()
    with pytest.raises(KeyboardInterrupt):
        client.job("j1")
    client.cancel("j1")
    assert (link.opened, link.closed) == (2, 1)


def test_what_may_be_forgotten_is_logged(link: type[ScriptedLink], caplog: pytest.LogCaptureFixture) -> None:
    link.answer = staticmethod(lambda message: Accepted(job="j1", warning="the disk is full"))  # type: ignore[assignment]
    connect().cancel("j1")
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("minishuffle.client", "the disk is full")
    ]


@pytest.mark.parametrize(
    ("end", "problem", "why"),
    [
        ("paused", "", ""),
        ("none", "read[0] is slow", "read[0] is slow"),
        ("none", "", "it was paused, and somebody has resumed it"),
    ],
)
def test_a_pause_is_waited_for_and_its_failure_raises(
    link: type[ScriptedLink], end: str, problem: str, why: str
) -> None:
    phases = iter(["wanted", "aligning", end])

    def answer(message: ControlMessage) -> ControlMessage:
        if isinstance(message, PauseJob):
            return Accepted(job="j1")
        assert isinstance(message, WaitPause)
        return job("running").model_copy(update={"pause": next(phases), "pause_problem": problem})

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    if end == "paused":
        assert connect().pause("j1").pause == "paused"
    else:
        with pytest.raises(UsageError, match=rf"is not paused: {re.escape(why)}$"):
            connect().pause("j1")
    assert next(phases, None) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost("no answer in time")])
def test_a_submission_whose_answer_does_not_come_is_cancelled_by_its_id(
    link: type[ScriptedLink], error: BaseException
) -> None:
    asked: list[ControlMessage] = []

    def answer(message: ControlMessage) -> ControlMessage:
        asked.append(message)
        if isinstance(message, SubmitJob):
            raise error
        return Accepted(job="j1")

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        connect().submit(Stream.items([1]).collect(), parallelism=1)
    submitted, cancelled = asked
    assert isinstance(submitted, SubmitJob) and len(submitted.submission) >= 16
    assert cancelled == CancelSubmission(submission=submitted.submission)
    assert (link.opened, link.closed) == (2, 1), "over a new connection: the old one may still answer"


def test_the_default_parallelism_is_the_number_of_workers_that_admit_jobs(link: type[ScriptedLink]) -> None:
    graphs: list[JobGraph] = []
    workers = [(1, "alive", False), (2, "alive", True), (3, "lost", False), (4, "alive", False)]
    status = ClusterStatus(
        cluster="c",
        version="0",
        term=1,
        pid=1,
        web_port=0,
        workers=[
            WorkerInfo(
                worker=number,
                epoch=number,
                state=state,
                host="h",
                pid=1,
                data_port=1,
                metrics_port=1,
                slots=1,
                slots_free=1,
                standby=standby,
                heartbeat_age_seconds=0.0,
                report=WorkerReport(),
                peers=[],
            )
            for number, state, standby in workers
        ],
        jobs=[],
    )

    def answer(message: ControlMessage) -> ControlMessage:
        if isinstance(message, SubmitJob):
            graphs.append(JobGraph.from_bytes(message.graph))
            return Accepted(job="j1")
        return status

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    assert connect().submit(Stream.items([1]).rebalance().to_count()).parallelism == 2
    assert graphs[0].slots_needed == 2


def test_a_submission_that_is_refused_needs_no_cancel(link: type[ScriptedLink]) -> None:
    asked: list[ControlMessage] = []

    def answer(message: ControlMessage) -> ControlMessage:
        asked.append(message)
        raise ResourceExhausted("not enough slots")

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    with pytest.raises(ResourceExhausted, match="not enough slots"):
        connect().submit(Stream.items([1]).collect(), parallelism=1)
    assert len(asked) == 1


def test_a_reply_of_another_kind_is_a_protocol_error(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(lambda message: Accepted())  # type: ignore[assignment]
    with pytest.raises(RemoteProtocolError, match="answered ShowJob with Accepted"):
        connect().job("j1")


def test_nobody_listening_suggests_to_start_a_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        PeerLost, match=rf"cannot connect to 127.0.0.1:{port}: .*cluster up.*coordinator start.*--coordinator"
    ) as raised:
        Client(f"127.0.0.1:{port}", b"s" * 32).status()
    assert str(raised.value).count("--coordinator") == 1


def test_a_coordinator_that_turns_its_clients_away_is_not_to_be_started_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn_away() -> None:
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=turn_away)
        thread.start()
        with pytest.raises(PeerLost, match="accepted the connection and closed it before") as raised:
            Client(f"127.0.0.1:{server.getsockname()[1]}", b"s" * 32).status()
        thread.join(10)
    assert "it has too many connections at the moment" in str(raised.value)
    assert "cluster up" not in str(raised.value)


def test_a_coordinator_that_says_nothing_is_not_to_be_started_again() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PeerLost, match=r"accepted the connection and did not answer within 0\.05 s") as raised,
    ):
        Client(f"127.0.0.1:{server.getsockname()[1]}", b"s" * 32, timeout=0.05).status()
    assert "cluster up" not in str(raised.value)


def test_following_events_asks_on_from_the_last_one_until_the_job_is_over(link: type[ScriptedLink]) -> None:
    asked: list[GetEvents] = []
    first, second = (JobEvent(number=n, at=1.0, kind="task", text=str(n)) for n in (4, 7))
    replies = scripted(
        JobEvents(events=[first], terminal=False),
        JobEvents(events=[], terminal=False),
        JobEvents(events=[second], terminal=True),
        JobEvents(events=[], terminal=True),
    )

    def answer(message: ControlMessage) -> ControlMessage:
        assert isinstance(message, GetEvents)
        asked.append(message)
        return replies(message)

    link.answer = staticmethod(answer)  # type: ignore[assignment]
    assert [event.text for event in connect().events("j1", follow=True)] == ["4", "7"]
    assert [message.after for message in asked] == [0, 4, 4, 7]
    assert all(message.wait_seconds > 0 for message in asked)


def test_logs_without_follow_end_with_what_there_is(link: type[ScriptedLink]) -> None:
    link.answer = staticmethod(  # type: ignore[assignment]
        scripted(
            JobLogs(lines=["a", "b"], next=2, terminal=False),
            JobLogs(lines=[], next=2, terminal=False),
        )
    )
    assert list(connect().logs("j1")) == ["a", "b"]


@pytest.mark.parametrize(
    ("worker", "timeout", "error", "text"),
    [
        (0, None, UnknownName, "there is no worker 0: workers have numbers from 1 on"),
        (1 << 70, None, UnknownName, "there is no worker 1180591620717411303424"),
        (1, -1.0, UsageError, "a timeout of -1.0 s: give a number from 0 on, or None"),
        (1, float("nan"), UsageError, "a timeout of nan s"),
        (1, float("inf"), UsageError, "a timeout of inf s"),
    ],
)
def test_what_no_drain_can_mean_is_refused_before_anything_is_asked(
    worker: int, timeout: float | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        Client("127.0.0.1:1", b"s" * 32).drain(worker, timeout)


def test_show_asks_for_that_job(link: type[ScriptedLink]) -> None:
    asked: list[ControlMessage] = []
    link.answer = staticmethod(lambda message: (asked.append(message), job("running"))[1])  # type: ignore
    connect().job("j1")
    assert asked == [ShowJob(job="j1")]


def test_whoever_waits_asks_again_when_the_coordinator_is_back_and_not_for_ever(
    link: type[ScriptedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("minishuffle.client.time.monotonic", lambda: now)
    monkeypatch.setattr("minishuffle.client.time.sleep", sleep)
    asked: list[float] = []

    def answer(message: ControlMessage) -> ControlMessage:
        asked.append(now)
        if now < 102.0:
            raise PeerLost("the coordinator closed the connection")
        return job("finished")

    link.answer = staticmethod(answer)
    elsewhere = Address("127.0.0.1", 7)
    client = Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=5.0, find=lambda: elsewhere)
    assert JobHandle(client, "j1", "words", 1).wait_until_over().state == "finished"
    assert len(asked) > 5 and client.address == elsewhere
    now = 0.0
    with pytest.raises(PeerLost):
        JobHandle(Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=1.0), "j1", "words", 1).wait_until_over()
    assert now == pytest.approx(1.0, abs=0.2)
    client = Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=60.0)
    now = 0.0
    with pytest.raises(PeerLost):
        JobHandle(client, "j1", "words", 1).wait_until_over(timeout=2.0)
    assert now == pytest.approx(2.0, abs=0.2), "no longer than it was to wait"


def test_who_was_connected_asks_again_and_who_was_not_hears_at_once(
    link: type[ScriptedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.client.time.sleep", lambda seconds: None)
    away = 0

    def answer(message: ControlMessage) -> ControlMessage:
        nonlocal away
        if away:
            away -= 1
            raise PeerLost("the coordinator closed the connection")
        return job("running")

    link.answer = staticmethod(answer)
    client = Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=60.0)
    client.job("j1")
    away = 3
    assert client.job("j1").state == "running" and away == 0
    away = 1
    with pytest.raises(PeerLost):
        Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=60.0).job("j1")


def test_pause_resume_and_cancel_outlast_a_coordinator_that_restarts(
    link: type[ScriptedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.client.time.sleep", lambda seconds: None)
    asked: list[str] = []
    lost: dict[str, int] = {}
    pause = "none"

    def answer(message: ControlMessage) -> ControlMessage:
        nonlocal pause
        name = type(message).__name__
        asked.append(name)
        if name == "PauseJob":
            pause = "paused"
        if name == "ResumeJob" and lost.get(name) != 2:
            pause = "none"
        if lost.get(name):
            lost[name] -= 1
            raise PeerLost("the coordinator closed the connection")
        state: Any = {"pause": pause}
        return Accepted(job="j1") if name.endswith("Job") and name != "ShowJob" else job("running", **state)

    link.answer = staticmethod(answer)
    client = Client("127.0.0.1:1", b"s" * 32, reconnect_timeout=60.0)
    client.job("j1")
    lost = {"PauseJob": 2, "CancelJob": 1, "ResumeJob": 2}
    assert client.pause("j1").pause == "paused"
    asked.clear()
    client.resume("j1")
    assert asked == ["ResumeJob", "ShowJob", "ResumeJob", "ResumeJob"], "the first was lost before it did it"
    pause, lost["ResumeJob"] = "paused", 1
    asked.clear()
    client.resume("j1")
    assert asked == ["ResumeJob", "ShowJob"], "the coordinator did it, and was gone before it said so"
    client.cancel("j1")
    assert not any(lost.values())


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the secret has 31 characters, .*openssl rand -hex 32 > FILE"):
        Client("127.0.0.1:1", b"s" * 31)

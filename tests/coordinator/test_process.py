"""The coordinator process over real loopback sockets, on both event loops, with fake workers."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from shutil import copyfile
from types import MappingProxyType
from typing import Any

import pytest
import uvloop

from minishuffle import limits
from minishuffle.config import ClusterSettings, read_coordinator
from minishuffle.coordinator.journal import store
from minishuffle.coordinator.journal.codec import FORMAT
from minishuffle.coordinator.journal.store import CoordinatorJournal, JournalLost
from minishuffle.coordinator.process import Coordinator, run_coordinator
from minishuffle.errors import AuthenticationError, ResourceExhausted, ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address, AttemptId, Changes, RecordKey
from minishuffle.plan.graph import JobGraph
from minishuffle.transport.admission import REFUSAL_LINES
from minishuffle.transport.control import ControlLink, connect_control
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Acknowledge,
    CancelTasks,
    ControlMessage,
    DeployTasks,
    ReleaseJob,
    Shutdown,
    WorkerLost,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, Collected, TaskStateChanged
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    ClusterStatus,
    Failure,
    GetEvents,
    GetRows,
    GetStatus,
    JobEvents,
    JobInfo,
    JobRows,
    ShowJob,
    StopCluster,
    SubmitJob,
    WaitJob,
)
from support.waiting import comes_true

SECRET = b"the secret of this cluster"
SECONDS_MAX = 20.0
JOURNALS = Path(__file__).parent / "journal" / "journals"
FORMATS = {int(path.stem.split("-")[1]): path for path in JOURNALS.glob("*.sqlite")}
"""Journals that releases wrote, by their format."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one of the loops, for a bounded time."""

    def bounded(main: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, SECONDS_MAX))

    return bounded


class Web:
    """Stands for the metrics server."""

    def __init__(self) -> None:
        self.port = 4711
        self.closed = False
        self.coordinator: Coordinator

    async def start(self, coordinator: Coordinator, port: int) -> Web:
        self.coordinator = coordinator
        return self

    async def close(self) -> None:
        self.closed = True


async def run_one(
    state_dir: Path,
    settings: ClusterSettings | None = None,
    web: Web | None = None,
    port: int = 0,
    **fields: Any,
) -> None:
    """``run_coordinator``, by default of one that nobody stops."""
    fixed = {
        "cluster": "blue",
        "host": "127.0.0.1",
        "secret": SECRET,
        "web_port": 0,
        "ready": lambda info: None,
    }
    fixed |= {"stop": asyncio.Event(), "leave": asyncio.Event(), "web": (web or Web()).start}
    await run_coordinator(settings or ClusterSettings(), state_dir=state_dir, port=port, **fixed | fields)


class Running:
    """A coordinator that runs as a task of this loop."""

    def __init__(self, state_dir: Path, **settings: Any) -> None:
        self.stop = asyncio.Event()
        self.leave = asyncio.Event()
        self.web = Web()
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            run_one(
                state_dir,
                ClusterSettings(**settings),
                self.web,
                ready=self.ready.set_result,
                stop=self.stop,
                leave=self.leave,
            )
        )

    async def link(self, role: Role, worker: int = 0, secret: bytes = SECRET) -> Peer:
        address = Address("127.0.0.1", (await self.ready)["port"])
        return Peer(await connect_control(address, Identity(role, "blue", worker, 0), secret, timeout=5.0))


class Peer:
    """The other end of a control link: a fake worker or a client."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._inbox: asyncio.Queue[tuple[ControlMessage, int]] = asyncio.Queue()
        self._requests = 0
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        link.start(
            lambda message, request: self._inbox.put_nowait((message, request)), self.closed.set_result
        )

    def send(self, message: ControlMessage, request: int = 0) -> None:
        self._link.send(message, request)

    def close(self) -> None:
        self._link.close()

    async def receive(self, kind: type[ControlMessage]) -> Any:
        """The next message, which has to be of that kind."""
        message, _ = await self._inbox.get()
        assert isinstance(message, kind), message
        return message

    async def next(self) -> ControlMessage:
        return (await self._inbox.get())[0]

    def unread(self) -> list[tuple[ControlMessage, int]]:
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    async def request(self, message: ControlMessage, kind: type[ControlMessage]) -> Any:
        self._requests += 1
        self.send(message, self._requests)
        reply, number = await self._inbox.get()
        assert number == self._requests and isinstance(reply, kind), reply
        return reply

    async def register(self, **fields: Any) -> Registered:
        self.introduce(**fields)
        registered: Registered = await self.receive(Registered)
        return registered

    def introduce(self, **fields: Any) -> None:
        about = {
            "host": "127.0.0.1",
            "data_port": 5001,
            "metrics_port": 6001,
            "pid": 42,
            "slots": 2,
            "python": PYTHON,
            "segments": 100,
            "segment_bytes": 32768,
        }
        self.send(Register(**(about | fields)))  # type: ignore[arg-type]

    def report(self, deploy: DeployTasks, state: Any) -> None:
        for task in deploy.tasks:
            attempt = AttemptId.of(deploy.job, task.operator, task.index, task.attempt)
            changed = TaskStateChanged(attempt=attempt, state=state)
            self.send(AttemptReport(term=deploy.term, facts=[changed]))


@asynccontextmanager
async def coordinator(state_dir: Path, **settings: Any) -> AsyncIterator[Running]:
    running = Running(state_dir, **settings)
    try:
        yield running
    finally:
        running.stop.set()
        await running.task
    assert running.web.closed


def submission(graph: JobGraph) -> SubmitJob:
    return SubmitJob(name="words", python=PYTHON, graph=graph.to_bytes())


def test_a_job_is_deployed_and_followed_to_its_end(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph]
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            registered = await worker.register()
            assert (registered.worker, registered.epoch, registered.term) == (1, 1, 1)
            accepted = await client.request(submission(make_graph()), Accepted)
            deploy = await worker.receive(DeployTasks)
            assert (deploy.job, len(deploy.tasks)) == (accepted.job, 4) == ("j1", 4)
            worker.report(deploy, "running")
            waiting = asyncio.create_task(client.request(WaitJob(job="j1", wait_seconds=10.0), JobInfo))
            worker.report(deploy, "finished")
            info = await waiting
            assert (info.state, info.ended_at >= info.submitted_at > 1.7e9) == ("finished", True)
            assert (await worker.receive(ReleaseJob)).job == "j1"
            status = await client.request(GetStatus(), ClusterStatus)
            assert (status.cluster, status.web_port, status.term) == ("blue", 4711, 1)
            assert [(w.state, w.pid, w.slots_free) for w in status.workers] == [("alive", 42, 2)]
            assert running.web.coordinator.snapshot().slots == {"used": 0, "free": 2, "standby": 0}
            worker.close()

    run(main())


def test_a_wait_is_answered_at_its_deadline(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph]
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path, task_cancel_timeout=0.1) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register()
            await client.request(submission(make_graph()), Accepted)
            info = await client.request(WaitJob(job="j1", wait_seconds=0.05), JobInfo)
            assert info.state == "created"
            worker.close()

    run(main())


def test_a_killed_worker_is_lost_and_a_silent_one_cut_off(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path, heartbeat_interval=0.05, heartbeat_timeout=1.0) as running:
            killed, silent = await running.link(Role.WORKER), await running.link(Role.WORKER, 7)
            await killed.register()
            assert (await silent.register(requested_worker=7)).worker == 7
            killed.close()
            assert (await silent.receive(WorkerLost)).worker == 1
            verdict = await silent.receive(WorkerLost)
            assert (verdict.worker, verdict.reason) == (7, "it was silent for 1 s")
            assert await silent.closed is None
            client = await running.link(Role.CLIENT)
            status = await client.request(GetStatus(), ClusterStatus)
            assert [(w.worker, w.state) for w in status.workers] == [(1, "lost"), (7, "lost")]

    run(main())


@asynccontextmanager
async def process_that_listens() -> AsyncIterator[tuple[int, asyncio.Server, list[asyncio.StreamWriter]]]:
    """Its port, and who has connected there: the data port of a worker that lives."""
    connected: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connected.append(writer), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], server, connected
    finally:
        server.close()
        for writer in connected:
            writer.transport.abort()
        await asyncio.sleep(0)


def refused(running: Running) -> dict[str, int]:
    return running.web.coordinator.snapshot().connections_refused


async def seen(running: Running, state: str) -> None:
    """Wait until the only worker is in that state."""
    await comes_true(
        lambda: [each.state for each in running.web.coordinator.snapshot().workers] == [state],
        f"that the worker is {state}",
    )


def test_a_worker_whose_process_listens_is_awaited_when_its_link_closes(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running, process_that_listens() as (port, _, connected):
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            registered = await worker.register(data_port=port)
            worker.close()
            await seen(running, "awaited")
            await comes_true(lambda: connected, "the coordinator's look at the data port")
            again = await running.link(Role.WORKER, worker=1)
            back = await again.register(data_port=port, requested_worker=1, epoch=registered.epoch)
            assert (back.worker, back.epoch) == (1, registered.epoch)
            await seen(running, "alive")
            connected[0].transport.abort()  # the worker's handshake takes no longer
            status = await client.request(GetStatus(), ClusterStatus)
            assert [each.state for each in status.workers] == ["alive"]
            again.close()

    run(main())


def test_a_worker_whose_process_ends_while_it_is_awaited_is_lost_at_once(run: Run, tmp_path: Path) -> None:
    """What it had accepted the kernel resets."""

    async def main() -> None:
        async with (
            coordinator(tmp_path, heartbeat_timeout=2 * SECONDS_MAX) as running,
            process_that_listens() as (port, server, connected),
        ):
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register(data_port=port)
            worker.close()
            await comes_true(lambda: connected, "the coordinator's look at the data port")
            assert (await client.request(GetStatus(), ClusterStatus)).workers[0].state == "awaited"
            server.close()
            connected[0].transport.abort()
            await seen(running, "lost")

    run(main())


def test_a_worker_is_awaited_when_the_look_at_its_port_is_cut_and_lost_when_the_next_is_too(
    run: Run, tmp_path: Path
) -> None:
    """A firewall does the former; the latter may be a proxy which accepts for a process that has ended."""

    async def main() -> None:
        async with (
            coordinator(tmp_path, heartbeat_timeout=2 * SECONDS_MAX) as running,
            process_that_listens() as (port, _, connected),
        ):
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register(data_port=port)
            worker.close()
            await comes_true(lambda: connected, "the coordinator's look at the data port")
            connected[0].transport.abort()
            await comes_true(lambda: len(connected) == 2, "the next look")
            assert (await client.request(GetStatus(), ClusterStatus)).workers[0].state == "awaited"
            connected[1].transport.abort()
            await seen(running, "lost")

    run(main())


def test_a_worker_that_sends_garbage_is_lost_although_its_process_listens(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        settings = {"heartbeat_timeout": 2 * SECONDS_MAX}
        async with coordinator(tmp_path, **settings) as running, process_that_listens() as (port, *_):
            worker = await running.link(Role.WORKER)
            await worker.register(data_port=port)
            worker._link._transport.write(b"\xff" * 64)
            await seen(running, "lost")

    run(main())


def test_a_refused_worker_is_told_why(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            worker = await running.link(Role.WORKER)
            worker.introduce(python="2.7")
            failure = await worker.receive(Failure)
            assert failure.code == UsageError.code
            assert failure.text.startswith("the worker runs Python 2.7, this cluster runs Python ")
            assert await worker.closed is None

    run(main())


def test_a_wrong_secret_is_refused_and_counted(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            with pytest.raises(AuthenticationError):
                await running.link(Role.CLIENT, secret=b"a guess")
            with pytest.raises(AuthenticationError, match="only workers and clients"):
                await running.link(Role.COORDINATOR)
            # The refused peer hears of it before the coordinator has read its farewell.
            expected = {"secret": 1, "peer": 1}
            await comes_true(lambda: refused(running) == expected, "the count of both refusals")

    run(main())


def test_refusals_are_counted_and_logged_at_a_bounded_rate(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            for _ in range(20):
                with pytest.raises(AuthenticationError):
                    await running.link(Role.CLIENT, secret=b"a guess")
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            worker.introduce(python="2.7")
            await worker.receive(Failure)
            client.send(Shutdown(term=1, reason=""))
            await worker.closed
            await client.closed
            expected = {"secret": 20, "peer": 1, "malformed": 1}
            await comes_true(lambda: refused(running) == expected, "the count of all refusals")
            lines = [line for line in caplog.messages if "refused" in line]
            assert len(lines) == REFUSAL_LINES

    run(main())


def test_a_stop_cancels_jobs_and_sends_workers_home(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph]
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register()
            await client.request(submission(make_graph()), Accepted)
            deploy = await worker.receive(DeployTasks)
            await client.request(StopCluster(), Accepted)
            assert (await worker.receive(CancelTasks)).job == "j1"
            worker.report(deploy, "canceled")
            await worker.receive(ReleaseJob)
            await worker.receive(Shutdown)
            worker.close()
            await running.task
            assert await client.closed is None

    run(main())


def test_one_that_leaves_ends_no_job_and_no_worker_and_says_that_it_has_handed_over(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            registered = await worker.register()
            await client.request(submission(make_graph(1, 1)), Accepted)
            deploy = await worker.receive(DeployTasks)
            worker.report(deploy, "running")
            rows = Collected(attempt=AttemptId.of("j1", 1, 0, 1), payload=b"rows")
            worker.send(AttemptReport(term=1, number=3, facts=[rows]))
            await comes_true(lambda: _collected(running) == 1, "the rows to be there")
            before = read_coordinator(tmp_path)
            assert before is not None and not before.handed_over
            running.leave.set()
            await running.task
            assert await worker.closed is None and await client.closed is None
            assert {type(each) for each, _ in worker.unread()} <= {Acknowledge}, "no order to end"
            assert read_coordinator(tmp_path) == before._replace(handed_over=True)
            assert "handed over: workers (1) and jobs (1) run on, and wait for the next" in caplog.text
        async with coordinator(tmp_path) as running:
            client, worker = await running.link(Role.CLIENT), await running.link(Role.WORKER, worker=1)
            held = [AttemptId.of("j1", task.operator, task.index, task.attempt) for task in deploy.tasks]
            fields = {"requested_worker": 1, "epoch": registered.epoch, "attempts": held, "jobs": ["j1"]}
            back = await worker.register(**fields)
            assert (back.epoch, back.term, back.applied) == (registered.epoch, 2, 3)
            assert (await client.request(GetRows(job="j1", after=0), JobRows)).batches == [b"rows"]
            info = await client.request(ShowJob(job="j1"), JobInfo)
            assert [(each.state, each.attempt) for each in info.tasks] == [("running", 1)] * 2
            await client.request(StopCluster(), Accepted)
            assert (await worker.receive(CancelTasks)).job == "j1"
            worker.report(deploy.model_copy(update={"term": 2}), "canceled")
            running.leave.set()  # Too late: it has an order.
            while not isinstance((await worker.next()), Shutdown):
                pass
            worker.close()
            await running.task
            assert read_coordinator(tmp_path) is None

    run(main())


def _collected(running: Running) -> int:
    return sum(job.history.batches for job in running.web.coordinator.look()[0])


def test_one_that_leaves_and_cannot_write_its_journal_says_so_and_does_not_claim_to_have_handed_over(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WRITE_BUSY_SECONDS", 0.02)

    async def main() -> None:
        running = Running(tmp_path)
        worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
        await worker.register()
        await client.request(submission(make_graph(1, 1)), Accepted)
        await worker.receive(DeployTasks)
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            running.leave.set()
            with pytest.raises(ResourceExhausted, match="run on, and the next .* cannot be written"):
                await running.task
        assert await worker.closed is None and await client.closed is None
        place = read_coordinator(tmp_path)
        assert place is not None and not place.handed_over

    run(main())


def test_a_stop_is_bounded_when_a_worker_does_not_answer(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.shutdown.DRAIN_SECONDS", 0.05)
    monkeypatch.setattr("minishuffle.coordinator.shutdown.CLOSING_SECONDS", 0.05)

    async def main() -> None:
        async with coordinator(tmp_path, task_cancel_timeout=0.05) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register()
            await client.request(submission(make_graph()), Accepted)
            await worker.receive(DeployTasks)
            running.stop.set()
            await worker.receive(CancelTasks)
            await worker.receive(Shutdown)
            assert await worker.closed is None
            await running.task

    run(main())


def test_a_second_start_has_a_greater_term_and_goes_on_counting_jobs(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph]
) -> None:
    async def start(term: int, job: str) -> None:
        async with coordinator(tmp_path) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            assert (await worker.register()).term == term
            assert (await client.request(submission(make_graph()), Accepted)).job == job
            worker.close()

    async def main() -> None:
        await start(1, "j1")
        await start(2, "j2")

    run(main())


def test_what_is_too_long_for_the_wire_fails_in_order(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            first, second = await running.link(Role.WORKER), await running.link(Role.WORKER)
            client = await running.link(Role.CLIENT)
            await first.register()
            await second.register()
            request = submission(make_graph(2, 1))
            # Room for the submission and for the second worker's one task, but not for the first's two.
            monkeypatch.setattr(limits, "CONTROL_FRAME_BYTES_MAX", len(request.graph) + 160)
            await client.request(request, Accepted)
            failure = await client.request(ShowJob(job="j1"), Failure)
            assert "too large for the control plane" in failure.text
            monkeypatch.undo()
            deploy = await second.receive(DeployTasks)
            assert (await second.receive(CancelTasks)).job == "j1", "not before what it cancels"
            second.report(deploy, "canceled")
            await second.receive(ReleaseJob)
            info = await client.request(ShowJob(job="j1"), JobInfo)
            assert info.state == "failed"
            assert "deployment on worker 1: DeployTasks of" in info.causes[0].text
            first.close()
            second.close()

    run(main())


def test_a_taken_port_is_an_error_and_nothing_is_left_open(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            port = (await running.ready)["port"]
            with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is taken"):
                await run_one(tmp_path, port=port)

    run(main())


@pytest.mark.parametrize("number", sorted({*FORMATS, FORMAT + 1} - {FORMAT}))
def test_a_journal_of_another_release_is_refused_in_words(run: Run, tmp_path: Path, number: int) -> None:
    """The release before, whose journal is here, or one that nobody knows."""
    if number in FORMATS:
        copyfile(FORMATS[number], tmp_path / store.FILE_NAME)
    else:
        with CoordinatorJournal(tmp_path) as empty:
            empty.write({("job", "j1"): bytes((number,)) + b"\x80"})

    async def main() -> None:
        words = f"is of another release .*it has format {number}, this release reads .*cluster down"
        with pytest.raises(ShuffleError, match=words) as raised:
            await run_one(tmp_path)
        assert str(tmp_path) in str(raised.value)

    run(main())


def test_a_journal_that_cannot_be_written_refuses_the_submission_and_all_else_runs_on(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WRITE_BUSY_SECONDS", 0.02)

    async def main() -> None:
        async with coordinator(tmp_path, heartbeat_timeout=SECONDS_MAX) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register()
            await client.request(submission(make_graph(1, 1)), Accepted)
            deploy = await worker.receive(DeployTasks)
            with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as holder:
                holder.execute("BEGIN IMMEDIATE")
                failure = await client.request(submission(make_graph(1, 1)), Failure)
            assert failure.code == ResourceExhausted.code
            assert failure.text == (
                f"the job cannot be accepted: the journal {tmp_path / 'journal.sqlite'} cannot be written "
                "(database is locked): make room on its disk or see to its permissions, and submit it again"
            )
            worker.report(deploy, "running")
            worker.report(deploy, "finished")
            info = await client.request(WaitJob(job="j1", wait_seconds=10.0), JobInfo)
            assert info.state == "finished"
            await worker.receive(ReleaseJob)
            assert (await client.request(submission(make_graph(1, 1)), Accepted)).job == "j2"
            worker.close()

    run(main())


class SlowStorage:
    """Writes that end when the test says so."""

    term = 1
    records: Mapping[RecordKey, bytes] = MappingProxyType({})

    def __init__(self) -> None:
        self.under_way: list[Callable[[Exception | None], None]] = []
        self.written: list[tuple[Changes, bool]] = []

    def write(self, changes: Changes, done: Callable[[Exception | None], None], *, whole: bool) -> None:
        self.under_way.append(done)
        self.written.append((changes, whole))

    async def begun(self) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not self.under_way:
                await asyncio.sleep(0.01)

    async def end(self, error: Exception | None) -> None:
        await self.begun()
        self.under_way.pop(0)(error)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> SlowStorage:
    monkeypatch.setattr("minishuffle.coordinator.process.TERM_SECONDS", 0.02)
    return SlowStorage()


@asynccontextmanager
async def closed(running: Coordinator) -> AsyncIterator[None]:
    await running.listen("127.0.0.1", 0, SECRET)
    try:
        yield
    finally:
        await running.close()


async def problem(running: Coordinator) -> str:
    status = await running.ask(GetStatus())
    assert isinstance(status, ClusterStatus)
    return status.journal_problem


def test_a_write_that_is_tried_again_holds_nobody_up(run: Run, storage: SlowStorage) -> None:
    full = ResourceExhausted("the disk is slow, and full")

    async def main() -> None:
        running = Coordinator(ClusterSettings(), "test", storage)
        async with closed(running):
            await storage.end(full)
            for _ in range(2):
                await storage.begun()
                assert await problem(running) == str(full)
                await storage.end(full)
            await storage.end(None)
            await storage.end(None)
            assert await problem(running) == ""

    run(main())


def test_a_journal_that_was_lost_gets_all_records(run: Run, storage: SlowStorage) -> None:
    async def main() -> None:
        running = Coordinator(ClusterSettings(), "test", storage)
        async with closed(running):
            await storage.end(None)
            await storage.end(JournalLost("the journal was removed"))
            changes, whole = storage.written[-1]
            assert whole and ("coordinator", "") in changes
            assert await problem(running) == "the journal was removed"
            await storage.end(None)
            await storage.end(None)
            assert await problem(running) == ""
            await storage.begun()
            assert not storage.written[-1][1], "changes again"

    run(main())


def test_the_web_server_asks_as_clients_do(
    run: Run, tmp_path: Path, make_graph: Callable[..., JobGraph]
) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as running:
            worker, client = await running.link(Role.WORKER), await running.link(Role.CLIENT)
            await worker.register()
            await client.request(submission(make_graph(1, 1)), Accepted)
            source = running.web.coordinator
            asked, shown = (
                await source.ask(ShowJob(job="j1")),
                await client.request(ShowJob(job="j1"), JobInfo),
            )
            assert isinstance(asked, JobInfo) and asked.at <= shown.at
            assert asked == shown.model_copy(update={"at": asked.at})
            (job,), (registered,) = source.look()
            assert (job.id, registered.worker) == ("j1", 1)
            with pytest.raises(UnknownName):
                await source.ask(ShowJob(job="j9"))
            events = await source.ask(GetEvents(job="j1"))
            assert isinstance(events, JobEvents)
            assert events.events[0].at <= source.clock
            waiting = asyncio.create_task(
                source.ask(GetEvents(job="j1", after=len(events.events), wait_seconds=SECONDS_MAX))
            )
            cancelled = await source.ask(CancelJob(job="j1"))
            assert cancelled == Accepted(job="j1")
            assert isinstance(await waiting, JobEvents)
            worker.close()  # or its heartbeats are waited for

    run(main())

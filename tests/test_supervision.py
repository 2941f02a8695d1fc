"""Processes that a launcher starts in place of lost ones, with small programs for coordinator and worker."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle import limits, replacements
from minishuffle.backoff import Backoff
from minishuffle.client import Client
from minishuffle.config import CoordinatorPlace, forget_coordinator, write_coordinator
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.launch import Child, LocalProcesses, WorkerLaunch, stop_children
from minishuffle.postmortem import Observation
from minishuffle.supervision import VERDICT_SECONDS, VERDICT_SECONDS_QUIET, Supervisor, how_it_ended
from minishuffle.wire.requests import Accepted, ClusterStatus, GetStatus, WorkerEnded
from support.waiting import until

HOME = Address("127.0.0.1", 1)
WAITS = "import sys; sys.stdin.read()"
DIES = "import os; os.abort()"
READY = "print('{}', flush=True); "
PATIENT = f"import sys; {READY} sys.stdin.read()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY} signal.pause()"


def python(directory: Path, program: str, name: str, ready: dict[str, Any] | None = None) -> Child:
    out, log = directory / f"{name}.out", directory / f"{name}.log"
    line = f"print({json.dumps(ready)!r}, flush=True); " if ready is not None else ""
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", line + program], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
        )
    return Child(name, process, out, log)


class Launch:
    """Starts a program in place of the coordinator; says with which ports."""

    def __init__(self, directory: Path, program: str) -> None:
        self.directory = directory
        self.program = program
        self.children: list[Child] = []
        self.ports: list[tuple[int, int]] = []

    def start(self, port: int, web_port: int) -> Child:
        self.ports.append((port, web_port))
        term = len(self.children) + 1
        write_coordinator(self.directory, CoordinatorPlace(HOME, term))
        child = python(self.directory, self.program, f"coordinator-{term}", {"term": term})
        self.children.append(child)
        return child


class Fixture:
    """A supervisor of one coordinator, which runs a program each time, and of one worker."""

    def __init__(self, directory: Path, program: str) -> None:
        self.launch = Launch(directory, program)
        self.worker = python(directory, WAITS, "worker-1")
        first: Any = self.launch.start(0, 0)
        workers = WorkerLaunch(directory, [], [], "", None, {})
        launch: Any = self.launch
        self.processes = LocalProcesses(HOME, 2, first, {1: self.worker}, workers, launch)
        self.client = Client(HOME, b"s" * 32)
        self.supervisor = Supervisor(self.processes, self.client, workers=False)

    def wait_until_ready(self) -> None:
        """Else nobody asks the coordinator anything."""
        coordinator = self.processes.coordinator
        until(lambda: coordinator.read_ready() is not None, "the coordinator's start")

    def kill(self) -> None:
        """SIGKILL to the coordinator once it is ready."""
        self.wait_until_ready()
        coordinator = self.processes.coordinator
        coordinator.process.kill()
        coordinator.process.wait()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[str], Fixture]]:
    made: list[Fixture] = []

    def make(program: str) -> Fixture:
        made.append(Fixture(tmp_path, program))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.stop()
        stop_children([each.worker, *each.processes.workers.values(), *each.launch.children], 10.0)


def test_a_coordinator_that_was_killed_is_started_again_at_its_ports(
    supervised: Callable[[str], Fixture],
) -> None:
    fixture = supervised(WAITS)
    assert fixture.supervisor.check() == {}, "it runs"
    fixture.kill()
    assert not fixture.supervisor.ended_in_order
    new = fixture.supervisor.check()
    assert new == {0: fixture.processes.coordinator} and new[0] is fixture.launch.children[-1]
    assert fixture.launch.ports == [(0, 0), (1, 2)]
    assert fixture.supervisor.check() == {}
    assert fixture.worker.process.poll() is None


def test_one_that_is_lost_again_and_again_is_not_started_for_ever(
    supervised: Callable[[str], Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "BACKOFF", Backoff(0.0, 0.0))
    fixture = supervised(DIES)
    fixture.launch.program = "import sys; print('no more room', file=sys.stderr, flush=True); " + DIES
    fixture.supervisor.start()
    failure = until(lambda: fixture.supervisor.failure, "giving up")
    assert isinstance(failure, PeerLost)
    found = str(failure)
    assert found.startswith("the coordinator was lost 6 times in a row within 5 s of its start, and is not ")
    assert f"it was killed by SIGABRT: look at {fixture.launch.children[-1].log}\nno more room" in found
    assert len(fixture.launch.children) == 1 + limits.COORDINATOR_RESTARTS_MAX
    assert until(lambda: fixture.worker.process.poll() is not None, "the end of the worker")
    assert fixture.worker.process.returncode == 0, "in order"


def test_a_launcher_without_descriptors_looks_again_once_it_has_some(
    supervised: Callable[[str], Fixture], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = supervised(WAITS)
    fixture.kill()
    coordinator, read_ready, asked = fixture.processes.coordinator, Child.read_ready, 0

    def refuse(child: Child) -> dict[str, Any] | None:
        nonlocal asked
        if child is not coordinator:  # One of another cluster in this process.
            return read_ready(child)
        asked += 1
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(Child, "read_ready", refuse)
        fixture.supervisor.start()
        until(lambda: asked > 1, "two looks")
    until(lambda: len(fixture.launch.children) == 2, "the next coordinator")
    assert caplog.text.count("cannot look after the cluster's processes, and try again: ") == 1


@pytest.mark.parametrize("times", [2, 100])
def test_a_start_that_fails_is_tried_again_and_not_for_ever(
    supervised: Callable[[str], Fixture], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A disk may have room a moment later; workers run on for as long as that is tried."""
    monkeypatch.setattr(replacements, "BACKOFF", Backoff(0.0, 0.0))
    fixture = supervised(WAITS)
    fixture.kill()
    start, failed = fixture.launch.start, list[int]()

    def refuse(port: int, web_port: int) -> Child:
        failed.append(len(failed))
        if len(failed) <= times:
            raise UsageError("cannot write coordinator-2.out: No space left on device")
        return start(port, web_port)

    monkeypatch.setattr(fixture.launch, "start", refuse)
    if times == 2:
        assert [fixture.supervisor.check() for _ in range(2)] == [{}, {}]
        assert fixture.supervisor.check() == {0: fixture.processes.coordinator}
        return
    for _ in range(limits.COORDINATOR_RESTARTS_MAX - 1):  # That it was lost counts, too.
        assert fixture.supervisor.check() == {}
    text = "^the coordinator cannot be started again: cannot write coordinator-2.out: No space left"
    with pytest.raises(PeerLost, match=text):
        fixture.supervisor.check()
    assert fixture.worker.process.poll() is None


def test_one_that_ended_with_its_cluster_stays_ended(
    supervised: Callable[[str], Fixture], tmp_path: Path
) -> None:
    fixture = supervised("pass")
    fixture.processes.coordinator.process.wait(30)
    forget_coordinator(tmp_path, 1)
    assert fixture.supervisor.check() == {}
    assert fixture.supervisor.ended_in_order


def test_one_that_has_handed_over_is_started_again_at_once_however_often(
    supervised: Callable[[str], Fixture], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = supervised("pass")
    times = limits.COORDINATOR_RESTARTS_MAX + 2
    for term in range(1, times + 1):
        old = fixture.processes.coordinator
        old.process.wait(30)
        write_coordinator(tmp_path, CoordinatorPlace(HOME, term, handed_over=True))
        assert not fixture.supervisor.ended_in_order
        assert fixture.supervisor.check() == {0: fixture.launch.children[term]}
    assert fixture.supervisor.failure is None
    assert fixture.launch.ports[1:] == [(1, 2)] * times
    assert f"the coordinator (pid {fixture.launch.children[0].pid}) handed over" in caplog.text


@pytest.mark.parametrize("program", ["pass", DIES])
def test_one_in_whose_place_another_was_started_and_has_handed_over_is_started_again(
    supervised: Callable[[str], Fixture], tmp_path: Path, program: str
) -> None:
    fixture = supervised(program)
    fixture.processes.coordinator.process.wait(30)
    elsewhere = Address("127.0.0.1", 7)
    write_coordinator(tmp_path, CoordinatorPlace(elsewhere, 2))
    assert fixture.supervisor.check() == {}, "the other one runs"
    assert fixture.client.address == elsewhere
    assert not fixture.supervisor.ended_in_order
    write_coordinator(tmp_path, CoordinatorPlace(elsewhere, 2, handed_over=True))
    assert fixture.supervisor.check() == {0: fixture.launch.children[1]}


def test_one_whose_place_another_has_taken_is_not_started_again(
    supervised: Callable[[str], Fixture], tmp_path: Path
) -> None:
    fixture = supervised(WAITS)
    elsewhere = Address("127.0.0.1", 7)
    write_coordinator(tmp_path, CoordinatorPlace(elsewhere, 2))
    fixture.kill()
    assert fixture.supervisor.check() == {}
    assert fixture.client.address == elsewhere
    assert not fixture.supervisor.ended_in_order
    (tmp_path / "coordinator.json").unlink()
    assert fixture.supervisor.ended_in_order, "the other one has ended in order"


def test_a_worker_that_ends_before_it_is_ready_is_quoted(
    supervised: Callable[[str], Fixture], caplog: pytest.LogCaptureFixture
) -> None:
    fixture = supervised(WAITS)
    fixture.supervisor._replaces_workers = True
    fixture.worker.log.write_text("no more room\n")
    fixture.worker.process.kill()
    fixture.worker.process.wait()
    fixture.supervisor._look_at_workers(0.0)
    fixture.supervisor._look_at_workers(0.1)
    (record,) = caplog.records
    text = f"worker-1 (pid {fixture.worker.pid}) was killed by SIGKILL before it was ready\nno more room"
    assert record.message == text


def test_a_directory_that_was_removed_does_not_end_the_supervisor(
    supervised: Callable[[str], Fixture], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = supervised(WAITS)
    shutil.rmtree(tmp_path)
    fixture.worker.process.kill()
    fixture.worker.process.wait()
    assert fixture.supervisor.check() == {}
    assert (
        f"was killed by SIGKILL before it was ready\nits output is not there any more: {tmp_path}"
        in caplog.text
    )
    tmp_path.mkdir()


class Verdicts:
    """Answers for the coordinator what became of the worker with that process."""

    def __init__(self, pid: int) -> None:
        self.address = HOME
        self.pid = pid
        self.state = "alive"
        self.age = 0.0

    def request(self, message: Any, expected: Any) -> ClusterStatus:
        assert message == GetStatus(jobs=False, reports=False)
        return self.status()

    def status(self) -> ClusterStatus:
        about = {"worker": 1, "epoch": 1, "host": "h", "data_port": 1, "metrics_port": 1, "report": {}}
        counts = {"slots": 1, "slots_free": 0, "heartbeat_age_seconds": self.age, "peers": []}
        worker = {**about, **counts, "state": self.state, "pid": self.pid}
        whole = {"cluster": "c", "version": "0", "term": 1, "pid": 1, "web_port": 0, "jobs": []}
        return ClusterStatus.model_validate({**whole, "workers": [worker]})

    def close(self) -> None:
        pass


@pytest.fixture
def hanging(supervised: Callable[[str], Fixture], tmp_path: Path) -> Iterator[Callable[[str], Fixture]]:
    """A supervisor of a worker that runs a program; whatever takes its place waits for its end."""
    made: list[Fixture] = []

    def make(program: str) -> Fixture:
        fixture = supervised(WAITS)
        stop_children([fixture.worker], 10.0)
        fixture.worker = python(tmp_path, program, "worker-1")
        made.append(fixture)
        until(lambda: fixture.worker.out.read_text(), "its start")
        fixture.worker.out.write_text(json.dumps({"pid": fixture.worker.pid}) + "\n")
        fixture.processes.workers[1] = fixture.worker
        processes: Any = fixture.processes
        processes.launch = Heirs(tmp_path)
        supervisor: Any = fixture.supervisor
        supervisor._client.close()
        supervisor._client = Verdicts(fixture.worker.pid)
        supervisor._replaces_workers = True
        until(lambda: fixture.processes.coordinator.read_ready() is not None, "the coordinator's start")
        return fixture

    yield make
    for each in made:
        stop_children(list(each.processes.workers.values()), 10.0)


class Heirs:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    def start(self, worker: int, coordinator: Address) -> Child:
        return python(self.state_dir, WAITS, f"worker-{worker}-2")


@pytest.mark.parametrize(("program", "code"), [(PATIENT, -signal.SIGTERM), (STUBBORN, -signal.SIGKILL)])
def test_a_worker_that_hangs_is_replaced_at_once_and_ended(
    hanging: Callable[[str], Fixture], program: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = hanging(program)
    supervisor, old = fixture.supervisor, fixture.worker
    before = time.monotonic()
    assert supervisor.check() == {}
    assert supervisor._ask_at >= before + VERDICT_SECONDS_QUIET, "the coordinator has heard of all"
    old.send_signal(signal.SIGSTOP)
    verdicts: Any = supervisor._client
    verdicts.age, supervisor._ask_at = 2.0, 0.0
    assert supervisor.check() == {}, "the coordinator has declared nobody lost"
    assert supervisor._ask_at <= time.monotonic() + VERDICT_SECONDS
    verdicts.state, supervisor._ask_at = "lost", 0.0
    (new,) = supervisor.check().values()
    assert new is fixture.processes.workers[1] and new.process.poll() is None
    assert set(map(id, fixture.processes.children)) >= {id(old), id(new)}, "both are known until the end"

    def ended() -> bool:
        supervisor._ask_at = 0.0
        assert supervisor.check() == {}, "once"
        return not fixture.processes.hung

    until(ended, "the end of the old process")
    assert old.process.returncode == code
    assert f"worker-1 (pid {old.pid}) hangs and counts as lost: it is ended, and another is st" in caplog.text
    assert f"worker-1 (pid {old.pid}) {how_it_ended(code)}" in caplog.text
    assert old not in fixture.processes.children


def test_what_hangs_when_the_supervisor_stops_is_killed(hanging: Callable[[str], Fixture]) -> None:
    fixture = hanging(STUBBORN)
    verdicts: Any = fixture.supervisor._client
    verdicts.state = "lost"
    assert fixture.supervisor.check()
    fixture.supervisor.stop()
    stop_children(fixture.processes.hung, 30.0)
    assert fixture.worker.process.returncode == -signal.SIGKILL


class Coordinator:
    """Stands for the client of one: what it was told, and what it answers."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.told: list[WorkerEnded] = []

    def request(self, message: WorkerEnded, expected: type[Accepted]) -> Accepted:
        self.told.append(message)
        if (error := self.answers.pop(0)) is not None:
            raise error
        return Accepted()

    def close(self) -> None:
        """Nothing to close."""


def test_the_coordinator_hears_how_a_worker_ended(
    supervised: Callable[[str], Fixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = supervised(WAITS)
    fixture.wait_until_ready()
    coordinator: Any = Coordinator(PeerLost("it is away"), None)
    monkeypatch.setattr(fixture.supervisor, "_client", coordinator)
    ready = {"worker": 1, "epoch": 6}
    dead = fixture.processes.workers[1] = python(tmp_path, DIES, "worker-1-2", ready)
    dead.process.wait(30)
    with pytest.raises(PeerLost):
        fixture.supervisor.check()
    assert fixture.supervisor.check() == {}, "workers are not replaced"
    assert fixture.supervisor.check() == {}
    assert coordinator.told == [WorkerEnded(worker=1, epoch=6, signal="SIGABRT")] * 2, "until it has answered"


def test_a_coordinator_that_does_not_want_to_hear_it_is_left_in_peace(
    supervised: Callable[[str], Fixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = supervised(WAITS)
    fixture.wait_until_ready()
    coordinator: Any = Coordinator(UsageError("what is that"))
    monkeypatch.setattr(fixture.supervisor, "_client", coordinator)
    dead = fixture.processes.workers[1] = python(tmp_path, DIES, "worker-1-2", {"worker": 1, "epoch": 6})
    dead.process.wait(30)
    assert fixture.supervisor.check() == fixture.supervisor.check() == {}
    assert len(coordinator.told) == 1


def test_a_worker_that_ends_with_code_0_without_having_said_so_is_lost(
    supervised: Callable[[str], Fixture], tmp_path: Path
) -> None:
    fixture = supervised(WAITS)
    fixture.supervisor._replaces_workers = True
    process = fixture.worker.process
    process.communicate(timeout=30)
    fixture.supervisor._look_at_workers(0.0)
    assert not fixture.supervisor._replacements.pending, "it was in order"

    class Unannounced(Observation):
        def ended_by_itself(self, code: int) -> bool:
            return False

    fixture.processes.workers[1] = Child(
        "w", process, fixture.worker.out, fixture.worker.log, observation=Unannounced(None)
    )
    fixture.supervisor._look_at_workers(0.0)
    assert fixture.supervisor._replacements.pending


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how_it_ended(3) == "ended with code 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-40) == "was killed by signal 40"

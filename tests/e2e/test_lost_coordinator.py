"""Real processes: coordinator and then a worker are killed under a running job, and another takes over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.client import Client
from minishuffle.ids import Address
from minishuffle.launch import Child, settings_flags
from minishuffle.local import LocalCluster
from minishuffle.remote.access import Access
from minishuffle.remote.reader import ResultInfo, ResultReader, describe_result, wait_result
from minishuffle.remote.writer import StreamWriter, commit_write
from minishuffle.wire.requests import JobInfo
from support.ports import free_ports
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

RATE = 2_000
ENDLESS_RATE = 200
"""Rows per second of jobs that run for as long as their test."""
SECONDS_MAX = 60.0
Until = Callable[..., Any]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def attempts(info: JobInfo) -> dict[tuple[int, int], tuple[int, int, str]]:
    """By operator and index: attempt, worker and state."""
    return {(task.operator, task.index): (task.attempt, task.worker, task.state) for task in info.tasks}


@contextmanager
def started_again(cluster: LocalCluster, port: int, *flags: str) -> Iterator[Client]:
    """A coordinator with the journal of the one before."""
    state = str(cluster.state_dir)
    command = [sys.executable, "-m", "minishuffle.cli", "--cluster", "local", "--state-dir", state]
    command += ["coordinator", "start", "--port", str(port), "--web-port", "0", *flags]
    with subprocess.Popen([*command, *settings_flags(cluster._settings)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            with Client(Address("127.0.0.1", ready["port"]), cluster._secret, cluster="local") as client:
                yield client
        finally:
            process.terminate()
            assert process.wait(SECONDS_MAX) == 0


def test_tasks_run_on_without_a_coordinator_and_the_next_one_recovers_what_died_meanwhile(
    wait_until: Until, tmp_path: Path
) -> None:
    out = str(tmp_path)

    def write(number: int) -> int:
        with open(os.path.join(out, str(os.getpid())), "ab") as file:
            file.write(b".")
        return number

    def written(pid: int) -> int:
        path = tmp_path / str(pid)
        return path.stat().st_size if path.exists() else 0

    settings: dict[str, Any] = {"heartbeat_interval": 0.25, "heartbeat_timeout": 2.0, "slots": 1}
    settings |= {"restart_workers": False, "restart_coordinator": False}
    with LocalCluster(workers=3, **settings) as cluster:
        stream = Stream.generate(numbers, rate=ENDLESS_RATE).rebalance().map(write).to_count()
        job = cluster.submit(stream, parallelism=2).id
        before = wait_until(
            lambda: (info := cluster.client.job(job)).state == "running" and info, "the job to run"
        )
        pids = {number: cluster.workers[number] for number in {task.worker for task in before.tasks}}
        cluster.kill_coordinator()
        for pid in pids.values():
            seen = written(pid)
            wait_until(lambda pid=pid, seen=seen: written(pid) > seen + ENDLESS_RATE // 2, "output to go on")
        (survivor, *_), victim = sorted(pids), max(pids)
        cluster.kill_worker(victim, signal.SIGKILL)
        seen = written(pids[survivor])
        wait_until(lambda: written(pids[survivor]) > seen + ENDLESS_RATE // 4, "the other to go on")
        with started_again(cluster, cluster._running().address.port) as client:
            changed = attempts(client.job(job)).items() ^ attempts(before).items()
            were_on = {attempts(before)[key][1] for key, _ in changed}
            assert were_on <= {victim}, "all is known at once; the other worker may be back by now"
            after = wait_until(
                lambda: (
                    (info := client.job(job)).restarts
                    and {task.state for task in info.tasks} == {"running"}
                    and info
                ),
                "the lost tasks to run again",
            )
            for key, (attempt, worker, _) in attempts(after).items():
                was = attempts(before)[key][1]
                assert (attempt, worker == was) == ((2, False) if was == victim else (1, True))
            assert client.status().term == 2
            assert {each.pid for each in client.status().workers if each.state == "alive"} >= {pids[survivor]}
            seen = written(pids[survivor])
            wait_until(lambda: written(pids[survivor]) > seen + ENDLESS_RATE // 4, "output to go on")


def stopped_outside_of_a_write(coordinator: Child, directory: Path) -> None:
    """Stop it at a moment at which it does not hold its journal: nobody else could open that then."""
    seen = psutil.Process(coordinator.process.pid)

    def stopped() -> bool:
        coordinator.process.send_signal(signal.SIGSTOP)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, "the stop")
        with closing(sqlite3.connect(directory / "journal.sqlite", timeout=0)) as journal:
            try:
                journal.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                coordinator.process.send_signal(signal.SIGCONT)
                return False
        return True

    until(stopped, "a moment without a write", SECONDS_MAX)


def test_a_coordinator_that_was_only_stopped_is_refused_and_its_workers_stay_with_the_next(
    wait_until: Until,
) -> None:
    # The next one awaits them for as long; nobody is to be lost for being late on a busy machine.
    settings: dict[str, Any] = {"heartbeat_interval": 0.25, "heartbeat_timeout": 30.0, "slots": 1}
    with LocalCluster(workers=2, **settings) as cluster:
        stream = Stream.generate(numbers, rate=ENDLESS_RATE).rebalance().to_count()
        job = cluster.submit(stream, parallelism=2).id
        before = wait_until(
            lambda: (info := cluster.client.job(job)).state == "running" and info, "the job to run"
        )
        old = cluster._running().coordinator
        stopped_outside_of_a_write(old, cluster.state_dir)
        second = [sys.executable, "-m", "minishuffle.cli", "--cluster", "local", "--state-dir"]
        second += [str(cluster.state_dir), "coordinator", "start", "--port", "0", "--web-port", "0"]
        refused = subprocess.run(second, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
        assert refused.returncode == 1
        place = f"pid {old.process.pid}, {cluster._running().address}"
        assert f"a coordinator runs with {cluster.state_dir} already ({place}): leave it" in refused.stderr
        with started_again(cluster, 0, "--take-over") as client:

            def alive() -> set[int]:
                return {each.pid for each in client.status().workers if each.state == "alive"}

            pids = set(cluster.workers.values())
            wait_until(lambda: alive() == pids, "the workers to go to the next coordinator")
            old.process.send_signal(signal.SIGCONT)
            assert old.process.wait(SECONDS_MAX) == 1
            (last,) = old.tail().splitlines()[-1:]
            assert re.fullmatch(
                r"minishuffle: a coordinator of term 2 has taken over with .*/journal\.sqlite: this one, "
                r"of term 1, ends \(minishuffle explain MS-142\)",
                last,
            )
            assert "Traceback" not in old.log.read_text()
            assert alive() == pids and attempts(client.job(job)) == attempts(before)
            cluster.kill_worker(2, signal.SIGKILL)
            wait_until(lambda: cluster.workers[2] not in pids, "another process in place of the worker")
            assert cluster._running().coordinator is old, "nobody takes the place of the next one"
            again = wait_until(
                lambda: alive() == set(cluster.workers.values()) and client.job(job), "it to register"
            )
            assert again.state == "running"
            client.cancel(job)


def test_a_local_cluster_starts_its_coordinator_again_and_who_waits_for_a_job_notices_nothing(
    wait_until: Until,
) -> None:
    count = 4_000
    with LocalCluster(workers=2, slots=1) as cluster:
        stream = Stream.generate(numbers, rate=RATE, records=count).rebalance().to_count()
        handle = cluster.submit(stream, parallelism=2)
        before = wait_until(lambda: (info := handle.info()).state == "running" and info, "the job to run")
        old = cluster._running().coordinator
        old.process.kill()
        result = handle.wait(SECONDS_MAX)
        assert sum(each.value for each in result.results) == count, "none is lost, none comes twice"
        assert {task.attempt for task in result.tasks} == {1}
        assert attempts(handle.info()).keys() == attempts(before).keys()
        new = cluster._running().coordinator
        assert cluster.status().pid == new.pid != old.pid
        assert old.process.returncode == -signal.SIGKILL


def test_sigterm_of_the_coordinator_is_no_order_to_end_and_costs_no_attempt_and_no_row(
    wait_until: Until, tmp_path: Path
) -> None:
    """Twice, the second time with rows that the second one has from the first. The last rows come after
    that."""
    count, gate, given = 4_000, str(tmp_path / "gate"), list[int]()

    def numbers_through_gate(start: int, count: int) -> list[int]:
        """Each worker's, of two: as many rows pass as are waited for, whichever they are."""
        if sum(given) >= 1_000:
            until(lambda: os.path.exists(gate), "the gate to open")
        given.append(count)
        return list(range(start, start + count))

    with LocalCluster(workers=2, slots=1) as cluster:
        stream = Stream.generate(numbers_through_gate, rate=RATE, records=count).rebalance().map(abs)
        handle = cluster.submit(stream.collect(), parallelism=2)
        ended, log = [], cluster.state_dir / "worker-1.log"
        for rows, back in ((200, ""), (600, "has taken this worker back, in term 2")):
            wait_until(lambda rows=rows: handle.info().tasks[-1].counters.records_in > rows, "some rows")
            wait_until(lambda back=back: back in log.read_text(), "its return")
            ended.append(cluster._running().coordinator)
            ended[-1].process.terminate()
            assert ended[-1].process.wait(SECONDS_MAX) == 0
        Path(gate).touch()
        result = handle.wait(SECONDS_MAX)
        assert sorted(result.rows) == list(range(count))
        assert {task.attempt for task in result.tasks} == {1}
        assert cluster.status().term == 3
        for each in ended:
            assert "handed over: workers (2) and jobs (1) run on, and wait for the next" in each.tail()
        assert log.read_text().count("and this worker ends if there is none within 300 s") == 2
        children = cluster._running().children
    assert {child.process.returncode for child in children} == {0}, "leaving the block is an order"


SCHEMA = pa.schema([("n", pa.int64())])


def rows(begin: int, end: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(begin, end), pa.int64())], SCHEMA)


def read(access: Access, info: ResultInfo) -> list[int]:
    """All rows that are there."""
    found: list[int] = []
    for subtask, begin, end in info.subtasks:
        with ResultReader(access, info.job, info.sink, subtask, range(begin, end)) as reader:
            found += [n for batch in reader.batches() for n in batch["n"].to_pylist()]
    return found


def test_what_external_clients_write_and_read_goes_on_over_the_loss_of_the_coordinator() -> None:
    """It is killed while rows are written, before the commit, and before they are read."""
    with LocalCluster(workers=2, slots=1, restart_workers=False) as cluster:
        address = cluster.client.address
        access = Access(address.host, address.port, "local", cluster._secret)
        stream = Table.from_spark("numbers", SCHEMA, bounded=True).to_spark()
        job = cluster.submit(stream, parallelism=2)
        for partition in range(2):
            begin = 1_000 * partition
            with StreamWriter(
                access, "numbers", SCHEMA, write="w", partition=partition, partitions=2, attempt=1
            ) as writer:
                writer.write(rows(begin, begin + 500))
                if partition == 0:
                    cluster.kill_coordinator()
                writer.write(rows(begin + 500, begin + 1_000))
                assert writer.finish() == 1_000
        cluster.kill_coordinator()
        commit_write(access, "numbers", "w", [0, 1])
        info = wait_result(access, job.id, timeout=SECONDS_MAX)
        assert info.rows == 2_000 and info.rows_lost == 0
        cluster.kill_coordinator()
        assert sorted(read(access, info)) == list(range(2_000))
        shown = describe_result(access, job.id, away_seconds=SECONDS_MAX)
        assert (shown.state, shown.subtasks) == ("finished", info.subtasks)
        assert cluster.status().term == 4


def test_cluster_up_starts_its_coordinator_again_where_cluster_down_finds_it(
    command_line: Any, wait_until: Until, is_running: Callable[[int], bool]
) -> None:
    shell = command_line("up")
    (port,) = map(str, free_ports(1))
    up = shell.start("cluster", "up", "--workers", "1", "--port", port, "--web-port", "0")
    assert up.stdout is not None
    for line in up.stdout:
        if "Ctrl-C" in line:
            break

    def coordinator() -> Any:
        return json.loads((shell.state / "cluster.json").read_text())["processes"]["coordinator"]["pid"]

    before = set(shell.pids())
    first = coordinator()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: first not in shell.pids(), "the new record")
    (new,) = set(shell.pids()) - before
    assert coordinator() == new

    def status() -> Any:
        with contextlib.suppress(AssertionError):  # It does not listen so far.
            found = shell.look("cluster", "status")
            return [each["state"] for each in found["workers"]] == ["alive"] and found

    assert wait_until(status, "the worker to be back")["pid"] == new
    shell.run("cluster", "down")
    _, errors = up.communicate(timeout=SECONDS_MAX)
    assert up.returncode == 0, errors
    assert f"the coordinator (pid {first}) was killed by SIGKILL; see " in errors
    assert f"the coordinator is started again (pid {new})" in errors
    assert not any(map(is_running, [*before, new]))

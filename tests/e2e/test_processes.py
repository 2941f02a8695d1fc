"""Workers are processes of their own, and two of them share one connection, as the kernel sees it too."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from minishuffle import launch
from minishuffle.api.stream import Stream
from minishuffle.cli.worker import Endings, run_process, say_ready
from minishuffle.config import HASH_SEED, ClusterSettings, hash_seed, read_secret
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PARALLELISM = 4


@pytest.fixture(scope="module")
def busy(own_imports: None, watch: Any, wait_until: Callable[..., Any]) -> Iterator[Any]:
    """Two workers with four slots each, and a keyed job of parallelism 4 that has crossed between them."""
    endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100)
    with LocalCluster(workers=2, slots=4) as cluster:
        seen = watch(cluster)
        counted = endless.key_by(lambda number: number % 1000).count(emit="batch").to_count()
        cluster.submit(counted, name="endless", parallelism=PARALLELISM)
        for worker in (1, 2):
            wait_until(
                lambda worker=worker: seen.total(
                    "minishuffle_network_buffers_total", worker, direction="in", path="remote"
                ),
                f"remote buffers into worker {worker}",
            )
        wait_until(lambda: all(worker.peers for worker in cluster.status().workers), "reports of peers")
        yield seen


def status(busy: Any) -> Any:
    command = [sys.executable, "-m", "minishuffle.cli", *busy.flags, "cluster", "status", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(ran.stdout)


def sockets(data_port: int) -> set[tuple[str, str]]:
    """Both ends of every established connection to that port, as ``ss`` shows them: local, peer."""
    listed = subprocess.run(
        ["ss", "-tnH", "state", "established", f"( sport = :{data_port} )"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return {(fields[2], fields[3]) for line in listed.stdout.splitlines() if (fields := line.split())}


def test_records_are_received_in_another_process_than_they_were_made_in() -> None:
    def made(number: int) -> tuple[int, int]:
        return number % 50, os.getpid()

    with LocalCluster(workers=2, slots=1) as cluster:
        tagged = Stream.items(list(range(2000))).map(made)
        folded = tagged.key_by(lambda row: row[0]).fold(set, lambda seen, row: seen | {row[1]})
        rows = cluster.run(
            folded.map(lambda row: (row[0], sorted(row[1]), os.getpid())).collect(), timeout=60
        )
        pids = set(cluster.workers.values())
    assert sorted(key for key, _, _ in rows) == list(range(50))
    assert {pid for _, _, pid in rows} == pids
    assert {(maker, taker) for _, makers, taker in rows for maker in makers} == {
        (maker, taker) for maker in pids for taker in pids
    }


@pytest.mark.parametrize("lets", [True, False])
def test_the_loop_takes_the_processor_from_no_task_and_tasks_may(lets: bool) -> None:
    with LocalCluster(workers=1, slots=1, loop_lets_tasks_finish=lets) as cluster:
        policies = cluster.run(Stream.items([0]).map(lambda _: os.sched_getscheduler(0)).collect())
        (pid,) = cluster.workers.values()
        assert os.sched_getscheduler(pid) == (os.SCHED_BATCH if lets else os.SCHED_OTHER)
    assert policies == [os.SCHED_OTHER]


def test_a_worker_whose_output_finds_no_room_works_all_the_same(wait_until: Callable[..., Any]) -> None:
    """So may one that takes the place of another on a disk that is full."""
    with LocalCluster(workers=1, slots=1) as cluster, open("/dev/full", "wb") as full:
        flags = ["--cluster", "local", "--state-dir", str(cluster.state_dir)]
        flags += ["--coordinator", str(cluster.client.address)]
        command = [sys.executable, "-m", "minishuffle.cli", *flags, "worker", "start", "--slots", "1"]
        pipes = {"stdin": subprocess.PIPE, "stdout": full, "stderr": subprocess.PIPE}
        with subprocess.Popen([*command, "--exit-with-parent"], **pipes) as worker:  # type: ignore[call-overload]
            wait_until(lambda: len(cluster.status().workers) == 2, "the second worker")
            # It has begun anew, in the same process, since nobody had told it how to hash.
            seed = hash_seed(read_secret(cluster.state_dir / "secret"))
            assert psutil.Process(worker.pid).environ()[HASH_SEED] == seed
            numbers = Stream.items(range(100)).key_by(lambda number: number % 7).count()
            assert sum(count for _, count in cluster.run(numbers.collect(), parallelism=2)) == 100
            _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0
        assert b"cannot write where this worker listens (No space left on device)" in said


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_worker_and_all_its_threads_stay_on_one_processor(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = os.sched_getaffinity(0)
    last = max(usable)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: {last})  # as many as there are workers
    with LocalCluster(workers=1, slots=1, pin_workers=pinned) as cluster:
        cluster.run(Stream.items(list(range(10))).to_count())
        (pid,) = cluster.workers.values()
        monkeypatch.undo()
        found = [os.sched_getaffinity(thread.id) for thread in psutil.Process(pid).threads()]
    assert found
    assert found == [{last} if pinned else usable] * len(found)


# --- processes that import for themselves, which they do to the end of the file --------------------------


def test_every_process_is_another_one(busy: Any) -> None:
    shown = status(busy)
    pids = [shown["pid"], *(worker["pid"] for worker in shown["workers"])]
    assert len({*pids, os.getpid()}) == 4
    assert {worker["pid"] for worker in shown["workers"]} == set(busy.cluster.workers.values())
    for pid in pids:
        process = psutil.Process(pid)
        assert process.ppid() == os.getpid()
        assert any(word.startswith("minishuffle") for word in process.cmdline())


@pytest.mark.extra
def test_many_channels_share_one_connection_and_ss_agrees(busy: Any) -> None:
    samples = busy.samples()
    requests = [value for name, labels, value in samples if _is_request(name, labels)]
    # Four producers and four consumers, two of each on both sides: eight channels cross in all.
    assert sorted(requests) == [PARALLELISM] * 4
    first, second = status(busy)["workers"]
    assert [(peer["worker"], peer["connections"]) for peer in first["peers"]] == [(2, 1)]
    assert [(peer["worker"], peer["connections"]) for peer in second["peers"]] == [(1, 1)]
    (to_second,), (to_first,) = first["peers"], second["peers"]
    assert (to_second["local"], to_second["remote"]) == (to_first["remote"], to_first["local"])

    accepted = {worker["worker"]: sockets(worker["data_port"]) for worker in (first, second)}
    assert accepted[1] == set()  # the worker with the lower id dials
    assert accepted[2] == {(to_first["local"], to_first["remote"])}


def _is_request(name: str, labels: dict[str, str]) -> bool:
    return name == "minishuffle_frames_total" and labels["type"] == "partition_request"


@pytest.mark.extra
def test_the_ends_of_the_connection_belong_to_the_two_workers(busy: Any) -> None:
    first, second = status(busy)["workers"]
    owners: dict[str, int] = {}
    shown = subprocess.run(
        ["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=True
    )
    for line in shown.stdout.splitlines():
        local, owner = line.split()[2], re.search(r"pid=(\d+)", line)
        if owner:
            owners[local] = int(owner[1])
    peer = first["peers"][0]
    assert (owners[peer["local"]], owners[peer["remote"]]) == (first["pid"], second["pid"])


def test_texts_hash_alike_in_all_workers(busy: Any) -> None:
    """Else a function that goes through a set of them would make its rows in another order when its task goes
    on on another worker, and consumers would leave out other rows than those that they have had."""
    hashes = Stream.items(range(40)).rebalance().map(lambda _: (os.getpid(), hash("a text")))
    found = set(busy.cluster.run(hashes.collect(), parallelism=PARALLELISM))
    assert len(found) == 2 and len({number for _, number in found}) == 1


def test_a_process_without_a_standard_output_says_where_it_listens_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    say_ready("coordinator", {"port": 8471})
    assert "cannot write where this coordinator listens (Bad file descriptor): {" in caplog.text
    assert '"port": 8471' in caplog.text


def test_a_second_signal_ends_a_process_at_once_which_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its launcher would take that for the doing of a function."""
    done: list[Any] = []
    monkeypatch.setattr(os, "_exit", done.append)

    async def body(_: Any, endings: Endings) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60.0):
            await endings.by_signal.wait()
            assert done == []
            os.kill(os.getpid(), signal.SIGTERM)
            while len(done) < 2:
                await asyncio.sleep(0)

    assert (
        run_process("worker", ClusterSettings(), False, body, last_words=lambda: done.append("says so")) == 0
    )
    assert done == ["says so", 143]

"""LocalCluster: real worker processes for the length of a ``with`` block."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.client import JobHandle
from minishuffle.errors import TaskFailed, UnknownName, UsageError
from minishuffle.local import LocalCluster
from minishuffle.operators.base import Aside
from support.settings import NO_RESTARTS

pytestmark = pytest.mark.timeout(120)
ENDLESS = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100)


@pytest.fixture(scope="module")
def one_slot() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1, slots=1) as cluster:
        yield cluster


def jobs_of(cluster: LocalCluster) -> set[str]:
    return {job.job for job in cluster.client.jobs()}


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_workers_are_processes_and_nothing_is_left() -> None:
    words = ["to", "be", "or", "not", "to", "be"]
    cluster = LocalCluster(workers=2, slots=1)
    assert repr(cluster) == "<LocalCluster of 2 workers, not running>"
    assert cluster._repr_html_() is None
    assert cluster.start() is cluster
    try:
        with pytest.raises(UsageError, match="running already"):
            cluster.start()
        pids, directory = cluster.workers, cluster.state_dir
        assert len({os.getpid(), *pids.values()}) == 3
        assert {worker.pid for worker in cluster.status().workers} == set(pids.values())
        assert oct(directory.stat().st_mode & 0o777) == "0o700"
        rows = cluster.run(Stream.items(words).key_by(lambda word: word).count().collect(), timeout=60)
        assert sorted(rows) == [("be", 2), ("not", 1), ("or", 1), ("to", 2)]
        assert (cluster._repr_html_() or "").count("<tr>") == 1 + 2 + 1 + 1
    finally:
        cluster.stop()
    assert all(gone(pid) for pid in pids.values())
    assert not directory.exists()
    cluster.stop()
    with pytest.raises(UsageError, match=r"not running: .* call its start\(\)"):
        cluster.status()


@pytest.mark.slow
def test_a_failing_function_and_a_lost_worker_leave_the_cluster_usable() -> None:
    def fail(n: int) -> int:
        return n // 0

    with LocalCluster(workers=2, slots=2) as cluster:
        with pytest.raises(TaskFailed, match=r"(?s)ZeroDivisionError.*return n // 0"):
            cluster.run(Stream.items([1]).map(fail).collect(), timeout=60, settings=NO_RESTARTS)
        handle = cluster.submit(Stream.items([1]).map(lambda n: Aside("odd", n)).to_count())
        with pytest.raises(TaskFailed, match=r"map: its function gave Aside\('odd', .*sides=\['odd'\]"):
            handle.wait(timeout=60)
        assert not handle.info().restarts
        endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=1000)
        handle = cluster.submit(
            endless.key_by(lambda n: n % 10).count(emit="batch").to_count(), settings=NO_RESTARTS
        )
        cluster.kill_worker(2, signal.SIGKILL)
        with pytest.raises(TaskFailed, match="worker 2"):
            handle.wait(timeout=60)
        rows = cluster.run(Stream.items([1, 2, 3]).map(lambda n: n * n).collect(), timeout=60)
        assert sorted(rows) == [1, 4, 9]
        parts = Stream.items([0, 1, 2, 3]).map(lambda n: 6 // n, on_error="side")
        both = Stream.together(
            parts.collect("all"),
            parts.filter(lambda n: n > 3).collect("large"),
            parts.filter(lambda n: n > 9).collect("huge"),
            parts.errors.map(lambda row: row["record"]).collect("errors"),
        )
        result = cluster.submit(both).wait(timeout=60)
        assert {name: sorted(rows) for name, rows in result.collected.items()} == {
            "all": [2, 3, 6],
            "large": [6],
            "huge": [],
            "errors": [0],
        }
        with pytest.raises(UnknownName, match=r"no worker 3; the workers are \[1, 2\]"):
            cluster.kill_worker(3)


NUMBERS = pa.table(
    {
        "n": pa.array(range(200_000)),
        "word": pa.array([str(number % 7) for number in range(200_000)]).dictionary_encode(),
        "at": pa.array(range(200_000), pa.timestamp("ns", "Europe/Oslo")),
    }
)


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_run_gives_what_its_argument_is(one_slot: LocalCluster) -> None:
    table, numbers = Table.from_arrow(NUMBERS), Stream.items([1, 2])
    assert one_slot.run(table, timeout=60).equals(NUMBERS)
    assert one_slot.run(table.collect("mine"), timeout=60).equals(NUMBERS)
    none = one_slot.run(table.filter(pc.field("n") < 0), timeout=60)
    assert none.equals(NUMBERS.slice(0, 0))
    assert one_slot.run(numbers, timeout=60) == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_run_of_other_sinks_gives_no_rows(one_slot: LocalCluster) -> None:
    assert one_slot.run(Table.from_arrow(NUMBERS).to_count(), timeout=60).shape == (0, 0)
    assert one_slot.run(Stream.items([1, 2]).to_count(), timeout=60) == []


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_run_takes_the_rows_of_all_sinks_together(one_slot: LocalCluster) -> None:
    few = Table.from_arrow(NUMBERS.slice(0, 2)).select("n")
    rows = one_slot.run(Stream.together(few.collect("x"), Stream.items([7]).collect("y")), timeout=60)
    assert rows == [{"n": 0}, {"n": 1}, 7]
    table = one_slot.run(Stream.together(few.collect("x"), few.collect("y"), few.to_count()), timeout=60)
    assert sorted(table["n"].to_pylist()) == [0, 0, 1, 1]
    jobs = jobs_of(one_slot)
    with pytest.raises(UsageError, match=r"'x' and 'y' take different columns.*JobResult\.table\(name\)"):
        one_slot.run(Stream.together(few.collect("x"), few.rename({"n": "m"}).collect("y")))
    assert jobs_of(one_slot) == jobs, "it is refused before it is a job"


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_a_run_that_takes_too_long_is_cancelled(one_slot: LocalCluster) -> None:
    before = jobs_of(one_slot)
    with pytest.raises(TimeoutError):
        one_slot.run(ENDLESS.to_count(), timeout=0.5)
    [job] = jobs_of(one_slot) - before
    assert one_slot.client.handle(job).wait_until_over(60).state == "canceled"


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_run_that_a_signal_ends_is_cancelled(
    one_slot: LocalCluster, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(handle: JobHandle, timeout: float | None, **_: object) -> None:
        raise error

    monkeypatch.setattr(JobHandle, "wait", interrupted)
    before = jobs_of(one_slot)
    with pytest.raises(type(error)):
        one_slot.run(ENDLESS.to_count())
    [job] = jobs_of(one_slot) - before
    assert one_slot.client.handle(job).wait_until_over(60).state == "canceled"


@pytest.mark.slow
def test_an_error_in_the_block_still_cleans_up() -> None:
    pids: list[int] = []
    directory = Path()
    with pytest.raises(RuntimeError, match="of the user"), LocalCluster(workers=1) as cluster:
        pids, directory = list(cluster.workers.values()), cluster.state_dir
        raise RuntimeError("of the user")
    assert pids
    assert all(gone(pid) for pid in pids)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"workers": 0}, "at least one worker"),
        ({"slots": 0}, "slots"),
        ({"segments": 1}, "no setting 'segments'"),
    ],
)
def test_bad_arguments_start_nothing(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        LocalCluster(**arguments)  # type: ignore[arg-type]

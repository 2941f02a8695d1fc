"""One job's code holds the interpreter; another job on the same workers goes on, and so do heartbeats."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from support.soak import SOAK

HOG_SECONDS = 30.0 if SOAK else 4.0
GAP_SECONDS_MAX = 3.0
SCRAPE_P95_SECONDS_MAX = 0.2
POLL_SECONDS = 0.1
HEARTBEAT_TIMEOUT = 10.0
CANCEL_TIMEOUT = 1.0
SLOTS = 5

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def seen(watch: Any) -> Iterator[Any]:
    with LocalCluster(
        workers=2,
        slots=SLOTS,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        task_cancel_timeout=CANCEL_TIMEOUT,
        abandoned_max=4,
    ) as cluster:
        yield watch(cluster)


class Hog:
    """A sink whose subtasks on one worker sleep (one of them) or spin (four of them).

    ``pid`` is of the worker; ``seconds`` None stands for an hour.
    """

    def __init__(self, pid: int, mode: str, seconds: float | None) -> None:
        self.pid = pid
        self.mode = mode
        self.seconds = seconds
        self.context: Any = None
        self.done = False

    def open(self, context: Any) -> None:
        self.context = context

    def write(self, batch: Any) -> None:
        if self.done or os.getpid() != self.pid:
            return
        self.done = True
        self.context.log("began")
        if self.mode == "sleep":
            time.sleep(self.seconds or 3600.0)
        else:
            end = time.monotonic() + (self.seconds or 3600.0)
            while time.monotonic() < end:
                pass
        self.context.log("ended")

    def close(self) -> Any:
        return None


class Probe(threading.Thread):
    """Scrapes one worker without a pause and notes how long each took, and how the quiet job goes on."""

    def __init__(self, seen: Any, worker: int, pipeline: str) -> None:
        super().__init__(name="probe", daemon=True)
        self._url = f"http://{seen.metrics_address(worker)}/metrics"
        self._pipeline = pipeline
        self._over = threading.Event()
        self.durations: list[float] = []
        self.records: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        """By (vertex, subtask, direction): when a new value was seen, and the value."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(POLL_SECONDS):
                self._scrape()
        except BaseException as error:  # the test's thread raises it
            self.error = error

    def _scrape(self) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        began = time.monotonic()
        with urllib.request.urlopen(self._url, timeout=30) as response:
            text = response.read().decode()
        now = time.monotonic()
        self.durations.append(now - began)
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if name != "minishuffle_task_records_total" or labels["pipeline"] != self._pipeline:
                    continue
                key = labels["vertex"], labels["subtask"], labels["direction"]
                found = self.records.setdefault(key, [(began, value)])
                if value != found[-1][1]:
                    found.append((now, value))

    def end(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    def p95(self) -> float:
        return sorted(self.durations)[int(0.95 * (len(self.durations) - 1))]

    def gaps(self, until: float) -> dict[tuple[str, str, str], float]:
        """The longest time without an increase, of every counter that counted at all."""
        return {
            key: max(
                later - earlier
                for earlier, later in zip(
                    [at for at, _ in seen], [*(at for at, _ in seen[1:]), until], strict=True
                )
            )
            for key, seen in self.records.items()
            if seen[-1][1]
        }


def start_hogs(seen: Any, mode: str, count: int, seconds: float | None) -> Any:
    """``count`` subtasks of one job that hog on worker 1; gives the job once all of them do."""
    sink = Hog(seen.cluster.workers[1], mode, seconds)
    endless = Stream.generate(lambda start, number: list(range(start, start + number)), rate=2_000)
    job = endless.rebalance().map(abs).to(sink)
    return seen.cluster.submit(job, name=f"hogs-{mode}", parallelism=2 * count)


def lines(seen: Any, handle: Any, line: str) -> int:
    return sum(line in logged for logged in seen.cluster.client.logs(handle.id))


def watch_heartbeats(seen: Any, over: Callable[[], bool]) -> list[float]:
    """Ages of worker 1's heartbeat, looked at until it is over; the worker has to be alive at each look."""
    ages, end = [], time.monotonic() + 2 * HOG_SECONDS + 10
    while not over():
        assert time.monotonic() < end, "the hogs do not end"
        worker = seen.cluster.status().workers[0]
        assert worker.state == "alive"
        ages.append(worker.heartbeat_age_seconds)
        time.sleep(POLL_SECONDS)
    return ages


def test_other_jobs_heartbeats_and_scrapes_go_on_beside_code_that_never_yields(
    seen: Any, wait_until: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=5_000)
    quiet = endless.key_by(lambda number: number % 100).count(emit="batch").to_count()
    quiet_job = seen.cluster.submit(quiet, name="quiet", parallelism=2)
    wait_until(
        lambda: seen.total("minishuffle_network_buffers_total", 1, direction="in", path="remote"), "records"
    )
    probe = Probe(seen, 1, "quiet")
    probe.start()
    ages: list[float] = []
    for mode, count in (("sleep", 1), ("spin", 4)):
        hogs = start_hogs(seen, mode, count, HOG_SECONDS)
        wait_until(lambda hogs=hogs, count=count: lines(seen, hogs, "began") == count, f"{count} x {mode}")
        ages += watch_heartbeats(seen, lambda hogs=hogs, count=count: lines(seen, hogs, "ended") == count)
        hogs.cancel()
        assert hogs.wait_until_over(60).state == "canceled"
    now = time.monotonic()
    probe.end()
    gaps = probe.gaps(now)
    record_property("scrape_p95_seconds", probe.p95())
    print(
        f"scrapes {len(probe.durations)}, p95 {probe.p95():.3f} s, max {max(probe.durations):.3f} s; "
        f"heartbeat age max {max(ages):.2f} s; gaps {max(gaps.values()):.2f} s"
    )
    assert max(ages) < HEARTBEAT_TIMEOUT / 2
    assert len(gaps) == 2, "out of the source, into the count"
    assert max(gaps.values()) < GAP_SECONDS_MAX + POLL_SECONDS, gaps
    assert len(probe.durations) > 20
    assert probe.p95() < SCRAPE_P95_SECONDS_MAX
    assert quiet_job.info().state == "running"
    assert [worker.state for worker in seen.cluster.status().workers] == ["alive", "alive"]


def test_code_that_cannot_be_stopped_is_abandoned_and_too_much_of_it_ends_the_worker(
    seen: Any, wait_until: Callable[..., Any], is_running: Callable[[int], bool]
) -> None:
    pid = seen.cluster.workers[1]
    first = start_hogs(seen, "sleep", 2, None)
    wait_until(lambda: lines(seen, first, "began") == 2, "two hogs")
    first.cancel()
    assert first.wait_until_over(60).state == "canceled"
    states = sorted(task.state for task in first.info().tasks if task.state == "abandoned")
    assert states == ["abandoned"] * 2
    assert seen.total("minishuffle_abandoned_tasks_total", 1) == 2
    # Their slots are lost, the worker lives on and runs other jobs in the slots that are left.
    worker = seen.cluster.status().workers[0]
    assert (worker.state, worker.slots_free, worker.slots) == ("alive", SLOTS - 2, SLOTS)
    rows = seen.cluster.run(Stream.items([1, 2, 3, 4]).map(abs).collect(), parallelism=4, timeout=60)
    assert sorted(rows) == [1, 2, 3, 4]
    assert is_running(pid)

    second = start_hogs(seen, "sleep", 3, None)
    wait_until(lambda: lines(seen, second, "began") == 3, "three more hogs")
    second.cancel()
    second.wait_until_over(60)
    wait_until(lambda: not is_running(pid), "the end of worker 1, which had more than it may have")
    assert "5 tasks were abandoned, at most 4 may be" in seen.log("worker-1")
    wait_until(lambda: seen.cluster.status().workers[0].state in ("lost", "gone"), "the news of it")
    rows = seen.cluster.run(Stream.items([1, 2, 3, 4]).map(abs).collect(), timeout=60)
    assert sorted(rows) == [1, 2, 3, 4]

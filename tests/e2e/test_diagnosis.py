"""A running cluster looked into: diagnoses of sick and healthy jobs, dumps, traces, latency markers, ``top``.

``MINISHUFFLE_SOAK=1`` diagnoses five jobs of each cause and thirty healthy ones, ``MINISHUFFLE_SEED=n`` being
the first of their seeds. Other programs that take the processors make "a worker short of CPU" right for any,
which is accepted if they take a third; one test starts such programs itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.cli.main import cli
from minishuffle.config import read_token, web_token
from minishuffle.local import LocalCluster
from minishuffle.observe.diagnosis import ALSO_SHORT_OF_CPU, SHORT_OF_CPU
from minishuffle.plan.graph import JobSettings
from support.sickjobs import SICK, FailsOnce, SickJob, healthy, numbers
from support.soak import SOAK
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = int(os.environ.get("MINISHUFFLE_SEED", "1"))
WITHOUT_SOAK = ("slow sink", "skewed key")
"""Their jobs wait rather than compute, so that the cause is found on a busy machine too."""
CASES = (
    [(rule, seed) for rule in SICK for seed in range(SEED, SEED + 5)]
    if SOAK
    else [(rule, SEED) for rule in WITHOUT_SOAK]
)
HEALTHY = range(SEED, SEED + 30) if SOAK else range(SEED, SEED + 1)
SECONDS = "3" if SOAK else "1.5"
SCREEN_BYTES_MAX = 1 << 20
PROGRAM_SECONDS_MAX = 60.0
TAKEN_FROM = 0.3
"""Share of the machine's processors."""


@pytest.fixture(scope="module")
def seen(watch: Any) -> Iterator[Any]:
    with LocalCluster(workers=2, slots=4, segment_bytes=8192) as cluster:
        cluster.status()  # The client connects at first use.
        yield watch(cluster)


@pytest.fixture(autouse=True)
def _calm(seen: Any) -> Iterator[None]:
    yield
    seen.calm()


def command(seen: Any, *arguments: str, code: int = 0) -> str:
    """What the command prints; if it is to fail, why."""
    ran = CliRunner().invoke(cli, [*seen.flags, *arguments], prog_name="minishuffle")
    assert ran.exit_code == code, ran.output
    return ran.stdout if not code else ran.stderr


def reported(seen: Any) -> dict[int, float]:
    """When each worker last said what its process does, on its own clock."""
    return {each.worker: each.report.clock_seconds for each in seen.cluster.status().workers}


def submitted(seen: Any, made: SickJob) -> str:
    """The job, once no report is of the time of the job before: garbage counts for the whole worker."""
    before = reported(seen)
    until(lambda: all(at > before[worker] for worker, at in reported(seen).items()), "reports of the workers")
    handle = seen.cluster.submit(made.stream, parallelism=made.parallelism, settings=made.settings)
    return str(handle.id)


def diagnosed(seen: Any, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(seen, "diagnose", job, "--seconds", SECONDS, "--json"))
    assert list(found) == ["job", "verdict", "task", "rule", "evidence", "advice"]
    assert found["job"] == job
    return found


class Others:
    """The processor time that the rest of the machine takes, from now on."""

    def __init__(self, seen: Any) -> None:
        status = seen.cluster.status()
        pids = [os.getpid(), status.pid, *(worker.pid for worker in status.workers)]
        self._ours = [psutil.Process(pid) for pid in pids]
        self._begun = self._look()

    def _look(self) -> tuple[float, float, float]:
        """Seconds of all processors in all, idle, and of ours."""
        times = psutil.cpu_times()
        ours = sum(sum(process.cpu_times()[:2]) for process in self._ours)
        return sum(times[:8]), times.idle + times.iowait, ours

    def explain(self, found: dict[str, Any]) -> bool:
        """The diagnosis is that a worker is short of CPU, and they did take it."""
        total, idle, ours = (now - was for now, was in zip(self._look(), self._begun, strict=True))
        taken = (total - idle - ours) / total
        print(f"{found['rule']}: others took {taken:.0%} of the processors")
        return SOAK and found["rule"] == SHORT_OF_CPU and taken >= TAKEN_FROM


@pytest.mark.parametrize(("rule", "seed"), CASES)
def test_what_was_made_sick_is_named(seen: Any, wait_until: Callable[..., Any], rule: str, seed: int) -> None:
    made = SICK[rule](Random(f"{rule} {seed}"))
    others = Others(seen)
    job = submitted(seen, made)
    # Buffers fill up and hot keys are sampled first.
    found = wait_until(lambda: each if (each := diagnosed(seen, job))["verdict"] != "healthy" else None, rule)
    if others.explain(found):
        return
    if rule == "skewed key":
        found = wait_until(
            lambda: each if (each := diagnosed(seen, job))["evidence"].get("hot_keys") else None, "hot keys"
        )
        assert found["evidence"]["hot_keys"][0]["key"] == made.hot_key
    assert found["rule"] == rule, found
    assert made.vertex in found["task"], found
    if made.subtask is not None:
        assert found["task"].endswith(f"[{made.subtask}]"), found


@contextlib.contextmanager
def programs_that_compute(count: int) -> Iterator[None]:
    text = f"import time\nend = time.monotonic() + {PROGRAM_SECONDS_MAX}\nwhile time.monotonic() < end: pass"
    programs = [subprocess.Popen([sys.executable, "-c", text]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait(10)


@pytest.mark.alone
@pytest.mark.parametrize("seed", range(SEED, SEED + 5) if SOAK else [SEED])
def test_workers_whose_processors_others_take_are_named(
    seen: Any, wait_until: Callable[..., Any], seed: int
) -> None:
    random = Random(f"{SHORT_OF_CPU} {seed}")
    made = SICK["slow function"](random)
    processors = os.cpu_count() or 1
    with programs_that_compute(processors * random.randrange(3, 6)):
        job = submitted(seen, made)
        found = wait_until(
            lambda: each if lacks_a_processor(each := diagnosed(seen, job)) else None, SHORT_OF_CPU
        )
    assert made.vertex in found["task"], found


def lacks_a_processor(found: dict[str, Any]) -> bool:
    """By the rule, or beside a function that would be too slow on a processor of its own, too."""
    return found["rule"] == SHORT_OF_CPU or ALSO_SHORT_OF_CPU in found["advice"]


@pytest.mark.parametrize("seed", HEALTHY)
def test_nothing_is_found_in_a_healthy_job(seen: Any, wait_until: Callable[..., Any], seed: int) -> None:
    job = submitted(seen, healthy(Random(f"healthy {seed}")))
    wait_until(
        lambda: sum(task.counters.records_in for task in seen.cluster.client.job(job).tasks), "records"
    )
    others = Others(seen)
    found = diagnosed(seen, job)
    if others.explain(found):
        return
    assert (found["verdict"], found["task"], found["rule"]) == ("healthy", "", "none"), found


def test_what_does_not_run_is_not_diagnosed_and_of_several_jobs_one_is_to_be_named(seen: Any) -> None:
    assert "no job runs" in command(seen, "diagnose", code=2)
    jobs = [seen.cluster.submit(healthy(Random(1)).stream, parallelism=2).id for _ in range(2)]
    assert f"several jobs run, {', '.join(jobs)}: name one of them" in command(seen, "diagnose", code=2)
    seen.calm()
    assert f"job {jobs[0]} is canceled" in command(seen, "diagnose", jobs[0], code=2)
    assert "there is no job 'j99'" in command(seen, "dump", "j99", code=2)


def test_a_worker_that_is_stopped_is_named_in_a_dump_and_the_others_answer(seen: Any) -> None:
    one, two = sorted(seen.cluster.workers)
    seen.cluster.kill_worker(two, signal.SIGSTOP)
    try:
        found = json.loads(command(seen, "dump", "--json"))
        text = command(seen, "dump")
    finally:
        seen.cluster.kill_worker(two, signal.SIGCONT)
    assert ([each["worker"] for each in found["workers"]], found["silent"]) == ([one], [two])
    assert f"worker {two} did not answer: its event loop is held up, or the process is stopped" in text
    assert json.loads(command(seen, "dump", "--worker", str(two), "--json"))["workers"][0]["worker"] == two


def test_a_channel_between_two_workers_is_traced(seen: Any, wait_until: Callable[..., Any]) -> None:
    stream = Stream.generate(numbers, rate=500).key_by(lambda row: row % 10).count(emit="batch").to_count()
    handle = seen.cluster.submit(stream, parallelism=2)
    wait_until(lambda: all(task.counters.records_in for task in handle.info().tasks if task.operator), "rows")
    workers = {(task.operator, task.index): task.worker for task in handle.info().tasks}
    remote = next(index for index in (0, 1) if workers[0, index] != workers[1, 0])
    out = command(seen, "trace", handle.id, "--channel", f"0.{remote}:1.0", "--frames", "20", "--json")
    frames = [json.loads(line) for line in out.splitlines()]
    assert len(frames) == 20 and {"buffer_response"} <= {frame["frame"] for frame in frames}
    assert not any("payload" in frame for frame in frames)
    text = command(seen, "trace", handle.id, "--channel", f"0.{remote}:1.0", "--frames", "3")
    assert len(text.splitlines()) == 3 and "buffer_response (generation 1): sequence" in text
    local = command(seen, "trace", handle.id, "--channel", f"0.{1 - remote}:1.0", code=2)
    assert "exchange segments without frames" in local
    assert "has no such channel" in command(seen, "trace", handle.id, "--channel", "0.9:1.0", code=2)


def posted(seen: Any, path: str, token: str) -> tuple[int, Any]:
    """Status and JSON of a request that changes or shows what takes the token."""
    url = f"http://127.0.0.1:{seen.cluster.web_port}/api/v1/{path}"
    request = urllib.request.Request(url, method="POST", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_rows_that_cross_an_edge_are_shown_to_who_has_the_token(seen: Any) -> None:
    secret = (seen.cluster.state_dir / "secret").read_bytes().strip()
    stream = Stream.generate(numbers, rate=100).key_by(lambda row: row % 10).count(emit="batch").to_count()
    handle = seen.cluster.submit(stream, parallelism=2)
    path = f"jobs/{handle.id}/tap?edge=0"
    assert posted(seen, path, read_token(secret))[0] == 401
    status, found = posted(seen, path, web_token(secret))
    assert status == 200 and len(found["rows"]) == limits.TAP_ROWS
    consumers: dict[str, int] = {}
    for row in found["rows"]:
        (key,) = row["values"]  # To count rows, no more than that is sent.
        assert key in map(str, range(10)) and row["producer"] in (0, 1)
        assert consumers.setdefault(key, row["consumer"]) == row["consumer"]
    lines = command(seen, "tap", handle.id).splitlines()
    assert len(lines) == limits.TAP_ROWS and "=> " in lines[0]
    assert json.loads(command(seen, "tap", handle.id, "--json"))["producers"] == 2
    assert "has no edge 7; its edges: 0" in command(seen, "tap", handle.id, "--edge", "7", code=2)


def test_a_profile_names_the_slow_function(seen: Any, wait_until: Callable[..., Any], tmp_path: Path) -> None:
    handle = seen.cluster.submit(SICK["slow function"](Random(SEED)).stream, parallelism=2)
    wait_until(lambda: all(task.counters.records_in for task in handle.info().tasks if task.operator), "rows")
    out = command(seen, "profile", handle.id, "--task", "map[0]", "--seconds", "1", "--json")
    found = json.loads(out)
    assert (found["task"], found["state"], sum(found["samples"].values())) == ("map[0]", "ended", 50)
    text = command(seen, "profile", handle.id, "--seconds", "0.5", "--rate", "100")
    first, samples, _, heading, top, *_ = text.splitlines()
    assert first.startswith("map[") and ": the busiest of the job, " in first
    assert samples.startswith("50 samples in ")
    assert heading.split() == ["own", "all", "function", "place"]
    assert "burning.<locals>.burn" in top and "support/sickjobs.py:" in top, text
    file = tmp_path / "folded"
    command(seen, "profile", handle.id, "--task", "map[1]", "--seconds", "0.2", "--folded", str(file))
    folded = file.read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in folded) == 10
    assert any(
        re.match(r"map;.*burning\.<locals>\.burn \(.*support/sickjobs.py:\d+\)", each) for each in folded
    )
    assert "did you mean 'map'?" in command(seen, "profile", handle.id, "--task", "mapp[0]", code=2)


def test_latency_markers_are_no_rows_and_go_on_after_a_recovery(
    seen: Any, wait_until: Callable[..., Any]
) -> None:
    settings = JobSettings(latency_interval=0.02, latency_granularity="subtask")
    stream = Stream.generate(numbers, rate=200).key_by(lambda row: row % 50).count(emit="batch")
    handle = seen.cluster.submit(stream.to(FailsOnce()), parallelism=2, settings=settings)
    wait_until(lambda: sum(handle.info().restarts.values()) >= 2, "restarts of both")

    def again() -> bool:
        tasks = [task for task in handle.info().tasks if task.operator == 1]
        return all(task.attempt == 2 and task.counters.latency.get("count", 0.0) > 5 for task in tasks)

    wait_until(again, "markers in the attempts that took the place")
    shown = command(seen, "jobs", "show", handle.id)
    assert "latency of" in shown and "p99" in shown
    for source in ("0.0", "0.1"):
        wait_until(
            lambda source=source: seen.total("minishuffle_latency_seconds_count", source=source) > 0,
            f"markers of source {source}",
        )
    handle.cancel()
    info = handle.wait_until_over(30)
    sent = sum(task.counters.records_out for task in info.tasks if task.operator == 0)
    read = sum(task.counters.records_in for task in info.tasks if task.operator == 1)
    lost = sum(info.rows_dropped.values()) + info.rows_in_flight
    assert read <= sent <= read + lost + 2_000, (
        "a marker is no row; what was under way at the end is not read"
    )


def test_top_is_a_screen_in_a_terminal_and_tables_where_there_is_none(
    seen: Any, wait_until: Callable[..., Any]
) -> None:
    job = submitted(seen, healthy(Random(3)))
    words = [sys.executable, "-m", "minishuffle.cli", *seen.flags, "top", job]
    main, side = pty.openpty()
    screen = b""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env=environment)
    os.close(side)
    try:
        os.set_blocking(main, False)

        def shown(times: int) -> bool:
            nonlocal screen
            with contextlib.suppress(BlockingIOError):
                screen += os.read(main, SCREEN_BYTES_MAX)
            return screen.count(b"back-pressured") >= times

        wait_until(lambda: shown(3), "three screens")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            screen += os.read(main, SCREEN_BYTES_MAX)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert b"\x1b[?25l" in screen and screen.rstrip().endswith(b"\x1b[?25h"), "the cursor is hidden, and back"
    assert b"\x1b[1A" in screen, "each table is drawn upon the one before"
    assert f"{job} (job)".encode() in screen

    plain = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert plain.stdout is not None
    lines = [plain.stdout.readline() for _ in range(6)]
    plain.send_signal(signal.SIGINT)
    rest, error = plain.communicate(timeout=30)
    assert plain.returncode == 0, error
    assert "\x1b" not in "".join(lines) + rest and lines[0].startswith("job ")
    assert sum(line.startswith("job ") for line in lines) >= 2, "one table below the other"

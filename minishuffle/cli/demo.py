"""``minishuffle demo``: a cluster, a checked word count, a keyBy job with its metrics, a worker killed under
a join that goes on and loses nothing, and Spark's data through a join and back."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from minishuffle.cli import tables
from minishuffle.cli.loading import load_pipeline
from minishuffle.cli.ownprocesses import is_minishuffle
from minishuffle.cli.pipeline import show_outcome, started_spark
from minishuffle.cli.session import late_global_options
from minishuffle.cli.tables import byte_text, rate_text
from minishuffle.client import OVER, JobHandle
from minishuffle.console import console, new_table
from minishuffle.errors import (
    ShuffleError,
    UsageError,
    text_of,
)
from minishuffle.examples.ads import audit_pairs, pairs
from minishuffle.examples.keyby import keyby
from minishuffle.examples.wordcount import SHIPPED_TEXT, wordcount, words
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from minishuffle.pipelines import DataDirectory
from minishuffle.pipelines.run import run_once
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import JobInfo

__all__ = ["READINGS", "Reading", "Samples", "demo", "scrape", "total"]


# --- scrape ---------------------------------------------------------------------------------------
#
# Reading the workers' ``/metrics``, and a dozen gauges that show how a job is doing.


Samples: TypeAlias = "list[tuple[str, dict[str, str], float]]"
"""(sample name, labels, value) of all workers together."""

SCRAPE_SECONDS = 2.0


def scrape(targets: Sequence[Address]) -> Samples:
    """Ask every worker once.

    Raises:
        OSError: one does not answer.
    """
    samples: Samples = []
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=SCRAPE_SECONDS) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of a sample over workers and tasks, of those series that have these labels."""
    wanted = labels.items()
    return sum(value for found, has, value in samples if found == name and wanted <= has.items())


@dataclass(frozen=True, slots=True)
class Reading:
    """One line of the display. ``rate``: growth per second of a counter, else the value itself."""

    text: str
    metric: str
    labels: dict[str, str]
    show: Callable[[float], str]
    rate: bool = False

    def value(self, before: Samples, now: Samples, seconds: float) -> float:
        reading = total(now, self.metric, **self.labels)
        if self.rate:
            return (reading - total(before, self.metric, **self.labels)) / seconds
        return reading


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bytes_rate(value: float) -> str:
    return f"{byte_text(value)}/s"


def _seconds_rate(value: float) -> str:
    return f"{value:.2f} threads"


_RECORDS = "minishuffle_task_records_total"
_BYTES = "minishuffle_network_bytes_total"
_BUFFERS = "minishuffle_network_buffers_total"
_TIME = "minishuffle_task_time_seconds_total"

READINGS: tuple[Reading, ...] = (
    Reading("records emitted", _RECORDS, {"direction": "out"}, rate_text, rate=True),
    Reading("records taken in", _RECORDS, {"direction": "in"}, rate_text, rate=True),
    Reading("over TCP", _BYTES, {"direction": "out", "path": "remote"}, _bytes_rate, rate=True),
    Reading("inside a worker", _BYTES, {"direction": "out", "path": "local"}, _bytes_rate, rate=True),
    Reading("buffers over TCP", _BUFFERS, {"direction": "out", "path": "remote"}, rate_text, rate=True),
    Reading("credits granted", "minishuffle_credits_total", {"direction": "granted"}, rate_text, rate=True),
    Reading("data connections", "minishuffle_connections", {}, _count),
    Reading("network segments used", "minishuffle_network_segments", {"state": "used"}, _count),
    Reading("network segments free", "minishuffle_network_segments", {"state": "free"}, _count),
    Reading("buffers waiting for tasks", "minishuffle_input_queue_buffers", {}, _count),
    Reading("buffers waiting for credit", "minishuffle_output_backlog_buffers", {}, _count),
    Reading("channels out of credit", "minishuffle_channels_starved", {}, _count),
    Reading("busy", _TIME, {"state": "busy"}, _seconds_rate, rate=True),
    Reading("back-pressured", _TIME, {"state": "backpressured_hard"}, _seconds_rate, rate=True),
    Reading("memory of the workers", "process_resident_memory_bytes", {}, byte_text),
)

# --- demo -----------------------------------------------------------------------------------------

WORKERS, SLOTS = 3, 2
WORDCOUNT_SECONDS = 25.0
KEYBY_SECONDS = 6.0
FLIGHTS_MASTER = "local[5]"
"""A slot for each split of both inputs, however many processors there are."""
FLIGHTS_PARALLELISM = 3
JOIN_PARALLELISM = 4
JOINED = "join -> to_files"
JOIN_RATE = 20_000
WITHIN_SECONDS = 0.5
BEFORE_SECONDS, JOIN_SECONDS = 3.0, 8.0
"""How long the join is watched before its worker is killed, and for how long its inputs come."""
JOIN_TIMEOUT = 60.0
SAMPLE_SECONDS = 0.2
TIMELINE = ("task lost", "task deployed", "snapshot read", "first record", "replayed", "caught up")
"""Events of a recovery that are shown."""
BARS = " ▁▂▃▄▅▆▇█"
CANCEL_SECONDS = 15.0
REFRESH_SECONDS = 1.0
NEXT_COMMANDS = (
    "minishuffle cluster up --detach",
    "minishuffle submit keyby",
)
NEXT_WITH_SPARK = "minishuffle pipeline run flights"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``text`` is what was found; ``ok`` whether that is what should be."""

    ok: bool
    text: str


def run_wordcount(cluster: LocalCluster, out: Console) -> Verdict:
    """Count the words of the shipped text and compare with plain Python."""
    expected = Counter(word for line in SHIPPED_TEXT.read_text().splitlines() for word in words(line))
    rows = cluster.run(wordcount(), timeout=WORDCOUNT_SECONDS)
    table = new_table(["word", "count"], ["count"])
    for word, count in sorted(rows, key=lambda row: (-row[1], row[0]))[:5]:
        table.add_row(word, f"{count:,}")
    out.print(table)
    counted = sum(count for _, count in rows)
    if len(rows) != len(expected) or dict(rows) != expected:
        return Verdict(False, f"differs from plain Python: {counted:,} words, not {expected.total():,}")
    return Verdict(True, f"{counted:,} words, {len(rows):,} different, equal to plain Python's count")


def run_keyby(cluster: LocalCluster, out: Console) -> Verdict:
    """Run the endless job for some seconds, show what the workers' metrics say, and cancel it."""
    targets = [Address(worker.host, worker.metrics_port) for worker in cluster.status().workers]
    handle = cluster.submit(keyby(), name="keyby")
    first = before = scrape(targets)
    began = then = time.monotonic()
    with Live(console=out, auto_refresh=False) as live:
        while time.monotonic() - began < KEYBY_SECONDS:
            time.sleep(REFRESH_SECONDS)
            info = handle.info()
            if info.state not in ("created", "running"):
                break
            samples, now = scrape(targets), time.monotonic()
            live.update(_readings(before, samples, now - then), refresh=True)
            before, then = samples, now
    handle.cancel()
    info = handle.wait_until_over(CANCEL_SECONDS)
    if info.state != "canceled":
        cause = info.causes[0].text if info.causes else "no cause given"
        return Verdict(False, f"ended as {info.state} instead of being cancelled: {cause}")
    return _judge(first, before, then - began)


def _judge(first: Samples, last: Samples, seconds: float) -> Verdict:
    """Records must have reached tasks, and some of them over TCP."""
    emitted = total(last, "minishuffle_task_records_total", direction="out")
    taken = total(last, "minishuffle_task_records_total", direction="in")
    remote = total(last, "minishuffle_network_bytes_total", direction="out", path="remote")
    remote -= total(first, "minishuffle_network_bytes_total", direction="out", path="remote")
    text = (
        f"{tables.rate_text(emitted / seconds)} records, {tables.byte_text(remote)} over TCP, then cancelled"
    )
    return Verdict(taken > 0 and remote > 0, text)


def _readings(before: Samples, now: Samples, seconds: float) -> Table:
    table = new_table(["what", "all workers", "metric"], ["all workers"])
    for reading in READINGS:
        labels = ",".join(f'{name}="{value}"' for name, value in reading.labels.items())
        name = f"{reading.metric}{{{labels}}}" if labels else reading.metric
        table.add_row(reading.text, reading.show(reading.value(before, now, seconds)), name)
    return table


def run_recovery(cluster: LocalCluster, out: Console) -> Verdict:
    """Kill a worker under a running join that is to lose nothing, show what the lost subtasks and the others
    take in, and compare what the join has written with plain Python."""
    records = int(JOIN_RATE * JOIN_SECONDS)
    joined = pairs(JOIN_RATE, records, WITHIN_SECONDS).to_files(cluster.state_dir / "pairs", seconds=1)
    settings = JobSettings(guarantee="at_least_once")
    handle = cluster.submit(joined, name="ads", parallelism=JOIN_PARALLELISM, settings=settings)
    try:
        before = _until_all_run(handle)
        victim = max(task.worker for task in before.tasks)
        end = time.monotonic() + BEFORE_SECONDS
        rates = _watched(cluster, lambda: time.monotonic() > end)
        killed = time.time()
        cluster.kill_worker(victim)
        deadline = time.monotonic() + JOIN_TIMEOUT
        rates += _watched(cluster, lambda: time.monotonic() > deadline or handle.info().state in OVER)
    finally:
        with contextlib.suppress(UsageError):  # It has finished, as it should.
            handle.cancel()
        after = handle.wait_until_over(CANCEL_SECONDS)
    lost = {task.index for task in before.tasks if task.worker == victim}
    _show_rates(out, rates, lost)
    again = 0.0
    for event in handle.events():
        if event.at >= killed and event.kind in TIMELINE:
            passed = 1000 * (event.at - killed)
            again = max(again, passed) if event.kind == "first record" else again
            out.print(f"{passed:7.0f} ms  {event.kind}: {event.text}", highlight=False)
    attempts = {(task.operator, task.index): task.attempt for task in before.tasks}
    changed = [task for task in after.tasks if task.attempt > attempts[task.operator, task.index]]
    found = audit_pairs((file.path for file in handle.files()), records, WITHIN_SECONDS)
    text = (
        f"worker {victim} killed: its {len(changed)} tasks ran again after {again:.0f} ms, the other "
        f"{len(after.tasks) - len(changed)} ran on; of {records:,} rows {found.lost:,} are lost, "
        f"{found.again:,} came twice, {found.wrong:,} differ from plain Python's"
    )
    is_whole = after.state == "finished" and not any(found)
    return Verdict(is_whole and {task.index for task in changed} == lost, text)


def _until_all_run(handle: JobHandle) -> JobInfo:
    deadline = time.monotonic() + CANCEL_SECONDS
    while True:
        info = handle.info()
        if all(task.state == "running" for task in info.tasks):
            return info
        if time.monotonic() > deadline or info.state not in ("created", "running"):
            raise ShuffleError(f"job {info.job} ({info.name}) is {info.state} and not all of its tasks run")
        time.sleep(SAMPLE_SECONDS / 4)


def _watched(cluster: LocalCluster, is_over: Callable[[], bool]) -> list[dict[int, float]]:
    """Records that each subtask of the join has taken in so far, looked up again and again."""
    found: list[dict[int, float]] = []
    while not is_over():
        taken: dict[int, float] = {}
        for worker in cluster.status().workers:
            with contextlib.suppress(OSError):  # The one that was killed does not answer.
                for name, labels, value in scrape([Address(worker.host, worker.metrics_port)]):
                    if (name, labels.get("vertex"), labels.get("direction")) == (_RECORDS, JOINED, "in"):
                        taken[int(labels["subtask"])] = value
        found.append(taken)
        time.sleep(SAMPLE_SECONDS)
    return found


def _show_rates(out: Console, taken: list[dict[int, float]], lost: set[int]) -> None:
    """Bars over time for the subtasks that were lost and for the others; a counter that fell began anew."""
    for name, subtasks in (("lost", lost), ("the others", set(range(JOIN_PARALLELISM)) - lost)):
        grown = [
            sum(max(0.0, now.get(index, 0.0) - before.get(index, 0.0)) for index in subtasks)
            for before, now in zip(taken, taken[1:], strict=False)
        ]
        most = max(grown) or 1.0
        bars = "".join(BARS[round(each / most * (len(BARS) - 1))] for each in grown)
        out.print(f"records taken in by {name:<11} {bars}", highlight=False)


def run_flights(cluster: LocalCluster, out: Console) -> Verdict:
    """Flights and weather from Spark through the join and back, held against Spark's own answer."""
    found = load_pipeline("flights").build(())
    data = DataDirectory(cluster.state_dir / "flights")
    answers = str(cluster.state_dir / "answers")
    out.print("starting Spark …")
    with started_spark("minishuffle demo", FLIGHTS_MASTER) as spark:
        options = cluster.spark_options()
        outcome = run_once(
            found, spark, cluster.client, options, data, output=answers, parallelism=FLIGHTS_PARALLELISM
        )
        show_outcome(found, outcome, answers, as_json=False)
    verdict = outcome.verdict
    assert verdict is not None
    rate = tables.rate_text(outcome.rows_per_second)
    return Verdict(verdict.equal, f"{verdict}; {rate} rows in")


STAGES: dict[str, tuple[str, Callable[[LocalCluster, Console], Verdict]]] = {
    "wordcount": ("counting the words of Alice's Adventures in Wonderland", run_wordcount),
    "keyby": ("20,000 records a second by key, until cancelled", run_keyby),
    "recovery": ("a worker killed under a join of two streams that is to lose nothing", run_recovery),
    "flights": ("New York's flights of 2013 joined with the weather, from Spark and back", run_flights),
}


@click.command()
@click.option(
    "--only", type=click.Choice(list(STAGES)), multiple=True, help="Only this stage; may be repeated."
)
@click.option("--keep", is_flag=True, help="Keep the cluster, with a job that runs, until Ctrl-C.")
@late_global_options
@click.pass_context
def demo(context: click.Context, only: tuple[str, ...], keep: bool) -> None:
    """See it work: a cluster of 3 workers, a checked word count, a keyBy job with its metrics, a worker
    killed under a join, and flights from Spark joined with the weather and held against Spark's answer."""
    out = console()
    results: list[tuple[str, Verdict, float]] = []
    began = time.monotonic()
    out.print(f"starting a cluster of {WORKERS} workers x {SLOTS} slots …")
    with LocalCluster(workers=WORKERS, slots=SLOTS) as cluster:
        text = f"worker processes {', '.join(map(str, cluster.workers.values()))}"
        results.append(("cluster", Verdict(True, text), time.monotonic() - began))
        page = f"http://{Address(cluster.client.address.host, cluster.web_port)}/"
        out.print(f"its web page: {page}")
        for name in only or STAGES:
            title, run = STAGES[name]
            out.print(f"\n{name}: {title}")
            began = time.monotonic()
            results.append((name, _judged(run, cluster, out), time.monotonic() - began))
        if keep:
            _keep(cluster, out, page)
        pids, directory = list(cluster.workers.values()), cluster.state_dir
        began = time.monotonic()
    left = [pid for pid in pids if is_minishuffle(pid)] or directory.exists()
    text = "something is left behind" if left else "all processes ended, state removed"
    results.append(("clean-up", Verdict(not left, text), time.monotonic() - began))
    _last_screen(out, results)
    context.exit(0 if all(verdict.ok for _, verdict, _ in results) else 1)


def _keep(cluster: LocalCluster, out: Console, page: str) -> None:
    """Leave time to look at the page, with something to see."""
    with contextlib.suppress(KeyboardInterrupt):
        cluster.submit(keyby(), name="keyby")
        out.print(f"\nthe cluster stays, with a keyBy job: {page}\nCtrl-C ends it.")
        while True:
            time.sleep(REFRESH_SECONDS)


def _judged(run: Callable[[LocalCluster, Console], Verdict], cluster: LocalCluster, out: Console) -> Verdict:
    try:
        return run(cluster, out)
    except (ShuffleError, OSError) as error:  # A TimeoutError is an OSError.
        out.print(text_of(error))
        return Verdict(False, text_of(error).splitlines()[0])


def _last_screen(out: Console, results: list[tuple[str, Verdict, float]]) -> None:
    table = new_table(["stage", "verdict", "seconds", "what was seen"], ["seconds"])
    for name, verdict, seconds in results:
        table.add_row(name, "ok" if verdict.ok else "FAILED", f"{seconds:.1f}", verdict.text)
    out.print()
    out.print(table)
    with_spark = any(name == "flights" for name, _, _ in results)
    out.print("\n  ".join(["\nnext:", *NEXT_COMMANDS, *([NEXT_WITH_SPARK] if with_spark else [])]))

"""``minishuffle top``: how busy and how back-pressured each vertex of the running jobs is, and its rates.

Loads come from two looks at what heartbeats have carried: see :mod:`~minishuffle.observe.loads`. Their levels
are those of the last half minute, by which ``diagnose`` judges too. Pools and
channels come from the workers that run the job.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from minishuffle.cli.completion import complete_job
from minishuffle.cli.session import json_option, late_global_options, print_json, session_of
from minishuffle.cli.tables import rate_text
from minishuffle.cli.vertexchannels import channel_maps, channel_table, pool_maps, pool_table
from minishuffle.client import Client
from minishuffle.console import console, new_table
from minishuffle.errors import UsageError
from minishuffle.observe.diagnosis import Judged, Link, level_loads, links_of
from minishuffle.observe.loads import Level, vertex_loads
from minishuffle.observe.vertices import vertex_number
from minishuffle.wire.inquiries import AskWorkers
from minishuffle.wire.requests import JobInfo

__all__ = ["looks", "top"]

SPAN_SECONDS: Final = 1.0
"""The time of a subtask that is looked at, at least."""
LOOK_SECONDS: Final = 0.25
"""Between looks at subtasks that have not reported so much yet: heartbeats come every half second."""
LOOKS_SECONDS_MAX: Final = 10.0
"""After which subtasks of which nothing was heard count with what there is."""

_STYLES: Final[dict[Level, str]] = {"OK": "", "LOW": "yellow", "HIGH": "red", "BEHIND": "red"}


class WatchedCluster(Protocol):
    """What is asked of the client."""

    def job(self, job: str, /) -> JobInfo: ...

    def jobs(self, *, tasks: bool) -> list[JobInfo]: ...


@dataclass(frozen=True, slots=True)
class _Span:
    """What is shown at once of jobs, and what workers hold of the chosen vertex."""

    jobs: list[tuple[JobInfo, Judged]]
    """With the loads between the two looks, and the levels of the last half minute."""
    vertex: int | None
    workers: list[dict[str, Any]]
    silent: list[int]


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("--vertex", help="Show the pools and channels of this vertex of JOB, too: a name or a number.")
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
@late_global_options
@click.pass_context
def top(context: click.Context, job: str | None, vertex: str | None, once: bool, as_json: bool) -> None:
    """Show what the vertices of JOB, or of all running jobs, do now; Ctrl-C ends it.

    A vertex is as back-pressured as the most back-pressured of its subtasks: OK up to a tenth of its time,
    HIGH from a half on. The one that is busy behind others that are HIGH throttles the job. While none is
    back-pressured, one that is busy all the time and takes fewer records than are sent to it is BEHIND: the
    rest waits in buffers, and 'minishuffle diagnose' says why. The level is of the last half minute, as in
    'diagnose'; the numbers are of the last second.

    With --vertex, channels are written PRODUCER:CONSUMER, each as OPERATOR.INDEX. The credit of an input is
    what it has announced and the producer has not used; that of an output is what it holds. Channels within
    a worker have none, nor have those of a job with flow_control=tcp.
    """
    if as_json and not once:
        raise UsageError("--json shows one look: add --once")
    if vertex is not None and job is None:
        raise UsageError("--vertex is of one job: name it, as in 'minishuffle top j1 --vertex 1'")
    session = session_of(context)
    with session.client() as client:
        if job is None and not _running(client, None):
            raise session.no_job_runs()
        spans = _spans(client, job, vertex)
        if as_json:
            span = next(spans)
            print_json({"jobs": [_job_map(*each) | _vertex_map(span) for each in span.jobs]})
        elif once:
            console().print(_shown(next(spans)))
        else:
            _show_live(spans)


def _show_live(spans: Iterator[_Span]) -> None:
    """Until the jobs have ended or Ctrl-C; one table below the other where there is no terminal."""
    out = console()
    with contextlib.suppress(KeyboardInterrupt):
        if not out.is_terminal:
            for span in spans:
                out.print(_shown(span))
            return
        with Live(console=out, auto_refresh=False) as live:
            for span in spans:
                live.update(_shown(span), refresh=True)


def _spans(client: Client, job: str | None, vertex: str | None) -> Iterator[_Span]:
    """Each two looks, with what workers hold of the vertex.

    Raises:
        UsageError: as :func:`looks`, or the job has no such vertex.
    """
    chosen: int | None = None
    links: dict[str, list[Link]] = {}
    for before, after in looks(client, job):
        links |= {each.job: links_of(client.graph(each.job)) for each in after if each.job not in links}
        workers: list[dict[str, Any]] = []
        silent: list[int] = []
        if vertex is not None:
            chosen = vertex_number(before[0], vertex)
            answered = client.ask_workers(AskWorkers(job=before[0].job))
            workers, silent = [json.loads(each) for each in answered.answers.values()], answered.silent
        jobs = [
            (now, level_loads(vertex_loads(was, now), client.job(now.job, earlier=True), now, links[now.job]))
            for was, now in zip(before, after, strict=True)
        ]
        yield _Span(jobs, chosen, workers, silent)


def looks(client: WatchedCluster, job: str | None) -> Iterator[tuple[list[JobInfo], list[JobInfo]]]:
    """Two looks at the same jobs, again and again while any runs. A look ends one pair and begins the next.

    Raises:
        UsageError: none runs.
    """
    before = _looked(client, _running(client, job))
    if not before:
        if job is None:
            raise UsageError("no job runs")
        state = client.job(job).state
        raise UsageError(f"job {job} is {state}: 'minishuffle jobs show {job}' has its totals")
    while before:
        after = _later(client, before)
        yield before, after
        seen = {each.job: each for each in after}
        names = _running(client, job)
        seen |= {each.job: each for each in _looked(client, [name for name in names if name not in seen])}
        before = [seen[name] for name in names]


def _running(client: WatchedCluster, job: str | None) -> list[str]:
    found = client.jobs(tasks=False) if job is None else [client.job(job)]
    return [each.job for each in found if each.state in ("created", "running")]


def _looked(client: WatchedCluster, names: list[str]) -> list[JobInfo]:
    return [client.job(name) for name in names]


def _later(client: WatchedCluster, before: list[JobInfo]) -> list[JobInfo]:
    """The next look at those jobs at which every subtask that runs has reported enough time."""
    deadline = time.monotonic() + LOOKS_SECONDS_MAX
    time.sleep(SPAN_SECONDS)
    while True:
        after = _looked(client, [job.job for job in before])
        pairs = [
            (was, now)
            for earlier, later in zip(before, after, strict=True)
            for was, now in zip(earlier.tasks, later.tasks, strict=True)
            if now.state == "running"
        ]
        if all(now.counters.seconds - was.counters.seconds >= SPAN_SECONDS for was, now in pairs):
            return after
        if time.monotonic() > deadline:
            return after
        time.sleep(LOOK_SECONDS)


def _job_map(job: JobInfo, found: Judged) -> dict[str, object]:
    behind = found.behind
    return {
        "job": job.job,
        "name": job.name,
        "state": job.state,
        "vertices": [asdict(load) for load in found.loads],
        "falls_behind": None if behind is None else {"task": behind.task.name, "why": behind.text},
        "waits": [wait.text for wait in job.deploy_waits],
    }


def _vertex_map(span: _Span) -> dict[str, object]:
    """Pools and channels of the chosen vertex, if one is."""
    if span.vertex is None:
        return {}
    pools, channels = pool_maps(span.workers, span.vertex), channel_maps(span.workers, span.vertex)
    return {"vertex": span.vertex, "pools": pools, "channels": channels, "silent": span.silent}


def _shown(span: _Span) -> Group:
    """The loads, what waits to be deployed, and pools and channels of the chosen vertex."""
    shown: list[Table | str] = [_table(span)]
    shown += [
        f"{job.job} ({job.name}): {found.behind.task.name} falls behind: {found.behind.text}"
        for job, found in span.jobs
        if found.behind is not None
    ]
    shown += [f"{job.job} ({job.name}): {wait.text}" for job, _ in span.jobs for wait in job.deploy_waits]
    if span.vertex is not None:
        name = span.jobs[0][1].loads[span.vertex].name
        pools, channels = pool_maps(span.workers, span.vertex), channel_maps(span.workers, span.vertex)
        shown += ["", pool_table(pools, name), "", channel_table(channels)]
        shown += [f"worker {worker} did not answer" for worker in span.silent]
    return Group(*shown)


def _table(span: _Span) -> Table:
    numbers = ("back-pressured", "busy", "records in", "records out")
    table = new_table(["job", "vertex", "level", *numbers, "busiest"], numbers)
    for job, found in span.jobs:
        for load in found.loads:
            table.add_row(
                f"{job.job} ({job.name})",
                load.name,
                load.level,
                f"{load.backpressured:.0%}",
                f"{load.busy:.0%}",
                rate_text(load.records_in),
                rate_text(load.records_out),
                f"{load.name}[{load.busiest}]",
                style=_STYLES[load.level],
            )
    return table

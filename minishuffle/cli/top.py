"""``minishuffle top``: how busy and how back-pressured each vertex of the running jobs is, and its rates.

Everything comes from two looks at what heartbeats have carried: see :mod:`~minishuffle.observe.loads`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import click
from rich.live import Live
from rich.table import Table

from minishuffle.cli.session import json_option, late_global_options, print_json, session_of
from minishuffle.cli.tables import console, new_table, rate_text
from minishuffle.client import Client
from minishuffle.errors import UsageError
from minishuffle.observe.loads import Level, seconds_of, vertex_loads
from minishuffle.wire.requests import JobInfo

__all__ = ["top"]

SPAN_SECONDS: Final = 1.0
"""The time of a subtask that is looked at, at least."""
LOOK_SECONDS: Final = 0.1
LOOKS_SECONDS_MAX: Final = 10.0
"""After which subtasks of which nothing was heard count with what there is."""

_STYLES: Final[dict[Level, str]] = {"OK": "", "LOW": "yellow", "HIGH": "red"}


@click.command()
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Show it once and end.")
@json_option
@late_global_options
@click.pass_context
def top(context: click.Context, job: str | None, once: bool, as_json: bool) -> None:
    """Show what the vertices of JOB, or of all running jobs, do now; Ctrl-C ends it.

    A vertex is as back-pressured as the most back-pressured of its subtasks: OK up to a tenth of its time,
    HIGH from a half on. The one that is busy behind others that are HIGH throttles the job.
    """
    if as_json and not once:
        raise UsageError("--json shows one look: add --once")
    with session_of(context).client() as client:
        spans = _spans(client, job)
        if as_json:
            before, after = next(spans)
            print_json({"jobs": [_job_map(was, now) for was, now in zip(before, after, strict=True)]})
        elif once:
            console().print(_table(*next(spans)))
        else:
            _show_live(spans)


def _show_live(spans: Iterator[tuple[list[JobInfo], list[JobInfo]]]) -> None:
    """Until the jobs have ended or Ctrl-C; one table below the other where there is no terminal."""
    out = console()
    with contextlib.suppress(KeyboardInterrupt):
        if not out.is_terminal:
            for span in spans:
                out.print(_table(*span))
            return
        with Live(console=out, auto_refresh=False) as live:
            for span in spans:
                live.update(_table(*span), refresh=True)


def _spans(client: Client, job: str | None) -> Iterator[tuple[list[JobInfo], list[JobInfo]]]:
    """Two looks at the same jobs, again and again while any of them runs.

    Raises:
        UsageError: none runs.
    """
    before = _running(client, job)
    if not before:
        if job is None:
            raise UsageError("no job runs: 'minishuffle submit keyby' starts one")
        state = client.job(job).state
        raise UsageError(f"job {job} is {state}: 'minishuffle jobs show {job}' has its totals")
    while before:
        yield before, _later(client, before)
        before = _running(client, job)


def _running(client: Client, job: str | None) -> list[JobInfo]:
    found = client.jobs() if job is None else [client.job(job)]
    return [each for each in found if each.state in ("created", "running")]


def _later(client: Client, before: list[JobInfo]) -> list[JobInfo]:
    """The next look at those jobs at which every subtask that runs has reported enough time."""
    deadline = time.monotonic() + LOOKS_SECONDS_MAX
    while True:
        time.sleep(LOOK_SECONDS)
        after = [client.job(job.job) for job in before]
        pairs = [
            (was, now)
            for earlier, later in zip(before, after, strict=True)
            for was, now in zip(earlier.tasks, later.tasks, strict=True)
            if now.state == "running"
        ]
        if all(seconds_of(now.counters) - seconds_of(was.counters) >= SPAN_SECONDS for was, now in pairs):
            return after
        if time.monotonic() > deadline:
            return after


def _job_map(before: JobInfo, after: JobInfo) -> dict[str, object]:
    vertices = [asdict(load) for load in vertex_loads(before, after)]
    return {"job": after.job, "name": after.name, "state": after.state, "vertices": vertices}


def _table(before: list[JobInfo], after: list[JobInfo]) -> Table:
    numbers = ("back-pressured", "busy", "records in", "records out")
    table = new_table(["job", "vertex", "level", *numbers, "busiest"], numbers)
    for was, now in zip(before, after, strict=True):
        for load in vertex_loads(was, now):
            table.add_row(
                f"{now.job} ({now.name})",
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

"""``minishuffle tap``: the next rows that cross an edge, as text."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta

import click

from minishuffle.cli.completion import complete_job
from minishuffle.cli.session import FiniteRange, json_option, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.errors import clipped, counted
from minishuffle.limits import TAP_ROWS
from minishuffle.observe.edgerows import (
    SAMPLE_LOOK_SECONDS,
    SAMPLE_SECONDS_DEFAULT,
    EdgeRow,
    EdgeRows,
    EdgeSample,
)
from minishuffle.wire.requests import JOB_LIVE

__all__ = ["row_line", "tap"]

LINE_CHARS_MAX = 4_000
"""What is printed of a row; --json has all that is given."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option(
    "--edge", type=click.IntRange(0), help="Its number in the job graph; needed if there are several."
)
@click.option(
    "--seconds",
    type=FiniteRange(0.1, 3600),
    default=SAMPLE_SECONDS_DEFAULT,
    show_default=True,
    help="End after that, with what has come.",
)
@json_option
@late_global_options
@click.pass_context
def tap(context: click.Context, job: str | None, edge: int | None, seconds: float, as_json: bool) -> None:
    """Print the next 20 rows that cross an edge of JOB, with the subtasks that write and read them.

    Without JOB, of the one that runs. Workers copy no row before you ask, and none after these. Between the
    operators of one chain there is no edge. Long values are cut.
    """
    session = session_of(context)
    with session.client() as client:
        found = _sample(client, job or session.only_job(client), edge, seconds)
    if as_json:
        print_json(found.model_dump())
        return
    for row in found.rows:
        echo(row_line(found, row))
    for silent in found.silent:
        echo(f"worker {silent} did not answer", err=True)
    if len(found.rows) < TAP_ROWS:
        echo(f"{counted(len(found.rows), 'row')} crossed edge {found.edge} meanwhile", err=True)


def _sample(client: Client, job: str, edge: int | None, seconds: float) -> EdgeRows:
    sample = EdgeSample(client.job(job), client.graph(job), edge, secrets.token_hex(8))
    deadline = time.monotonic() + seconds
    while not sample.complete and time.monotonic() < deadline:
        sample.add(client.ask_workers(sample.question()))
        if not sample.found.producers and client.job(job).state not in JOB_LIVE:
            break
        time.sleep(SAMPLE_LOOK_SECONDS)
    sample.add(client.ask_workers(sample.question(ends=True)))
    return sample.found


def row_line(edge: EdgeRows, row: EdgeRow) -> str:
    """A row as text: when it was written, from which subtask to which, and what is in it."""
    at = datetime.fromtimestamp(row.at).astimezone().isoformat(timespec="milliseconds")
    to = "all" if row.consumer is None else row.consumer
    notes = [f"key {row.key}"] if row.key is not None else []
    if row.time is not None:
        notes.append(f"event time {_time_text(row.time)}")
    if row.columns:
        what = ", ".join(f"{name}={value}" for name, value in zip(row.columns, row.values, strict=True))
    else:
        (what,) = row.values
    aside = f" ({', '.join(notes)})" if notes else ""
    return clipped(
        f"{at} {edge.source}[{row.producer}] => {edge.target}[{to}]{aside}: {what}", LINE_CHARS_MAX
    )


def _time_text(micros: int) -> str:
    try:
        return (EPOCH + timedelta(microseconds=micros)).isoformat()
    except OverflowError:
        return f"{micros} µs since 1970"

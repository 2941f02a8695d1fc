"""``minishuffle diagnose``: which task throttles a job, why, and what to do about it."""

from __future__ import annotations

import shlex
import time
from typing import Any

import click

from minishuffle.cli.completion import complete_job
from minishuffle.cli.session import FiniteRange, json_option, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.observe.diagnosis import (
    LATE_SECONDS_MAX,
    SECONDS_LEAST,
    Diagnosis,
    Look,
    diagnose_job,
    links_of,
    require_running,
    seconds_between,
)

__all__ = ["diagnose", "diagnosis_lines"]

LOOK_SECONDS = 0.1


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option(
    "--seconds",
    type=FiniteRange(0.5, 600),
    help="Judge by the next so many seconds. Default: by the last half minute.",
)
@json_option
@late_global_options
@click.pass_context
def diagnose(context: click.Context, job: str | None, seconds: float | None, as_json: bool) -> None:
    """Name the task that throttles JOB, the rule by which it is found, its numbers and what to change.

    Without JOB, the one that runs. It is judged by what heartbeats have carried in the last half minute, or
    since it began. If no task waits for another to take its rows, and none falls behind what is sent to it,
    nothing is wrong.
    """
    session = session_of(context)
    with session.client() as client:
        found = _diagnosis(client, job or session.only_job(client), seconds)
    if as_json:
        print_json(found.model_dump())
        return
    for line in diagnosis_lines(found, session.flags()):
        echo(line)


def diagnosis_lines(found: Diagnosis, flags: str = "") -> list[str]:
    """A diagnosis as text, with the command that shows more; ``flags`` find the cluster again."""
    if found.verdict == "healthy":
        lines = [f"job {found.job}: {found.advice}"]
    elif found.verdict in ("waiting", "paused"):
        lines = [f"job {found.job} is {found.rule}"]
    elif behind := found.evidence.get("falls_behind"):
        lines = [f"job {found.job}: {found.task} falls behind: {behind} ({found.rule})"]
    else:
        lines = [f"job {found.job} is throttled by {found.task}: {found.rule}"]
    width = max(map(len, found.evidence), default=0)
    lines += [f"  {name.replace('_', ' '):{width}}  {_text(value)}" for name, value in found.evidence.items()]
    if found.verdict != "healthy":
        lines.append(f"what to do: {found.advice}")
    if found.own_code:
        task = shlex.quote(found.task)
        lines.append(f"which code it is: minishuffle{flags} profile {found.job} --task {task}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_item_text, value)) or "none"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _item_text(item: Any) -> str:
    return f"{item['key']} ({item['share']:.0%})" if isinstance(item, dict) else str(item)


def _diagnosis(client: Client, job: str, seconds: float | None) -> Diagnosis:
    """Judge by the last half minute, or look again once every subtask that runs has reported so much time.

    Raises:
        UsageError: the job does not run.
    """
    least, recent = (SECONDS_LEAST, True) if seconds is None else (seconds, False)
    deadline = time.monotonic() + least + LATE_SECONDS_MAX
    before, links = _look(client, job, earlier=recent), links_of(client.graph(job))
    while True:
        after = _look(client, job)
        if seconds_between(before.job, after.job) >= least or time.monotonic() > deadline:
            return diagnose_job(before, after, links)
        time.sleep(LOOK_SECONDS)


def _look(client: Client, job: str, *, earlier: bool = False) -> Look:
    return Look(require_running(client.job(job, earlier=earlier)), client.workers(earlier=earlier))

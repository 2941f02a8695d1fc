"""``minishuffle jobs list|show|cancel|events|logs``."""

from __future__ import annotations

from datetime import datetime

import click

from minishuffle.cli import tables
from minishuffle.cli.session import json_option, late_global_options, print_json, session_of
from minishuffle.wire.messages import JobEvent

__all__ = ["jobs"]

CANCEL_SECONDS = 30.0


@click.group()
def jobs() -> None:
    """Look at jobs and cancel them."""


@jobs.command("list")
@json_option
@late_global_options
@click.pass_context
def list_jobs(context: click.Context, as_json: bool) -> None:
    """List all jobs, oldest first."""
    with session_of(context).client() as client:
        found = client.jobs()
    if as_json:
        print_json({"jobs": [tables.job_map(job) for job in found]})
    else:
        tables.show_jobs(found)


@jobs.command()
@click.argument("job")
@json_option
@late_global_options
@click.pass_context
def show(context: click.Context, job: str, as_json: bool) -> None:
    """Show one job: its tasks with their counters, and why it failed."""
    with session_of(context).client() as client:
        info = client.job(job)
    if as_json:
        print_json(tables.job_map(info))
    else:
        tables.show_job(info)


@jobs.command()
@click.argument("job")
@json_option
@late_global_options
@click.pass_context
def cancel(context: click.Context, job: str, as_json: bool) -> None:
    """Cancel a job and wait until it is over."""
    with session_of(context).client() as client:
        handle = client.handle(job)
        handle.cancel()
        info = handle.wait_until_over(CANCEL_SECONDS)
    if as_json:
        print_json({"job": info.job, "name": info.name, "state": info.state})
    else:
        click.echo(f"job {info.job} ({info.name}) is {info.state}")


@jobs.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Wait for more until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def events(context: click.Context, job: str, follow: bool, as_json: bool) -> None:
    """Print what happened to a job, oldest first."""
    with session_of(context).client() as client:
        for event in client.events(job, follow):
            if as_json:
                print_json(event.model_dump())
            else:
                click.echo(_event_line(event))


def _event_line(event: JobEvent) -> str:
    at = datetime.fromtimestamp(event.at).astimezone().isoformat(timespec="milliseconds")
    where = f" {event.operator}.{event.index}#{event.attempt}" if event.operator >= 0 else ""
    on = f" on worker {event.worker}" if event.worker else ""
    return f"{at} {event.kind}{where}{on}: {event.text}"


@jobs.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Wait for more until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def logs(context: click.Context, job: str, follow: bool, as_json: bool) -> None:
    """Print what a job's print sinks wrote, oldest first."""
    with session_of(context).client() as client:
        for line in client.logs(job, follow):
            if as_json:
                print_json({"line": line})
            else:
                click.echo(line)

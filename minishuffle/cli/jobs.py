"""``minishuffle jobs list|show|cancel|pause|resume|savepoint|events|logs``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from minishuffle.cli import tables
from minishuffle.cli.completion import complete_job, complete_set, complete_spec
from minishuffle.cli.session import Session, json_option, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo, with_number
from minishuffle.client import Client, JobHandle, JobResult, loss_text, new_submission, results_of
from minishuffle.errors import (
    RowsLost,
    ShuffleError,
    TaskFailed,
    UnknownName,
    UsageError,
    counted,
)
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.observe.leftout import left_out, left_out_texts
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.outputs import ListedFile
from minishuffle.wire.requests import JobInfo

if TYPE_CHECKING:
    from minishuffle.cli.loading import Job
    from minishuffle.plan.planner import JobPlan

__all__ = ["jobs", "submit"]


# --- submit ---------------------------------------------------------------------------------------
#
# ``minishuffle submit JOB``.


ROWS_SHOWN = 20
CANCEL_SECONDS = 30.0
EXIT_ROWS_LOST = 3
RECOVERIES = frozenset({"task restarting", "task waiting for a slot"})
"""Events of a job that whoever waits for it sees when they happen."""


@click.command()
@click.argument("job", shell_complete=complete_spec)
@click.option(
    "--set",
    "given",
    metavar="KEY=VALUE",
    multiple=True,
    shell_complete=complete_set,
    help="A parameter of the job, or a setting that every job has: buffer_timeout (adaptive, or seconds), "
    "buffers_per_channel, floating_buffers_per_gate, flow_control (credit, tcp), source_lease (rows), "
    "restart_strategy (individual, region, full, none), restart_failures_max, restart_mistakes_max, "
    "on_unavailable (drop, wait), latency_interval (seconds), "
    "latency_granularity (single, operator, subtask), debloat_target (seconds), "
    "schedule (eager, first_output, stages), start_when (any, all), guarantee (loss, at_least_once), "
    "snapshot_interval (seconds), snapshot_cost_max (part of 1), durable_interval (seconds).",
)
@click.option("--name", help="Name of the job; by default JOB without its folder, such as orders.py:spent.")
@click.option(
    "--parallelism",
    type=click.IntRange(1, PARALLELISM_MAX),
    help="Subtasks of each operator; by default the number of workers.",
)
@click.option("--wait", is_flag=True, help="Wait for the end; Ctrl-C and SIGTERM cancel the job.")
@click.option("--allow-loss", is_flag=True, help="With --wait: exit with 0, not 3, when rows were lost.")
@click.option(
    "--strict", is_flag=True, help="With --wait: exit with 3 when any records were dropped, late or skipped."
)
@click.option(
    "--describe",
    is_flag=True,
    help="Show the job's parameters, operators, exchanges and stages; run nothing.",
)
@click.option(
    "--from",
    "restore_from",
    metavar="PATH",
    default="",
    help="Go on from a savepoint: the path of its folder, or s3://bucket/folder.",
)
@click.option(
    "--drop-state",
    metavar="NAME",
    multiple=True,
    help="With --from: have the operator of that name, or id, begin without its state.",
)
@click.option(
    "--trust-snapshot",
    is_flag=True,
    help="With --from: open a savepoint that is not signed under this cluster's secret; what is in it counts "
    "as the job's own.",
)
@json_option
@late_global_options
@click.pass_context
def submit(
    context: click.Context,
    /,
    job: str,
    given: tuple[str, ...],
    name: str | None,
    parallelism: int | None,
    wait: bool,
    allow_loss: bool,
    strict: bool,
    describe: bool,
    as_json: bool,
    **saved: Any,
) -> None:
    """Start JOB: a built-in name (ads, backpressure, keyby, wordcount), or a Stream or Table of your own as
    module:attribute or file.py:attribute.

    The attribute is a Stream or a Table, or a function that returns one, whose annotated parameters are the
    --set keys.
    """
    from minishuffle.cli.loading import load_job  # It needs numpy and pyarrow, and other commands do not.

    found = load_job(job)
    parameters, settings = _parted(found, given)
    if describe:
        _describe(found, parameters, as_json, parallelism=parallelism or 1, settings=settings)
        return
    if (saved["drop_state"] or saved["trust_snapshot"]) and not saved["restore_from"]:
        raise click.UsageError("--drop-state and --trust-snapshot go with --from PATH")
    stream = found.build(parameters)
    session = session_of(context)
    with session.client() as client:

        def start(submission: str) -> JobHandle:
            label = found.label if name is None else name
            return client.submit(
                stream,
                name=label,
                parallelism=parallelism,
                settings=settings,
                submission=submission,
                **saved,
            )

        def fewer() -> str:
            """Whoever gives the parallelism knows why it is what it is."""
            with contextlib.suppress(ShuffleError):  # The job has started: that is said in any case.
                return "" if parallelism is not None else tables.lost_text(client.status())
            return ""

        if wait:
            result, info = _run_and_wait(client, start, as_json, fewer)
            if result.state == "finished_with_loss" and not allow_loss or strict and left_out(info):
                raise SystemExit(EXIT_ROWS_LOST)
            return
        handle = start(new_submission())
        if as_json:
            print_json({"job": handle.id, "name": handle.name, "parallelism": handle.parallelism})
        else:
            _tell_submitted(session, handle, fewer())


def _parted(job: Job, given: tuple[str, ...]) -> tuple[tuple[str, ...], JobSettings]:
    """What is given to the job's own parameters, and the settings that every job has.

    Raises:
        UsageError: a value of a setting does not fit.
        UnknownName: what is neither is nearly the name of a setting.
    """
    own = {parameter.name for parameter in job.parameters}
    parameters, values = [], {}
    for setting in given:
        key, equals, text = setting.partition("=")
        if equals and key in JobSettings.model_fields and key not in own:
            values[key] = text
        else:
            near = get_close_matches(key, [*own, *JobSettings.model_fields], 1)
            if near and near[0] not in own:
                raise UnknownName(
                    f"--set {key}: there is no such parameter or setting; did you mean {near[0]!r}?"
                )
            parameters.append(setting)
    try:
        return tuple(parameters), JobSettings.model_validate(values)
    except ValidationError as error:
        place = error.errors()[0]["loc"][:1]
        problem = ", or ".join(each["msg"] for each in error.errors() if each["loc"][:1] == place)
        # What is said of no place is about several settings.
        settings = " ".join(
            f"--set {name}={value}" for name, value in values.items() if place in ((), (name,))
        )
        raise UsageError(f"{settings}: {problem}") from None


def _tell_submitted(session: Session, handle: JobHandle, fewer: str) -> None:
    echo(f"job {handle.id} ({handle.name}) is submitted, parallelism {handle.parallelism}{fewer}")
    command = f"minishuffle{session.flags()} jobs"
    echo(f"next: {command} show {handle.id}, {command} logs {handle.id}, {command} cancel {handle.id}")


def _run_and_wait(
    client: Client, start: Callable[[str], JobHandle], as_json: bool, fewer: Callable[[], str] = str
) -> tuple[JobResult, JobInfo]:
    """Submit a job, wait for its end and show that; ``start`` gets the submission's id. ``fewer`` gives
    what to say behind the parallelism."""
    submission = new_submission()
    try:
        handle = start(submission)
        if not as_json:
            echo(f"job {handle.id} ({handle.name}) runs, parallelism {handle.parallelism}{fewer()}", err=True)
            for event in handle.events(follow=True):
                if event.kind in RECOVERIES:
                    echo(tables.event_line(event), err=True)
        try:
            result = handle.wait(allow_loss=True, warn=False)  # It says so itself, below.
        except TaskFailed:
            if as_json:
                print_json(tables.job_map(handle.info()))
            raise
    except Exception:  # Somebody else cancelled it, or its cluster is gone.
        raise
    except BaseException:  # Ctrl-C or SIGTERM, at any time.
        _cancel_submission(client, submission)
        raise
    info = handle.info()
    _show_result(result, info, as_json)
    if result.state == "finished_with_loss":
        advice = f"see 'minishuffle jobs events {info.job}'; with --allow-loss the exit code is 0"
        lost = RowsLost(loss_text(info, handle.events(follow=True), advice))
        echo(f"minishuffle: {with_number(str(lost), lost)}", err=True)
    return result, info


def _cancel_submission(client: Client, submission: str) -> None:
    echo("cancelling the job …", err=True)
    try:
        job = client.cancel_submission(submission)
        if job:
            _show_canceled(client.handle(job).wait_until_over(CANCEL_SECONDS), err=True)
    except (ShuffleError, TimeoutError) as error:
        echo(f"the job may still run: {error}; see 'minishuffle jobs list'", err=True)


def _show_result(result: JobResult, info: JobInfo, as_json: bool) -> None:
    if as_json:
        print_json({**_as_map(result), "limits": tables.limits_hit(info), "left_out": left_out(info)})
        return
    if any("writer" in task.counters.limits_hit for task in info.tasks):
        tables.show_limits(info)
    for sink, batches in result.batches.items():
        if len(result.batches) > 1:
            echo(f"{sink}:")
        if batches and not any(isinstance(batch, list) for batch in batches):
            tables.show_columns(result.table(sink), ROWS_SHOWN)
        else:
            echo(tables.shown_rows(result.collected[sink], ROWS_SHOWN))
    _show_sinks(info)
    for line in left_out_texts(info):
        echo(line)
    echo(f"job {result.job} ({result.name}) is {result.state} after {result.seconds:.2f} s")


def _show_canceled(info: JobInfo, *, err: bool = False) -> None:
    """What stays of a job that was cancelled: of sinks, what the last attempts gave; of files, all."""
    _show_sinks(info, err=err)
    if info.files_listed:
        echo(tables.files_text(info), err=err)


def _show_sinks(info: JobInfo, *, err: bool = False) -> None:
    """What each gave at its close; also of a job that was cancelled."""
    for sink in results_of(info):
        echo(f"{sink.name}[{sink.index}]: {sink.value}", err=err)


def _as_map(result: JobResult) -> dict[str, Any]:
    return {
        "job": result.job,
        "name": result.name,
        "state": result.state,
        "seconds": result.seconds,
        "rows": result.rows,
        **({"collected": result.collected} if len(result.collected) > 1 else {}),
        "results": [{"name": r.name, "index": r.index, "value": r.value} for r in result.results],
        "records_in": sum(task.counters.records_in for task in result.tasks),
        "records_out": sum(task.counters.records_out for task in result.tasks),
    }


def _plan(job: Job, given: tuple[str, ...], parallelism: int, settings: JobSettings) -> JobPlan | None:
    """The plans of the job, or None when a parameter must be set first."""
    named = {setting.partition("=")[0] for setting in given}
    if any(parameter.required and parameter.name not in named for parameter in job.parameters):
        return None
    from minishuffle.plan.planner import plan_job

    return plan_job(job.build(given), parallelism=parallelism, settings=settings)


def _describe(
    job: Job, given: tuple[str, ...], as_json: bool, *, parallelism: int, settings: JobSettings
) -> None:
    from minishuffle.plan.explain import plan_lines, plan_map

    try:
        found, problem = _plan(job, given, parallelism, settings), None
    except UsageError as error:
        if given:
            raise
        # With its defaults alone the job may not stand; its parameters are still worth showing.
        found, problem = None, str(error)
    if as_json:
        parameters = [
            {
                "name": parameter.name,
                "type": parameter.type_name,
                "required": parameter.required,
                "default": None if parameter.required else parameter.default,
            }
            for parameter in job.parameters
        ]
        plan = {"operators": None, "problem": problem} if found is None else plan_map(found)
        print_json({"job": job.name, "doc": job.doc, "parameters": parameters, **plan})
        return
    echo(f"{job.name}\n{job.doc}" if job.doc else job.name)
    echo("\nparameters (--set key=value):" if job.parameters else "\nno parameters")
    for parameter in job.parameters:
        echo(f"  {parameter}{' (required)' if parameter.required else ''}")
    if found is not None:
        echo()
        for line in plan_lines(found):
            echo(line)
    elif problem is not None:
        echo(f"\noperators unknown: {problem}")


# --- jobs -----------------------------------------------------------------------------------------


@click.group()
def jobs() -> None:
    """Look at jobs, pause and cancel them."""


@jobs.command("list")
@json_option
@late_global_options
@click.pass_context
def list_jobs(context: click.Context, as_json: bool) -> None:
    """List all jobs, oldest first."""
    session = session_of(context)
    with session.client() as client:
        found = client.jobs()
    if as_json:
        print_json({"jobs": [tables.job_map(job) for job in found]})
    else:
        tables.show_jobs(found, session.flags())


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@json_option
@late_global_options
@click.pass_context
def show(context: click.Context, job: str, as_json: bool) -> None:
    """Show one job: its tasks with their counters, and why it failed."""
    with session_of(context).client() as client:
        info, graph = client.job(job), client.graph(job)
    if as_json:
        print_json(tables.job_map(info))
    else:
        tables.show_job(info)
        tables.show_exchanges(graph)


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@click.option(
    "--give-up-results",
    is_flag=True,
    help="Also what its to_spark sinks keep for readers, of a job that has ended too: makes room on disks.",
)
@json_option
@late_global_options
@click.pass_context
def cancel(context: click.Context, job: str, give_up_results: bool, as_json: bool) -> None:
    """Cancel a job and wait until it has ended; say which files and results it leaves.

    Of each sink it prints what its last attempt gave; 'files completed' counts the files of all attempts.

    While the coordinator's journal cannot be written (its disk is full), what the job keeps for readers is
    given up in any case: that may be what fills the disk.
    """
    with session_of(context).client() as client:
        handle = client.handle(job)
        handle.cancel(give_up_results=give_up_results)
        info = handle.wait_until_over(CANCEL_SECONDS)
    if as_json:
        results = [{"name": r.name, "index": r.index, "value": r.value} for r in results_of(info)]
        files = {"files_listed": info.files_listed, "file_rows": info.file_rows}
        print_json({"job": info.job, "name": info.name, "state": info.state, "results": results, **files})
    else:
        _show_canceled(info)
        freed = "; what it kept for readers is given up" if give_up_results else ""
        echo(f"job {info.job} ({info.name}) is {info.state}{freed}")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@json_option
@late_global_options
@click.pass_context
def pause(context: click.Context, job: str, as_json: bool) -> None:
    """Pause a job, and wait until none of its functions is called and no row is on its way.

    Tasks keep what they hold, and programs that write to it stay connected; 'jobs resume' has it go on. If
    not all of its tasks stop within pause_timeout, it goes on, and the command fails.
    """
    with session_of(context).client() as client:
        info = client.handle(job).pause()
    if as_json:
        print_json({"job": info.job, "name": info.name, "state": info.state, "left": info.pause_left})
        return
    echo(f"job {info.job} ({info.name}) is {info.state}")
    for each in info.pause_left:
        echo(f"  where it is stays {each}")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@json_option
@late_global_options
@click.pass_context
def resume(context: click.Context, job: str, as_json: bool) -> None:
    """Have a job that is paused go on."""
    with session_of(context).client() as client:
        handle = client.handle(job)
        handle.resume()
    if as_json:
        print_json({"job": handle.id, "name": handle.name})
    else:
        echo(f"job {handle.id} ({handle.name}) goes on")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--stop", is_flag=True, help="Cancel the job behind it.")
@click.option(
    "--into",
    metavar="DIR",
    default="",
    help="Where its folder is made, if not in snapshot_dir: a directory that all workers share, or s3://...",
)
@json_option
@late_global_options
@click.pass_context
def savepoint(context: click.Context, job: str, stop: bool, into: str, as_json: bool) -> None:
    """Take a savepoint of a job: its state and the positions of its sources, in one folder.

    'submit --from PATH' has a job go on from there, on this cluster or another, with other code or another
    parallelism. The job runs on while the savepoint is taken, unless it is to --stop. What precedes
    the savepoint is in its sinks when the command ends.
    """
    with session_of(context).client() as client:
        handle = client.handle(job)
        found = handle.savepoint(stop=stop, into=into)
    if as_json:
        print_json({"job": handle.id, "name": handle.name, **found.model_dump(exclude={"type", "token"})})
        return
    echo(found.path)
    echo(f"savepoint {found.number} of job {handle.id} ({handle.name}): {tables.savepoint_text(found)}")


@jobs.command("end-stream")
@click.argument("job", shell_complete=complete_job)
@click.argument("stream")
@json_option
@late_global_options
@click.pass_context
def finish_stream(context: click.Context, job: str, stream: str, as_json: bool) -> None:
    """End a stream of a job that other programs write, and wait until its tasks know.

    What was written is all there is: the stream's last windows come out, and the job comes to its end.
    """
    with session_of(context).client() as client:
        client.end_stream(job, stream)
    if as_json:
        print_json({"job": job, "stream": stream})
    else:
        echo(f"stream {stream} of job {job} has ended")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--follow", is_flag=True, help="Wait for more until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def events(context: click.Context, job: str, follow: bool, as_json: bool) -> None:
    """Print what happened to a job, oldest first; with --follow as it becomes known.

    A recovery is a timeline, with the milliseconds since the failure was detected: task failed (or lost),
    rescheduled, deployed, running, inputs and outputs reattached, first record. Under a task that failed
    stands the traceback of the user's code.
    """
    with session_of(context).client() as client:
        found = client.events(job, follow)
        # A worker may report what happened there after what happened later elsewhere.
        for event in found if follow else sorted(found, key=lambda event: event.at):
            if as_json:
                print_json(event.model_dump())
            else:
                echo(tables.event_line(event))


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--follow", is_flag=True, help="Wait for more until the job ends.")
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
                echo(line)


def _file_line(job: str, file: ListedFile) -> str:
    found = f"{file.path}: {counted(file.rows, 'row')}, {file.bytes:,} bytes, sha256 {file.checksum}"
    if file.named:
        return found
    path = PurePath(file.path)
    hidden = path.with_name(f".{job}.*.{path.name}")
    return f"{found} (its worker was lost: if it is not there, it is {hidden}: rename that)"


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def files(context: click.Context, job: str, as_json: bool) -> None:
    """Print the files that a job's to_files sinks have completed, oldest first."""
    with session_of(context).client() as client:
        for file in client.files(job):
            if as_json:
                print_json(file.model_dump())
            else:
                echo(_file_line(job, file))

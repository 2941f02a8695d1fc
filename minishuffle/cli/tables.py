"""How jobs and clusters are shown: as tables, and as plain maps for JSON."""

from __future__ import annotations

from datetime import datetime
from textwrap import indent
from typing import TYPE_CHECKING, Any

from minishuffle.cli.terminal import echo, with_number
from minishuffle.client import LOSSES, cause_text, failure_lines
from minishuffle.console import console, new_table, print_rows
from minishuffle.counters import LIMITS, TCP_LIMITS, TaskCounters
from minishuffle.errors import counted, error_from_code
from minishuffle.ids import Address
from minishuffle.wire.requests import (
    ClusterStatus,
    DurableInfo,
    GraphInfo,
    JobEvent,
    JobInfo,
    SavepointInfo,
    TaskInfo,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

__all__ = [
    "byte_text",
    "event_line",
    "durable_text",
    "files_text",
    "job_map",
    "limits_hit",
    "lost_text",
    "savepoint_text",
    "shown_rows",
    "rate_text",
    "seconds_text",
    "show_columns",
    "show_exchanges",
    "show_job",
    "show_jobs",
    "show_limits",
    "show_status",
    "status_map",
]

_LIMIT_TEXTS = {
    "exclusive": "exclusive buffers of a channel: all in use",
    "floating": "floating buffers of the gate: none left, a channel waits in line",
    "credit": "credit of that channel: 0",
    "channel": "channel: waits for a buffer",
    "local_pool": "buffers of its gate: all in use",
    "global_pool": "network memory of the worker: the gate gets no more of it",
    "reading": "connection: read no further, whatever else is in it",
    "window": "window of the connection: closed, TCP sends no more",
    "transport": "transport: paused, the socket takes no more",
    "queue": "queue of a subpartition: all segments that the output keeps for one consumer",
    "pool": "output buffers: none left",
    "writer": "writer: blocked until one is free",
}
CAUSE_CHARS = 200
"""How much a list of jobs has of a first cause; "jobs show" has all of it."""
TASKS_SHOWN = 5
"""Tasks that a line names at most."""


def byte_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def rate_text(per_second: float) -> str:
    return f"{per_second:,.0f}/s"


def job_map(job: JobInfo) -> dict[str, Any]:
    """A job for JSON, with the results of its sinks unpacked."""
    found = job.model_dump(exclude={"tasks"})
    found["tasks"] = [_task_map(task) for task in job.tasks]
    return found


def _task_map(task: TaskInfo) -> dict[str, Any]:
    from minishuffle.exchange.rows import unpack_result  # It needs numpy.

    found = task.model_dump(exclude={"result"})
    found["result"] = unpack_result(task.result) if task.result else None
    return found


def status_map(status: ClusterStatus) -> dict[str, Any]:
    """A cluster for JSON."""
    found = status.model_dump(exclude={"jobs"})
    found["jobs"] = [job_map(job) for job in status.jobs]
    return found


def lost_text(status: ClusterStatus) -> str:
    """Why a job that is submitted runs on fewer workers than there were; empty if none was lost.

    Workers of which the coordinator has heard nothing are not counted: they ended before it began, as all do
    with the cluster that was up before.
    """
    heard = (worker for worker in status.workers if worker.report.network_cap_bytes)
    lost = sum(worker.state == "lost" for worker in heard)
    there = sum(worker.state == "alive" and not worker.standby for worker in status.workers)
    return f" ({lost} of {lost + there} workers {'are' if lost > 1 else 'is'} lost)" if lost else ""


def show_status(status: ClusterStatus, flags: str = "") -> None:
    """``flags`` find the cluster again; so below."""
    out = console()
    out.print(
        f"cluster {status.cluster!r}: version {status.version}, term {status.term}, coordinator pid "
        f"{status.pid}, web port {status.web_port}"
    )
    if status.journal_problem:
        out.print(
            f"submissions are refused, and restarts wait, until it can be written: {status.journal_problem}"
        )
    held = ("snapshots held",) if any(each.report.snapshot_bytes for each in status.workers) else ()
    numbers = ("pid", "slots free", "heartbeat", "network memory", *held)
    table = new_table(["worker", "state", "address", *numbers, "reachable", "connections"], numbers)
    running = sum(job.state in ("created", "running") for job in status.jobs)
    for worker in status.workers:
        report = worker.report
        state: str = worker.state
        if state == "alive" and worker.standby:
            state = "standby" if report.jobs_loaded >= running else "standby, loading"
        table.add_row(
            str(worker.worker),
            f"{state}, draining" if worker.draining else state,
            str(Address(worker.host, worker.data_port)),
            str(worker.pid),
            f"{worker.slots_free}/{worker.slots}",
            f"{worker.heartbeat_age_seconds:.1f} s ago",
            f"{byte_text(report.network_peak_bytes)} of {byte_text(report.network_cap_bytes)}",
            *(byte_text(report.snapshot_bytes) for _ in held),
            f"{worker.reachable} of {worker.tried}" if worker.tried else "-",
            ", ".join(f"{peer.connections} to {peer.worker}" for peer in worker.peers) or "-",
        )
    out.print(table)
    if held:
        room = max(worker.report.snapshot_memory_bytes for worker in status.workers)
        out.print(f"snapshots held: of a worker's up to {byte_text(room)} in memory, the rest on disk")
    for text in status.unreached:
        out.print(text)
    if confined := [worker for worker in status.workers if worker.confined]:
        names = ", ".join(str(worker.worker) for worker in confined)
        out.print(
            f"other hosts cannot reach worker {names}, at a loopback address: jobs that run on several hosts "
            "get no slots there; start it with --host or --advertise"
        )
    if status.jobs:
        out.print()
        show_jobs(status.jobs, flags)


def event_line(event: JobEvent) -> str:
    """One event, with the user's traceback below it if there is one."""
    at = datetime.fromtimestamp(event.at).astimezone().isoformat(timespec="milliseconds")
    where = f" {event.operator}.{event.index}#{event.attempt}" if event.operator >= 0 else ""
    on = f" on worker {event.worker}" if event.worker else ""
    since = f" +{1000 * event.since:.1f} ms" if event.since else ""
    own = f"\n{indent(event.traceback.rstrip(), '    ')}" if event.traceback else ""
    return f"{at} {event.kind}{where}{on}{since}: {event.text}{own}"


def show_jobs(jobs: list[JobInfo], flags: str = "") -> None:
    if not jobs:
        console().print(f"no jobs yet: 'minishuffle{flags} submit keyby' starts one", soft_wrap=True)
        return
    numbers = ("tasks", "records in", "records out", "age")
    table = new_table(["job", "name", "state", *numbers, "first cause"], numbers)
    for job in jobs:
        first = job.causes[0] if job.causes else job.first_failure
        cause = first.text.splitlines()[0] if first is not None and first.text else ""
        cause = cause if len(cause) <= CAUSE_CHARS else f"{cause[:CAUSE_CHARS]}…"
        table.add_row(
            job.job,
            job.name,
            job.state,
            str(len(job.tasks)),
            f"{sum(task.counters.records_in for task in job.tasks):,}",
            f"{sum(task.counters.records_out for task in job.tasks):,}",
            seconds_text((job.ended_at or job.at) - job.submitted_at),
            cause,
        )
    console().print(table)


def show_exchanges(graph: GraphInfo) -> None:
    """Those that are not as most are."""
    for edge in graph.edges:
        if edge.kind != "pipelined_bounded":
            source, target = graph.vertices[edge.source].name, graph.vertices[edge.target].name
            console().print(f"exchange {source} => {target}: {edge.partitioner}, {edge.kind}")


def show_job(job: JobInfo) -> None:
    out = console()
    end = job.ended_at or job.at
    mode = ", TCP flow control" if job.flow_control == "tcp" else ""
    if job.guarantee == "at_least_once":
        mode += ", at least once"
    out.print(f"job {job.job} ({job.name}): {job.state}, {seconds_text(end - job.submitted_at)}{mode}")
    _show_what_stands(job)
    out.print(_task_table(job))
    if any(task.counters.limits_hit for task in job.tasks):
        show_limits(job)
    if any(task.counters.latency for task in job.tasks):
        _show_latencies(job)
    if any(task.holder or task.counters.snapshot for task in job.tasks):
        _show_snapshots(job)
    if job.unprotected:
        out.print(
            f"unprotected: {counted(job.unprotected, 'task')} could not go on if the worker was lost now, "
            "since no other has the snapshots: see that there are two workers, or wait a moment",
            soft_wrap=True,
        )
    if job.restarts:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in job.restarts.items())
        out.print(f"restarts, by how the attempt before ended: {counts}")
    for reason, count in job.rows_dropped.items():
        out.print(f"rows dropped ({reason}): {count:,} {LOSSES.get(reason, '')}".rstrip())
    if job.rows_in_flight:
        out.print(f"rows in flight through what died: up to {job.rows_in_flight:,}")
    if job.rows_again:
        out.print(f"rows that were emitted twice: up to {job.rows_again:,}")
    if job.state_rows_lost:
        losers = [task for task in job.tasks if task.state_rows_lost]
        shown = [f"{task.name}[{task.index}] {task.state_rows_lost:,}" for task in losers[:TASKS_SHOWN]]
        shown += ["..."] if len(losers) > TASKS_SHOWN else []
        out.print(
            f"entries of state (keys) lost with tasks: {job.state_rows_lost:,} ({', '.join(shown)}), made of "
            "earlier records that are not counted again",
            soft_wrap=True,
        )
    if job.files_listed:
        out.print(files_text(job))
    for number, cause in enumerate(job.causes):
        label = "first cause" if number == 0 else "then"
        text = cause_text(cause)
        out.print(f"{label}: {text if number else with_number(text, error_from_code(cause.code, ''))}")
        if number == 0 and cause.traceback:
            out.print(cause.traceback.rstrip())
    if job.first_failure is not None and not job.causes:
        out.print(f"first failure: {failure_lines(job.first_failure)}")


def _task_table(job: JobInfo) -> Table:
    states = ("busy", "idle", "back-pressured")
    numbers = ("attempt", "worker", "records in", "records out", *states)
    table = new_table(["task", "state", *numbers], numbers)
    for task in job.tasks:
        counters = task.counters
        table.add_row(
            f"{task.name}[{task.index}]",
            task.state,
            str(task.attempt or "-"),
            str(task.worker or "-"),
            f"{counters.records_in:,}",
            f"{counters.records_out:,}",
            *_state_texts(counters),
        )
    return table


def files_text(job: JobInfo) -> str:
    """How many files all attempts of a job have completed."""
    return f"files completed: {job.files_listed:,} with {counted(job.file_rows, 'row')}"


def savepoint_text(found: SavepointInfo) -> str:
    """How far a job's last savepoint is, or what it took."""
    if found.problem:
        return f"failed: {found.problem}"
    if found.phase != "none":
        return f"{found.phase}, for now"
    took = f"{found.bytes:,} bytes in {found.seconds:.1f} s"
    return f"{took}, no task stood longer than {found.stood_seconds:.2f} s"


def durable_text(found: DurableInfo, at: float) -> str:
    """The age of a job's last durable snapshot, why there is none since, and who waits for one."""
    why = [f"the last one failed: {found.problem}"] if found.problem else []
    why += ["programs that write to the job wait for the next one"] if found.awaited else []
    if not found.number:
        return "; ".join(["no durable snapshot", *why])
    size, age = f"{found.bytes:,} bytes in {found.seconds:.1f} s", seconds_text(max(0.0, at - found.taken_at))
    text = f"durable snapshot {found.number} ({found.path}): {size}, {age} ago"
    return "; ".join([text, *why])


def _show_what_stands(job: JobInfo) -> None:
    """What of the job waits, for what, and what a pause leaves."""
    out = console()
    for wait in job.slot_waits:
        out.print(
            f"{wait.text}; the job fails in {seconds_text(max(0.0, wait.until - job.at))} if none comes"
        )
    if job.stages:
        shown = [
            f"{number} {stage.state}" + (f" (version {stage.version})" if stage.version > 1 else "")
            for number, stage in enumerate(job.stages, 1)
        ]
        out.print(f"stages: {', '.join(shown)}")
    for later in job.deploy_waits:
        out.print(later.text)
    if job.pause_problem:
        out.print(f"the last pause failed: {job.pause_problem}")
    if (saved := job.savepoint).number:
        out.print(f"savepoint {saved.number} ({saved.path}): {savepoint_text(saved)}")
    if job.durable.number or job.durable.problem or job.durable.awaited:
        out.print(durable_text(job.durable, job.at))
    if job.fallbacks:
        out.print(f"went back to a snapshot as a whole: {counted(job.fallbacks, 'time')}")
    for left in job.pause_left:
        out.print(f"where it is stays {left}")


def limits_hit(job: JobInfo) -> list[dict[str, Any]]:
    """When limits of flow control were first hit in a job, the earliest first: ``limit``, ``task``, and
    ``seconds`` since the job was submitted. On several machines their clocks are compared."""
    order = {limit: number for number, limit in enumerate((*LIMITS[:-3], *TCP_LIMITS))}
    found = [
        (at, order[limit], f"{task.name}[{task.index}]", limit)
        for task in job.tasks
        for limit, at in task.counters.limits_hit.items()
        if limit in order
    ]
    return [
        {"limit": limit, "task": task, "seconds": round(at - job.submitted_at, 6)}
        for at, _, task, limit in sorted(found)
    ]


def show_limits(job: JobInfo) -> None:
    """The table of :func:`limits_hit`, with what each of them means."""
    table = new_table(["after", "task", "first hit its limit"], ["after"])
    for hit in limits_hit(job):
        table.add_row(f"{hit['seconds']:.3f} s", hit["task"], _LIMIT_TEXTS[hit["limit"]])
    console().print(table)


def _show_latencies(job: JobInfo) -> None:
    """How long latency markers took from their sources to each task of its latest attempt."""
    quantiles = ("p50", "p95", "p99", "max")
    table = new_table(["latency of", "markers", *quantiles], ["markers", *quantiles])
    for task in job.tasks:
        if latency := task.counters.latency:
            times = [f"{1000 * latency[each]:,.1f} ms" for each in quantiles]
            table.add_row(f"{task.name}[{task.index}]", f"{latency['count']:,.0f}", *times)
    console().print(table)


def _show_snapshots(job: JobInfo) -> None:
    """From what next attempts of tasks would go on, as of the last heartbeats, and what that has taken."""
    numbers = ("held by", "age", "bytes", "taken in", "taken")
    table = new_table(["snapshots of", *numbers], numbers)
    for task in job.tasks:
        if task.holder or task.counters.snapshot:
            found = task.counters.snapshot
            table.add_row(
                f"{task.name}[{task.index}]",
                str(task.holder or "-"),
                seconds_text(found["age"]) if "age" in found and task.state == "running" else "-",
                byte_text(found.get("bytes", 0.0)),
                f"{1000 * found.get('seconds', 0.0):,.1f} ms",
                f"{found.get('taken', 0.0):,.0f}",
            )
    console().print(table)


def _state_texts(counters: TaskCounters) -> list[str]:
    """Busy, idle and back-pressured time of a task, each with its share of the three."""
    seconds = (counters.busy_seconds, counters.idle_seconds, counters.backpressured_seconds)
    total = sum(seconds) or 1.0
    return [f"{seconds_text(each)} {each / total:4.0%}" for each in seconds]


def shown_rows(rows: list[Any], limit: int) -> str:
    """The first rows, one a line."""
    lines = [repr(row) for row in rows[:limit]]
    return "\n".join([*lines, *_more(len(rows) - limit)])


def show_columns(table: pa.Table, limit: int) -> None:
    """The first rows of a table, with its schema."""
    rows = list(zip(*table.slice(0, limit).columns, strict=True))
    print_rows(console(), rows, [(column.name, str(column.type)) for column in table.schema])
    for line in _more(table.num_rows - limit):
        echo(line)


def _more(count: int) -> list[str]:
    return [f"… and {count:,} more; --json prints them all"] if count > 0 else []

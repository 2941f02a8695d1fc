"""``minishuffle dump``: what every task, channel and waiting line of the workers holds and waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import click

from minishuffle.cli.completion import complete_job, complete_worker
from minishuffle.cli.session import json_option, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo
from minishuffle.wire.inquiries import AskWorkers

__all__ = ["dump", "dump_lines"]

Fields: TypeAlias = dict[str, Any]
FRAMES_SHOWN = 4
"""Frames of a thread's stack; --json has more."""


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option(
    "--worker",
    "workers",
    type=int,
    multiple=True,
    shell_complete=complete_worker,
    help="This worker alone; may be repeated.",
)
@json_option
@late_global_options
@click.pass_context
def dump(context: click.Context, job: str | None, workers: tuple[int, ...], as_json: bool) -> None:
    """Show what every task, channel and waiting line holds and waits for, of JOB or of all jobs.

    Workers answer within a second, also while a task is stuck: it is shown where its thread is. One that does
    not answer is named: its event loop is held up, or the process is stopped. Channels are written
    PRODUCER:CONSUMER, each as OPERATOR.INDEX.
    """
    with session_of(context).client() as client:
        if job is not None:
            client.job(job)
        answered = client.ask_workers(AskWorkers(job=job or "", workers=list(workers)))
    found = [json.loads(answer) for _, answer in sorted(answered.answers.items())]
    if as_json:
        print_json({"workers": found, "silent": answered.silent})
        return
    for worker in found:
        for line in dump_lines(worker):
            echo(line)
    for silent in answered.silent:
        echo(f"worker {silent} did not answer: its event loop is held up, or the process is stopped")


def dump_lines(worker: Fields) -> Iterator[str]:
    """A worker's dump as text: what is at rest is summed up."""
    memory, control = worker["memory"], worker["control"]
    waiting = _present(
        (worker["inbox"], "items for the loop"),
        (control["outboxes_waiting"], "outboxes for the coordinator"),
        (control["reports_unacknowledged"], "reports that the coordinator has not acknowledged"),
    )
    connected = "" if control["connected"] else ", no coordinator"
    yield (
        f"worker {worker['worker']}: {memory['free']:,} of {memory['segments']:,} segments free, "
        f"{waiting or 'nothing queued'}{connected}"
    )
    for pool in memory["waiting_pools"]:
        yield f"  waits for a segment of any other pool: {pool}"
    for link in worker["links"]:
        yield f"  {_link_text(link)}"
    for request in worker["requests_waiting"]:
        yield (
            f"  waits: {request['from']} wants edge {request['edge']} of {request['job']}, producer "
            f"{request['producer']}#{request['producer_attempt']} for consumer {request['consumer']}#"
            f"{request['consumer_attempt']}, for {request['seconds_left']:.1f} s more"
        )
    yield from _left_out(worker["requests_left_out"], "requests", "  ")
    for task in worker["tasks"]:
        yield from _task_lines(task)
    yield from _left_out(worker["tasks_left_out"], "tasks", "  ")


def _link_text(link: Fields) -> str:
    text, purpose = f"{link['peer']} ({link['remote']})", link.get("one_way")
    paused = "paused, " if link["paused"] else ""
    edge = "" if purpose is None else f"edge {purpose['edge']} of {purpose['job']}: "
    if "reading" in link:
        held = "" if link["reading"] else f"not read, {link['held_bytes']:,} bytes wait for a buffer, "
        return f"one-way link from {text}, {edge}{held}{link['channels_in']} channels"
    socket = f"{paused}{link['buffers_in_socket']} buffers in the socket, "
    sends = f"{link['channels_ready']} of {link['channels_out']} channels ready to send"
    if purpose is not None:
        return f"one-way link to {text}, {edge}{socket}{sends}"
    return f"link to {text}: {socket}{link['control_unsent']} control frames, {sends}"


def _present(*counts: tuple[int, str]) -> str:
    """Those that are not zero."""
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _left_out(count: int, what: str, indent: str) -> Iterator[str]:
    if count:
        yield f"{indent}and {count:,} more {what}"


def _task_lines(task: Fields) -> Iterator[str]:
    waits = f", waits for {task['waits_for']}" if task["waits_for"] else ""
    cancelled = ", cancelled" if task["cancelled"] else ""
    thread = f"{task['thread']} for {task['seconds']:.1f} s" if task["thread"] != "none" else "no thread"
    yield (
        f"  {task['job']} {task['task']} ({task['operator']}.{task['index']}#{task['attempt']}): "
        f"{task['state']}{cancelled}, {thread}{waits}; {task['records_in']:,} records in, "
        f"{task['records_out']:,} out, {task['state_rows']:,} entries of state (keys)"
    )
    queued = _present(
        (task["outbox_bytes"], "bytes for the coordinator"),
        (task["buffers_returned"], "buffers to be taken back"),
    )
    if queued:
        yield f"    {queued}"
    for frame in task["stack"][:FRAMES_SHOWN]:
        yield f"    at {frame}"
    consumer = f"{task['operator']}.{task['index']}"
    for gate in task["gates"]:
        yield from _gate_lines(gate, consumer)
    for partition in task["partitions"]:
        yield from _partition_lines(partition, consumer)


def _pool_text(pool: Fields | None) -> str:
    if pool is None:
        return "kept on disk or in memory"
    waits = ", waits for one of another pool" if pool["waits"] else ""
    return f"{pool['in_use']} of {pool['size']} segments{waits}"


def _gate_lines(gate: Fields, consumer: str) -> Iterator[str]:
    operator = gate["from_operator"]
    size = gate["buffer_bytes"]
    sizes = f", {size:,} bytes to be in each" if size is not None else ""
    yield f"    reads edge {gate['edge']}: {_pool_text(gate['pool'])}{sizes}"
    for name, what in (
        ("waiting_for_exclusive", "in line for an exclusive buffer"),
        ("waiting_for_floating", "in line for a floating buffer"),
        ("ready", "ready to be read"),
    ):
        if gate[name]:
            yield f"      {what}: {', '.join(f'{operator}.{each}' for each in gate[name])}"
    resting = 0
    for channel in gate["channels"]:
        starved = channel.get("credit", {}).get("starved") or channel.get("tcp", {}).get("waits_for_buffer")
        if not (channel["queue"] or channel["waits_for"] or starved):
            resting += 1
            continue
        waits = f", waits for {channel['waits_for']}" if channel["waits_for"] else ""
        yield (
            f"      {operator}.{channel['producer']}:{consumer} from worker {channel['worker']}: "
            f"{channel['phase']}{waits}, {channel['queue']} in the queue{_credit_text(channel)}"
        )
    yield from _at_rest(resting, gate["channels_left_out"])


def _credit_text(channel: Fields) -> str:
    if "local" in channel:
        local = channel["local"]
        return f", {local['lent']} of {local['credit']} of its producer's segments"
    if "tcp" in channel:
        return ", waits for a buffer and stops its siblings" if channel["tcp"]["waits_for_buffer"] else ""
    if "credit" not in channel:
        return ""
    credit = channel["credit"]
    starved = ", starved" if credit["starved"] else ""
    return (
        f", credit {credit['announced']} and {credit['unannounced']} unannounced, "
        f"{credit['exclusive_free']} of {credit['exclusive']} exclusive and {credit['floating_free']} "
        f"floating buffers free, {credit['required']} required{starved}"
    )


def _partition_lines(partition: Fields, producer: str) -> Iterator[str]:
    yield f"    writes edge {partition['edge']}: {_pool_text(partition['pool'])}"
    resting = 0
    for channel in partition["channels"]:
        if not (channel["queue"] or channel["backlog"] or channel["reader"] == "nobody"):
            resting += 1
            continue
        state = "suspected" if channel["suspected"] else "closed" if channel["closed"] else "unavailable"
        credit = f", credit {channel['credit']}" if "credit" in channel else ""
        yield (
            f"      {producer}:{partition['to_operator']}.{channel['consumer']} read by {channel['reader']}: "
            f"{'' if channel['available'] else f'{state}, '}{channel['queue']} in the queue, backlog "
            f"{channel['backlog']}{credit}"
        )
    yield from _at_rest(resting, partition["channels_left_out"])


def _at_rest(resting: int, left_out: int) -> Iterator[str]:
    if resting or left_out:
        more = f", and {left_out:,} more that are left out" if left_out else ""
        yield f"      {resting} channels at rest{more}"

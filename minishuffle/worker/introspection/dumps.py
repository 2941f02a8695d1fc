"""A dump: what every task, channel and waiting line of a worker holds and waits for, at this moment.

Everything is read on the loop thread, without a lock and without waiting for a task: a thread that is stuck
shows where. Numbers that a task thread writes are those of a moment ago. The size is bounded by the limits
``DUMP_*``: what holds or waits for something comes first, and what is left out is counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, TypeAlias, TypeVar

from minishuffle import limits
from minishuffle.exchange.channels import InputChannel, LocalAttachment, RemoteAttachment
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.partition import ResultPartition, ResultSubpartition
from minishuffle.exchange.segments import LocalPool
from minishuffle.ids import state_edge
from minishuffle.protocol.channel import ProducerChannel
from minishuffle.protocol.oneway import OneWayReceiver, OneWaySender
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.frames import Role
from minishuffle.worker.channels.registry import ChannelKey, ChannelPhase, Waiting
from minishuffle.worker.reports.attemptreports import AttemptReports
from minishuffle.worker.reports.outbox import OutboxSender
from minishuffle.worker.state import WorkerState
from minishuffle.worker.tasks.attempt import Attempt
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.handoff import LoopInbox

__all__ = ["DumpedWorker", "worker_dump"]

Fields: TypeAlias = dict[str, Any]
Served: TypeAlias = Mapping[int, tuple[str, ProducerChannel]]
"""By id of a view: the peer that reads it, and the channel that carries it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DumpedWorker:
    """The parts of a worker that a dump looks at."""

    state: WorkerState
    deployment: Deployment
    links: Collection[DataLink]
    inbox: LoopInbox
    outgoing: OutboxSender
    reports: AttemptReports
    connected: Callable[[], bool]
    """Whether there is a coordinator."""
    clock: Callable[[], float]
    """The loop's, in seconds."""


class _Room:
    """How many channels may yet be dumped."""

    def __init__(self) -> None:
        self._left = limits.DUMP_CHANNELS_IN_ALL_MAX

    def take(self, channels: Sequence[T], is_busy: Callable[[T], bool]) -> Sequence[T]:
        """As many as there is room for, in their order; busy ones are preferred."""
        count = min(self._left, limits.DUMP_CHANNELS_MAX)
        if len(channels) > count:
            busy = list(islice(filter(is_busy, channels), count))
            chosen = {id(each) for each in busy}
            others = (each for each in channels if id(each) not in chosen)
            chosen |= {id(each) for each in islice(others, count - len(busy))}
            channels = [each for each in channels if id(each) in chosen]
        self._left -= len(channels)
        return channels


def worker_dump(worker: DumpedWorker, job: str) -> bytes:
    """The dump as JSON; ``job``: tasks of other jobs are left out, unless it is empty."""
    attempts = [each for key, each in worker.deployment.attempts.items() if job in ("", key.subtask.job)]
    room, served = _Room(), _served(worker.links)
    frames = sys._current_frames()
    tasks = [_task(attempt, worker, served, room, frames) for attempt in attempts[: limits.DUMP_TASKS_MAX]]
    waiting = worker.state.channels.partitions.waiting()
    pool = worker.deployment.services.pool
    found: Fields = {
        "worker": worker.state.worker,
        "epoch": worker.state.epoch,
        "term": worker.state.term,
        "memory": {
            "segments": pool.total,
            "free": pool.free,
            "extra": pool.extra,
            "written_off": pool.written_off,
            "waiting_pools": pool.starving(),
        },
        "control": {
            "connected": worker.connected(),
            "outboxes_waiting": len(worker.outgoing),
            "reports_unacknowledged": len(worker.reports),
        },
        "inbox": len(worker.inbox),
        "links": [_link(link) for link in worker.links],
        "requests_waiting": [_request(each, worker.clock()) for each in waiting[: limits.DUMP_REQUESTS_MAX]],
        "requests_left_out": max(0, len(waiting) - limits.DUMP_REQUESTS_MAX),
        "tasks": tasks,
        "tasks_left_out": len(attempts) - len(tasks),
    }
    return json.dumps(found).encode()


def _served(links: Iterable[DataLink]) -> Served:
    found: dict[int, tuple[str, ProducerChannel]] = {}
    for link in links:
        for channel in _producers(link).values():
            found[id(channel.view)] = (_peer(link), channel)
    return found


def _producers(link: DataLink) -> Mapping[int, ProducerChannel]:
    machine = link.machine
    if isinstance(machine, OneWayReceiver):
        return {}
    return machine.channels if isinstance(machine, OneWaySender) else machine.producers.channels


def _peer(link: DataLink) -> str:
    return f"worker {link.peer.worker}" if link.peer.role == Role.WORKER else "an external client"


def _link(link: DataLink) -> Fields:
    """A data connection."""
    found: Fields = {
        "peer": _peer(link),
        "remote": link.remote,
        "paused": link.paused,
        "buffers_in_socket": link.unsent_buffers,
    }
    connection, purpose = link.machine, link.one_way
    if purpose is not None:
        found["one_way"] = {"job": purpose.job, "edge": purpose.edge, "number": purpose.number}
    if isinstance(connection, OneWayReceiver):
        return found | {
            "channels_in": connection.channels,
            "reading": connection.reading,
            "held_bytes": connection.held_bytes,
        }
    if isinstance(connection, OneWaySender):
        return found | {
            "channels_out": len(connection.channels),
            "channels_ready": len(connection.ready),
        }
    return found | {
        "control_unsent": connection.control_unsent,
        "channels_out": len(connection.producers.channels),
        "channels_ready": len(connection.producers.ready),
    }


def _request(waiting: Waiting, now: float) -> Fields:
    """A partition request that cannot be answered yet."""
    request = waiting.request
    return {
        "from": f"worker {waiting.link}",
        "job": request.partition.job,
        "edge": request.partition.edge,
        "producer": request.partition.producer,
        "producer_attempt": request.producer_attempt,
        "consumer": request.subpartition,
        "consumer_attempt": request.consumer_attempt,
        "seconds_left": round(waiting.deadline - now, 3),
    }


# --- tasks ----------------------------------------------------------------------------------------


def _task(
    attempt: Attempt, worker: DumpedWorker, served: Served, room: _Room, frames: Mapping[int, FrameType]
) -> Fields:
    task, spec, counters = attempt.task, attempt.spec, attempt.counters
    clock = attempt.paths.clock
    state, _ = clock.present()
    thread = task.thread
    frame = frames.get(thread.ident) if thread is not None and thread.ident is not None else None
    operators = {state_edge(spec.operator): spec.operator}
    operators |= {each.edge: each.operator for each in spec.inputs}
    operators |= {each.edge: each.operator for each in spec.outputs}
    earlier = task.state_handover.earlier
    gates = attempt.gates if earlier is None else [*attempt.gates, earlier.gate]
    return {
        "job": attempt.id.subtask.job,
        "task": f"{spec.name}[{spec.index}]",
        "operator": spec.operator,
        "index": spec.index,
        "attempt": attempt.id.attempt,
        "state": task.state,
        "thread": state or "none",
        "seconds": round(clock.age(), 3) if state is not None else 0.0,
        "waits_for": _waits_for(attempt, state),
        "stack": _stack(frame),
        "cancelled": attempt.paths.cancelled,
        "records_in": counters.records_in,
        "records_out": counters.records_out,
        "state_rows": counters.state_rows,
        "outbox_bytes": task.outbox.unsent_bytes,
        "buffers_returned": attempt.paths.returned,
        "gates": [_gate(gate, attempt, operators, worker.state, room) for gate in gates],
        "partitions": [
            _partition(partition, attempt.pools.get(edge), operators[edge], served, room)
            for edge, partition in attempt.partitions.items()
        ],
    }


def _waits_for(attempt: Attempt, state: str | None) -> str:
    if state == "idle":
        return "input"
    if state != "backpressured":
        return ""
    full = [pool.name for pool in attempt.pools.values() if not pool.available]
    if full:
        return f"a segment of {full[0]}"
    return "the coordinator to take rows or lines" if attempt.task.outbox else "the coordinator"


def _stack(frame: FrameType | None) -> list[str]:
    """Where a thread is, the innermost frame first; no source file is read for it."""
    found: list[str] = []
    while frame is not None and len(found) < limits.DUMP_FRAMES_MAX:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found


def _pool(pool: LocalPool) -> Fields:
    return {
        "name": pool.name,
        "in_use": pool.in_use,
        "size": pool.size,
        "minimum": pool.minimum,
        "maximum": pool.maximum,
        "waits": pool.starving,
    }


# --- inputs ---------------------------------------------------------------------------------------


def _gate(
    gate: InputGate, attempt: Attempt, operators: Mapping[int, int], state: WorkerState, room: _Room
) -> Fields:
    buffers = gate.buffers
    channels = room.take(gate.channels, lambda channel: bool(channel.queue) or channel.attachment is None)
    return {
        "edge": gate.edge,
        "from_operator": operators.get(gate.edge, -1),
        "pool": _pool(buffers.pool),
        "buffer_bytes": buffers.buffer_size,
        "waiting_for_floating": [each.producer for each in _first(buffers.line)],
        "waiting_for_exclusive": [each.producer for each in _first(buffers.short)],
        "ready": [channel.producer for channel in _first(gate.ready.line)],
        "channels": [
            _input(channel, ChannelKey(attempt.id, gate.edge, channel.producer), state)
            for channel in channels
        ],
        "channels_left_out": len(gate.channels) - len(channels),
    }


def _first(line: Iterable[T]) -> list[T]:
    """The first of a waiting line that any thread may change."""
    return list(line)[: limits.DUMP_CHANNELS_MAX]


def _input(channel: InputChannel, key: ChannelKey, state: WorkerState) -> Fields:
    entry, attachment = state.channels.inputs.get(key), channel.attachment
    phase = entry.phase if entry is not None else None
    found: Fields = {
        "producer": channel.producer,
        "phase": phase.value if phase is not None else "ended" if channel.ended else "external",
        "worker": entry.worker if entry is not None else 0,
        "generation": entry.request.generation if entry is not None else 0,
        "producer_attempt": entry.request.producer_attempt if entry is not None else 0,
        "queue": len(channel.queue),
        "events_queued": channel.events_queued,
        "half_element": channel.assembler.partial,
        "ended": channel.ended,
        "waits_for": _channel_waits_for(phase),
    }
    if isinstance(attachment, RemoteAttachment) and not channel.credit:
        found["tcp"] = {"waits_for_buffer": attachment.consumer.credit.waiting}
    elif isinstance(attachment, RemoteAttachment):
        credit = attachment.consumer.credit
        found["credit"] = {
            "announced": credit.granted - credit.received,
            "unannounced": credit.unannounced,
            "exclusive_free": len(credit.exclusive),
            "exclusive": credit.exclusive_total,
            "floating_free": len(credit.floating),
            "required": credit.required,
            "starved": credit.waiting,
        }
    elif isinstance(attachment, LocalAttachment):
        found["local"] = {"lent": attachment.outstanding, "credit": attachment.credit}
    return found


_WAITS = {
    ChannelPhase.WANTED: "a link to the producer's worker",
    ChannelPhase.REQUESTED: "the producer's first buffer or event",
    ChannelPhase.DRAINING: "the task to read what came before the failure",
    ChannelPhase.CACHED: "the task to read what came before the failure; the next attempt is known",
    ChannelPhase.DOWN: "the next attempt of the producer, or another try",
}


def _channel_waits_for(phase: ChannelPhase | None) -> str:
    return _WAITS.get(phase, "") if phase is not None else ""


# --- outputs --------------------------------------------------------------------------------------


def _partition(
    partition: ResultPartition, pool: LocalPool | None, operator: int, served: Served, room: _Room
) -> Fields:
    subpartitions = room.take(
        partition.subpartitions, lambda each: bool(each.state().queued) or each.view is None
    )
    return {
        "edge": partition.id.edge,
        "to_operator": operator,
        "pool": _pool(pool) if pool is not None else None,
        "channels": [_output(each, served) for each in subpartitions],
        "channels_left_out": len(partition.subpartitions) - len(subpartitions),
    }


def _output(subpartition: ResultSubpartition, served: Served) -> Fields:
    view, state = subpartition.view, subpartition.state()
    peer, channel = served.get(id(view), ("this worker", None))
    found: Fields = {
        "consumer": subpartition.consumer,
        "queue": state.queued,
        "backlog": subpartition.backlog(),
        "open_bytes": state.open_bytes,
        "available": state.available,
        "suspected": state.suspected,
        "closed": state.closed,
        "reader": "nobody" if view is None else peer,
    }
    if view is not None:
        found |= {"generation": view.generation, "consumer_attempt": view.attempt}
    if channel is not None and channel.credit.endless:
        found["ready"] = channel.enqueued
    elif channel is not None:
        found |= {"credit": channel.credit.available, "ready": channel.enqueued}
    return found

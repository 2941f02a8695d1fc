"""Traces of channels: the frames of a channel as they pass, kept until a client asks for them.

A trace begins with the first question for it, at the consumer's end, and ends when nobody has asked for
``TRACE_SECONDS_MAX``. It follows the channel through its generations. Everything is bounded, and no payload
is kept. (Loop.)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from minishuffle import limits
from minishuffle.exchange.channels import LocalAttachment, RemoteAttachment
from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId
from minishuffle.protocol.connection import Connection
from minishuffle.protocol.oneway import OneWayReceiver
from minishuffle.wire.inquiries import TracedChannel
from minishuffle.worker.channels.registry import ChannelEntry, ChannelKey
from minishuffle.worker.state import WorkerState
from minishuffle.worker.tasks.deployment import Deployment

__all__ = ["ChannelTraces"]

_Name: TypeAlias = tuple[str, int, int, int, int]
"""Job, and the fields of a TracedChannel."""
MICROSECOND_DIGITS: Final = 6


@dataclass(slots=True)
class _Trace:
    asked_at: float
    frames: deque[dict[str, Any]] = field(default_factory=deque)
    left_out: int = 0
    """Frames since the last question that did not fit."""
    ends: dict[tuple[int, int], tuple[Connection | OneWayReceiver, int]] = field(default_factory=dict)
    """By edge and generation, the connection and the channel that are listened to."""


class ChannelTraces:
    """The traces of one worker.

    Args:
        clock: the loop's, in seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        state: WorkerState,
        deployment: Deployment,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._state = state
        self._deployment = deployment
        self._clock = clock
        self._wall = wall
        self._traces: dict[_Name, _Trace] = {}
        """Ordered by the last question, the oldest first."""

    def answer(self, job: str, channel: TracedChannel) -> bytes:
        """The frames since the question before, as JSON; the first one begins the trace."""
        name = (job, channel.producer_operator, channel.producer, channel.operator, channel.index)
        trace = self._traces.pop(name, None) or _Trace(self._clock())
        trace.asked_at = self._clock()
        self._traces[name] = trace
        while len(self._traces) > limits.TRACES_MAX:
            self._end(next(iter(self._traces)))
        channels = self._channels(job, channel)
        self._follow(trace, channels)
        found = {
            "frames": list(trace.frames),
            "left_out": trace.left_out,
            "channels": [
                {
                    "edge": key.edge,
                    "phase": entry.phase.value,
                    "generation": entry.request.generation,
                    "producer_worker": entry.worker,
                    "local": self._is_local(key),
                }
                for key, entry in channels
            ],
        }
        trace.frames.clear()
        trace.left_out = 0
        return json.dumps(found).encode()

    def expire(self) -> None:
        """End traces that nobody asks for any more."""
        over = self._clock() - limits.TRACE_SECONDS_MAX
        for name in [name for name, trace in self._traces.items() if trace.asked_at < over]:
            self._end(name)

    def _end(self, name: _Name) -> None:
        for connection, channel in self._traces.pop(name).ends.values():
            connection.listen_no_more(channel)

    def _channels(self, job: str, channel: TracedChannel) -> list[tuple[ChannelKey, ChannelEntry]]:
        """The channels of the consumer's newest attempt on this worker, one for each edge between the two."""
        consumer = SubtaskId(JobId(job), OperatorId(channel.operator), channel.index)
        producer = SubtaskId(JobId(job), OperatorId(channel.producer_operator), channel.producer)
        inputs = self._state.channels.inputs
        keys = [key for key in inputs.readers(producer) if key.attempt.subtask == consumer]
        newest = max((key.attempt.attempt for key in keys), default=0)
        here = AttemptId(consumer, newest)
        return [(key, inputs[key]) for key in keys if key.attempt == here]

    def _is_local(self, key: ChannelKey) -> bool:
        channel = self._deployment.channel(key)
        return channel is not None and isinstance(channel.attachment, LocalAttachment)

    def _follow(self, trace: _Trace, channels: list[tuple[ChannelKey, ChannelEntry]]) -> None:
        """Listen to what the channels are attached to now, and to nothing else."""
        there: dict[tuple[int, int], tuple[Connection | OneWayReceiver, int]] = {}
        for key, _ in channels:
            channel = self._deployment.channel(key)
            if channel is not None and isinstance(attachment := channel.attachment, RemoteAttachment):
                end = attachment.link.connection, attachment.consumer.id
                there[key.edge, attachment.generation] = end
        for place in trace.ends.keys() - there.keys():
            connection, number = trace.ends.pop(place)
            connection.listen_no_more(number)
        for place in there.keys() - trace.ends.keys():
            trace.ends[place] = there[place]
            there[place][0].listen(there[place][1], self._noting(trace, *place))

    def _noting(self, trace: _Trace, edge: int, generation: int) -> Callable[[str, dict[str, Any]], None]:
        def note(way: str, fields: dict[str, Any]) -> None:
            if len(trace.frames) >= limits.TRACE_FRAMES_MAX:
                trace.frames.popleft()
                trace.left_out += 1
            at = round(self._wall(), MICROSECOND_DIGITS)
            trace.frames.append({"at": at, "way": way, "edge": edge, "generation": generation, **fields})

        return note

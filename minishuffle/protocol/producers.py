"""The producing half of a connection: its channels, and the line in which they take turns.

(Flink: ``PartitionRequestQueue``.)
"""

from __future__ import annotations

from collections import deque

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import RemoteProtocolError, ResourceExhausted, ShuffleError
from minishuffle.protocol.channel import ChannelState, Outgoing, ProducerChannel, SubpartitionView
from minishuffle.wire.frames import (
    BacklogAnnouncement,
    DataType,
    Error,
    Frame,
    PartitionRequest,
    write_buffer_header,
)

__all__ = ["Producers"]


class Producers:
    """Every channel on which this side produces.

    Invariants: a channel stands in the line at most once, and ``enqueued`` says so; an id is either
    requested or attached.

    Args:
        control: where control frames wait to be sent.
    """

    def __init__(self, control: deque[Frame], counters: ConnectionCounters) -> None:
        self.channels: dict[int, ProducerChannel] = {}
        self.ready: deque[ProducerChannel] = deque()
        self._requested: dict[int, PartitionRequest] = {}
        self._control = control
        self._counters = counters

    def expect(self, request: PartitionRequest) -> bool:
        """The peer asks for a partition; False if there are too many channels already."""
        if len(self.channels) + len(self._requested) >= limits.CHANNELS_PER_CONNECTION_MAX:
            error = ResourceExhausted(f"more than {limits.CHANNELS_PER_CONNECTION_MAX} channels")
            self._control.append(Error(request.channel, error.code, str(error)))
            return False
        self._requested[request.channel] = request
        return True

    def attach(self, channel: int, view: SubpartitionView) -> ProducerChannel | None:
        request = self._requested.pop(channel, None)
        if request is None:
            view.release()
            return None
        producer = ProducerChannel(channel, view, request.initial_credit)
        self._counters.credits_received += request.initial_credit
        self.channels[channel] = producer
        self.available(channel)
        return producer

    def refuse(self, channel: int, error: ShuffleError) -> None:
        if self._requested.pop(channel, None) is not None:
            self._control.append(Error(channel, error.code, str(error)))

    def fail(self, channel: int, error: ShuffleError) -> None:
        producer = self.channels.pop(channel, None)
        if producer is not None:
            producer.close()
            self._control.append(Error(channel, error.code, str(error)))

    def cancel(self, channel: int) -> None:
        """The consumer wants no more; an unknown id is ignored."""
        self._requested.pop(channel, None)
        producer = self.channels.pop(channel, None)
        if producer is not None:
            producer.close()

    def on_credit(self, channel: int, credit: int) -> None:
        """AddCredit; that of a closed channel is ignored, an absurd one ends its channel."""
        producer = self.channels.get(channel)
        if producer is None:
            return
        self._counters.credits_received += credit
        try:
            producer.on_credit(credit)
        except RemoteProtocolError as error:
            self.fail(channel, error)
        else:
            self.available(channel)

    def available(self, channel: int) -> None:
        """Data, an event or credit came: get in line, or say that there is backlog without credit."""
        producer = self.channels.get(channel)
        if producer is None or producer.enqueued:
            return
        if producer.sendable():
            producer.enqueued = True
            self.ready.append(producer)
        else:
            self._announce_backlog(producer)

    def _announce_backlog(self, producer: ProducerChannel) -> None:
        backlog = producer.backlog_to_announce()
        if backlog:
            self._control.append(BacklogAnnouncement(producer.id, min(backlog, limits.CREDIT_MAX)))

    def take_turns(self, buffers_max: int, chunks: list[bytes | memoryview]) -> list[Outgoing]:
        """One buffer of each ready channel in turn, at most ``buffers_max``; frames go to ``chunks``."""
        pieces: list[Outgoing] = []
        ready = self.ready
        while ready and len(pieces) < buffers_max:
            producer = ready.popleft()
            producer.enqueued = False
            if producer.state is ChannelState.CLOSED or not producer.sendable():
                continue
            polled = producer.poll()
            if polled is None:
                continue
            piece = polled[0]
            chunks.append(self._framed(producer.id, *polled))
            pieces.append(piece)
            if producer.sendable():
                producer.enqueued = True
                ready.append(producer)
            elif piece.data_type == DataType.EVENT:
                self._announce_backlog(producer)
        if pieces:
            frames_out = self._counters.frames_out
            frames_out["buffer_response"] = frames_out.get("buffer_response", 0) + len(pieces)
        return pieces

    def _framed(self, channel: int, piece: Outgoing, sequence: int, backlog: int) -> memoryview:
        frame = write_buffer_header(
            piece.memory,
            piece.start,
            piece.size,
            channel,
            sequence,
            backlog,
            piece.data_type,
            piece.flags,
            piece.first_start,
            piece.rows,
        )
        counters = self._counters
        counters.bytes_out += len(frame)
        if piece.data_type == DataType.DATA:
            counters.buffers_out += 1
            counters.payload_bytes_out += piece.size
            counters.rows_out += piece.rows
        return frame

    def lost(self) -> None:
        """The connection is gone."""
        for producer in self.channels.values():
            producer.close()
        self.channels.clear()
        self._requested.clear()
        self.ready.clear()

    def validate(self) -> None:
        line = [producer.id for producer in self.ready if producer.state is ChannelState.OPEN]
        assert len(line) == len(set(line))
        assert all(producer.enqueued for producer in self.ready)
        assert not set(self._requested) & set(self.channels)
        for producer in self.channels.values():
            producer.validate()

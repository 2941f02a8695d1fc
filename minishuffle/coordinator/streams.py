"""Streams of jobs that external clients write. Pure.

A writer asks where a partition of its write goes. With the first of them the coordinator announces the
write to all subtasks, so that event time waits for it everywhere; then it announces the partition to its
subtask's worker, which answers how much of it is there, and sends the writer there with a ticket. A commit
asks every subtask whether its partitions are complete, and ends the write, and a bounded stream with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from minishuffle.coordinator.instructions import Instruction, Reply, refusal
from minishuffle.coordinator.jobs import Job
from minishuffle.coordinator.polls import require_room
from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import InvalidGraph, PeerLost, UnknownName, UsageError, error_from_code
from minishuffle.wire.clients import (
    AbortWrite,
    BeginWrite,
    CommitWrite,
    DescribeStream,
    EndStream,
    EndWrite,
    ExpectUpstream,
    OpenUpstream,
    StreamInfo,
    UpstreamExpected,
    UpstreamOpened,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.messages import Accepted, ControlMessage, ErrorInfo, WorkerAddress

__all__ = ["StreamRequest", "Streams"]

OVER_KEPT: Final = 100
"""Streams of ended jobs whose end is remembered."""

StreamRequest = DescribeStream | OpenUpstream | CommitWrite | AbortWrite | EndStream


class _Opening(NamedTuple):
    link: int
    request: int
    message: OpenUpstream


@dataclass(slots=True)
class _Write:
    """A write that has begun and not ended."""

    open_answers: int
    """Subtasks that have yet to say that their event time waits for it."""
    waiting: list[_Opening] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    name: str
    job: Job
    operator: int
    parallelism: int
    bounded: bool
    schema_message: bytes
    writer: str = ""
    """The write that a bounded stream belongs to: the first that opened it. Two of them would end it with
    what there is of the other."""
    ended: bool = False
    ended_by: str = ""
    """The write whose commit ended it."""
    writes: dict[str, _Write] = field(default_factory=dict)


@dataclass(slots=True)
class _PendingWrite:
    """A request that waits for workers; ``missing`` gathers what they answer to a commit."""

    link: int
    request: int
    stream: _Stream
    worker: WorkerAddress | None = None
    open_answers: int = 1
    missing: list[int] = field(default_factory=list)
    second: EndWrite | None = None
    write: str = ""
    """Which a commit or an abort ends."""


class Streams:
    """Args:
    send: a message to a worker that is alive; False if it is not.
    address: of a worker that is alive, or None.
    tickets: numbers that are never used again.
    """

    def __init__(
        self,
        term: int,
        send: Callable[[int, ControlMessage], bool],
        address: Callable[[int], WorkerAddress | None],
        tickets: Iterator[int],
    ) -> None:
        self._term = term
        self._send = send
        self._address = address
        self._streams: dict[str, _Stream] = {}
        self._pending: dict[int, _PendingWrite] = {}
        self._beginning: dict[int, tuple[_Stream, _Write]] = {}
        self._over: dict[str, tuple[str, str]] = {}
        """Streams whose job ended, the last ones: how, which a task that tries again must hear; and the id
        of a job that finished and took any number of writes, whose last may yet be committed."""
        self._tickets = tickets

    def check(self, graph: JobGraph) -> None:
        """
        Raises:
            UsageError: another job reads one of the job's streams.
            InvalidGraph: the job reads one twice.
        """
        names = [vertex.stream for vertex in graph.vertices if vertex.stream]
        for name in names:
            if names.count(name) > 1:
                raise InvalidGraph(f"the job reads stream {name!r} twice: read it once and use that again")
        for vertex in graph.vertices:
            taken = self._streams.get(vertex.stream) if vertex.stream else None
            if taken is not None:
                raise UsageError(
                    f"stream {vertex.stream!r} is read by job {taken.job.id} ({taken.job.name}) already: "
                    "cancel that job, or name the stream otherwise"
                )

    def add(self, job: Job, graph: JobGraph) -> None:
        for operator, vertex in enumerate(graph.vertices):
            if vertex.stream:
                self._over.pop(vertex.stream, None)
                self._streams[vertex.stream] = _Stream(
                    vertex.stream, job, operator, vertex.parallelism, vertex.bounded, vertex.stream_schema
                )

    def remove(self, job: Job) -> list[Instruction]:
        """The job has ended: requests that still wait fail."""
        gone = [ticket for ticket, pending in self._pending.items() if pending.stream.job is job]
        causes = job.history.causes
        why = f": {causes[0].text}" if causes else ""
        text = f"job {job.id} ({job.name}) ended as {job.state} while its stream was written{why}"
        error = UsageError(text)
        for name in [name for name, stream in self._streams.items() if stream.job is job]:
            stream = self._streams.pop(name)
            how = "it was committed already, " if stream.ended_by else ""
            end = f"stream {name!r} has ended: {how}its job {job.id} ({job.name}) is finished"
            finished = job.state in ("finished", "finished_with_loss")
            endless = job.id if finished and not stream.bounded else ""
            self._over[name] = (end if finished else text, endless)
        while len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]
        out: list[Instruction] = [
            refusal(pending.link, pending.request, error) for pending in map(self._pending.pop, gone)
        ]
        beginning = [ticket for ticket, (stream, _) in self._beginning.items() if stream.job is job]
        for ticket in beginning:
            _, write = self._beginning.pop(ticket)
            out += [refusal(opening.link, opening.request, error) for opening in write.waiting]
        return out

    def forget(self, link: int) -> None:
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.link == link]:
            del self._pending[ticket]
        for _, write in self._beginning.values():
            write.waiting = [opening for opening in write.waiting if opening.link != link]

    # --- clients ---------------------------------------------------------------------------------

    def request(self, link: int, request: int, message: StreamRequest, at: float) -> list[Instruction]:
        """Raises ShuffleError: the request cannot be granted."""
        waiting = [pending.link for pending in self._pending.values()]
        for _, write in self._beginning.values():
            waiting += [opening.link for opening in write.waiting]
        require_room(link, waiting)
        if isinstance(message, CommitWrite) and (job := self._over.get(message.stream, ("", ""))[1]):
            return [Reply(link, request, Accepted(job=job))]
        stream = self._stream(message.stream)
        match message:
            case DescribeStream():
                info = StreamInfo(
                    stream=stream.name,
                    job=stream.job.id,
                    bounded=stream.bounded,
                    schema_message=stream.schema_message,
                )
                return [Reply(link, request, info)]
            case OpenUpstream():
                return self._open(_Opening(link, request, message), stream)
            case CommitWrite():
                return self._commit(link, request, stream, message)
            case EndStream():
                return self._end(link, request, stream)
            case AbortWrite():
                return self._abort(link, request, stream, message, at)

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is not None:
            return stream
        if name in self._over:
            raise UsageError(f"{self._over[name][0]}; submit the job again")
        known = ", ".join(sorted(self._streams)) or "none"
        raise UnknownName(
            f"no running job reads a stream {name!r} (there are: {known}): submit the job with "
            f"Stream.from_spark({name!r}, ...) first"
        )

    def _open(self, opening: _Opening, stream: _Stream) -> list[Instruction]:
        message = opening.message
        if stream.ended:
            raise UsageError(f"stream {stream.name!r} has ended: it was committed already")
        if message.schema_message != stream.schema_message:
            raise UsageError(f"what is written to stream {stream.name!r} does not have its schema")
        self._claim(stream, message.write)
        write = stream.writes.get(message.write) or self._begin(stream, message)
        if write.open_answers:
            write.waiting.append(opening)
            return []
        return self._expect(opening, stream)

    def _begin(self, stream: _Stream, message: OpenUpstream) -> _Write:
        """Announce a write to every subtask before any of its rows come.

        Else one whose partitions begin later, or that had none so far and holds nobody back, would let
        event time pass by what it is about to bring.
        """
        write = stream.writes[message.write] = _Write(stream.parallelism)
        ticket = next(self._tickets)
        self._beginning[ticket] = (stream, write)
        for index in range(stream.parallelism):
            fields = self._about(stream, index, ticket, message.write)
            self._send(stream.job.placement[index], BeginWrite(partitions=message.partitions, **fields))
        return write

    def _expect(self, opening: _Opening, stream: _Stream) -> list[Instruction]:
        message = opening.message
        index = message.partition % stream.parallelism
        worker = stream.job.placement[index]
        pending = _PendingWrite(opening.link, opening.request, stream, self._address(worker))
        fields = self._about(stream, index, self._ticket(pending), message.write)
        expect = ExpectUpstream(partition=message.partition, attempt=message.attempt, **fields)
        if self._send(worker, expect):
            return []
        del self._pending[expect.ticket]
        error = PeerLost(f"worker {worker}, which reads stream {stream.name!r}, is gone")
        return [refusal(opening.link, opening.request, error)]

    @staticmethod
    def _claim(stream: _Stream, write: str) -> None:
        """Raises UsageError: the stream is bounded and another write's."""
        if not stream.bounded:
            return
        if stream.writer not in ("", write):
            if stream.ended:
                raise UsageError(f"stream {stream.name!r} has ended: it was committed already")
            raise UsageError(
                f"stream {stream.name!r} is being written by another save: a bounded stream takes one; wait "
                f"for its end, or cancel job {stream.job.id} and submit it again if that save is gone"
            )
        stream.writer = write

    def _commit(self, link: int, request: int, stream: _Stream, message: CommitWrite) -> list[Instruction]:
        if stream.ended and stream.ended_by == message.write:
            return [Reply(link, request, Accepted(job=stream.job.id))]
        self._claim(stream, message.write)
        pending = _PendingWrite(link, request, stream, write=message.write)
        end = self._end_write(pending, message.partitions)
        pending.second = end if stream.bounded and not stream.ended else None
        self._ask_all(pending, end)
        return []

    def _abort(
        self, link: int, request: int, stream: _Stream, message: AbortWrite, at: float
    ) -> list[Instruction]:
        """A bounded stream's job fails; from an endless one the write goes, and event time goes on."""
        if not stream.bounded:
            pending = _PendingWrite(link, request, stream, write=message.write)
            self._ask_all(pending, self._end_write(pending, []))
            return []
        # One that was refused because another save has the stream does that one no harm.
        if stream.writer in ("", message.write):
            text = f"the write of stream {stream.name!r} was aborted: {message.reason}"
            stream.job.fail(ErrorInfo(code=UsageError.code, text=text), at)
        return [Reply(link, request, Accepted(job=stream.job.id))]

    def _end(self, link: int, request: int, stream: _Stream) -> list[Instruction]:
        if stream.ended:
            return [Reply(link, request, Accepted(job=stream.job.id))]
        pending = _PendingWrite(link, request, stream)
        stream.ended = True
        self._ask_all(pending, self._end_write(pending, []).model_copy(update={"last": True}))
        return []

    def _end_write(self, pending: _PendingWrite, partitions: list[int]) -> EndWrite:
        fields = self._about(pending.stream, 0, self._ticket(pending), pending.write)
        return EndWrite(partitions=partitions, last=False, **fields)

    def _about(self, stream: _Stream, index: int, ticket: int, write: str) -> dict[str, Any]:
        """What all messages to subtask ``index`` of a stream have."""
        attempt = stream.job.attempt_of(stream.operator, index)
        where = {"job": stream.job.id, "operator": stream.operator, "index": index, "task_attempt": attempt}
        return where | {"term": self._term, "ticket": ticket, "write": write}

    def _ask_all(self, pending: _PendingWrite, end: EndWrite) -> None:
        stream = pending.stream
        pending.open_answers = stream.parallelism
        for index in range(stream.parallelism):
            mine = [number for number in end.partitions if number % stream.parallelism == index]
            attempt = stream.job.attempt_of(stream.operator, index)
            message = end.model_copy(update={"index": index, "task_attempt": attempt, "partitions": mine})
            self._send(stream.job.placement[index], message)

    def _ticket(self, pending: _PendingWrite) -> int:
        ticket = next(self._tickets)
        self._pending[ticket] = pending
        return ticket

    # --- workers ---------------------------------------------------------------------------------

    def answered(self, message: UpstreamExpected | WriteBegun | WriteEnded) -> list[Instruction]:
        """What a worker answers to a ticket that nobody waits for any more is ignored."""
        if isinstance(message, WriteBegun):
            return self._begun(message.ticket)
        pending = self._pending.get(message.ticket)
        if pending is None:
            return []
        if isinstance(message, UpstreamExpected):
            if message.error is not None and pending.stream.job.stopping:
                return []  # :meth:`remove` will say why, which the worker does not know
            del self._pending[message.ticket]
            return [self._opened(pending, message)]
        pending.open_answers -= 1
        pending.missing += message.missing
        if pending.open_answers:
            return []
        if not pending.missing:
            pending.stream.writes.pop(pending.write, None)
        if not pending.missing and pending.second is not None:
            end, pending.second = pending.second.model_copy(update={"last": True}), None
            pending.stream.ended, pending.stream.ended_by = True, end.write
            self._ask_all(pending, end)
            return []
        del self._pending[message.ticket]
        if pending.missing:
            numbers = ", ".join(map(str, sorted(pending.missing)[:10]))
            return [
                refusal(
                    pending.link,
                    pending.request,
                    UsageError(f"partitions {numbers} of the write are not complete"),
                )
            ]
        return [Reply(pending.link, pending.request, Accepted(job=pending.stream.job.id))]

    def _opened(self, pending: _PendingWrite, message: UpstreamExpected) -> Reply:
        if message.error is not None:
            return refusal(
                pending.link, pending.request, error_from_code(message.error.code, message.error.text)
            )
        assert pending.worker is not None
        opened = UpstreamOpened(
            term=self._term,
            ticket=message.ticket,
            job=pending.stream.job.id,
            worker=pending.worker,
            rows=message.rows,
            checksum=message.checksum,
            complete=message.complete,
            segment_bytes=message.segment_bytes,
        )
        return Reply(pending.link, pending.request, opened)

    def _begun(self, ticket: int) -> list[Instruction]:
        if ticket not in self._beginning:
            return []
        stream, write = self._beginning[ticket]
        write.open_answers -= 1
        if write.open_answers:
            return []
        del self._beginning[ticket]
        waiting, write.waiting = write.waiting, []
        return [instruction for opening in waiting for instruction in self._expect(opening, stream)]

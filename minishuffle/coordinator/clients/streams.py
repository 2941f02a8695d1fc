"""The writes of external clients into the streams of jobs. Pure.

A writer asks where a partition of its write goes. On the first request of a write, the coordinator announces
the write to all subtasks of the source, so that their event time waits for it. Then it announces the
partition to its subtask. The subtask's worker answers how many rows of the partition it has, and the
coordinator sends the writer there with a ticket. A commit asks every subtask whether its partitions are
complete. If all are, it ends the write, and the stream as well if that is bounded.

The journal has the writes that have begun or ended, and the writer of a bounded stream. It does not have the
open questions to workers: after a restart of the coordinator, clients ask again, and the new coordinator
repeats its announcements to every subtask.

A stream may end in the middle of a write. In a job that loses nothing its subtasks then wait for the
partitions that were let in before and are not complete, unless their write ends or becomes idle. Their
programs are let in again, also by attempts that begin behind the end.

A subtask that restarts gets the positions of the partitions from its job (``WriteProgress``), and from here
the writes that have begun or ended. Questions that its last attempt has not answered go to the new attempt.

A program that is killed neither commits nor aborts its write. A write into an endless stream becomes idle if
for WRITE_IDLE_SECONDS no program is connected for it or asks for it. Event time does not wait for an idle
write; the next request of the write ends the idleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.instructions import Instruction, Reply
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import InvalidGraph, PeerLost, UnknownName, UsageError, error_from_code
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.clients import (
    ROWS_FORGOTTEN,
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
    query_and_batch,
    write_and_partition,
)
from minishuffle.wire.messages import ControlMessage, ErrorInfo, TaskReport, WorkerAddress
from minishuffle.wire.requests import Accepted

__all__ = ["StreamRequest", "Streams"]

ENDED_STREAMS_KEPT: Final = 100
"""Number of ended jobs' streams whose end is remembered."""

StreamRequest = DescribeStream | OpenUpstream | CommitWrite | AbortWrite | EndStream
_OfWrite: TypeAlias = BeginWrite | ExpectUpstream | EndWrite
"""The announcement of a write to a subtask."""


class RecordedWrite(NamedTuple):
    """A write into a stream, as it is journaled."""

    name: str
    partitions: int
    begun: bool
    """The event time of all subtasks waits for it."""
    ended: bool
    opened: tuple[int, ...] = ()
    """As of :class:`_Write`."""


@dataclass(frozen=True, slots=True)
class StreamRecord(Record):
    """The writer of a stream and the writes into it; see :class:`_Stream`."""

    writer: str
    ended: bool
    ended_by: str
    writes: tuple[RecordedWrite, ...]
    forgotten: dict[str, int]


@dataclass(slots=True)
class _Write:
    """A write that has begun. The latest ended writes are kept too."""

    partitions: int
    """Number of its partitions; 0: not known."""
    open_answers: int
    """Subtasks that have not yet confirmed that their event time waits for the write."""
    ended: bool = False
    connected_at: float | None = None
    """When a program was last connected for it, or the job was last paused. None: it has just asked, or the
    coordinator has just started."""
    idle: bool = False
    opened: set[int] = field(default_factory=set)
    """Partitions that were let in, until it ends, if these are awaited behind the end of the stream."""

    def end(self) -> None:
        """All its partitions are complete."""
        self.ended = True
        self.opened.clear()


@dataclass(slots=True)
class _Stream:
    name: str
    job: Job
    operator: int
    parallelism: int
    bounded: bool
    schema_message: bytes
    awaits_writers: bool
    """Its subtasks wait, behind its end, for partitions that were let in before."""
    writer: str = ""
    """The first write that opened a bounded stream; no other is accepted, since each would end the stream
    while rows of the other are missing."""
    ended: bool = False
    ended_by: str = ""
    """The write whose commit ended the stream."""
    writes: dict[str, _Write] = field(default_factory=dict)
    forgotten: dict[str, int] = field(default_factory=dict)
    """The number of the last ended batch that is no longer in ``writes``, by streaming query."""

    def task(self, index: int) -> Subtask:
        """One of its subtasks."""
        return self.job.subtasks[self.operator, index]

    def has_forgotten(self, write: str) -> bool:
        """Whether that is a batch of a streaming query which has ended long ago."""
        query, batch = query_and_batch(write)
        return write not in self.writes and batch <= self.forgotten.get(query, -1)

    def lets_in(self, write: str, partition: int) -> bool:
        """Whether a partition may be written, for the first time or again."""
        known = self.writes.get(write)
        return not self.ended or (known is not None and not known.idle and partition in known.opened)

    def let_in(self, message: _OfWrite) -> None:
        """Note that a partition is let in, if its end is awaited."""
        write = self.writes.get(message.write) if self.awaits_writers else None
        if write is not None and not write.ended and isinstance(message, ExpectUpstream):
            write.opened.add(message.partition)

    def record(self) -> StreamRecord:
        """For the journal."""
        writes = tuple(
            RecordedWrite(
                name, write.partitions, write.open_answers == 0, write.ended, tuple(sorted(write.opened))
            )
            for name, write in self.writes.items()
        )
        return StreamRecord(self.writer, self.ended, self.ended_by, writes, self.forgotten)


class _Opening(NamedTuple):
    """A request to open a partition, announced to its subtask once the write has begun in all subtasks."""

    message: OpenUpstream
    write: _Write


@dataclass(slots=True, eq=False)
class _PendingWrite(Pending):
    """A request that waits for answers of workers; ``missing`` collects the partitions that they report as
    incomplete at a commit."""

    stream: _Stream
    open_answers: int = 1
    missing: list[int] = field(default_factory=list)
    second: EndWrite | None = None
    write: str = ""
    """The write to commit or abort."""
    opening: _Opening | None = None
    """Set until the write has begun in all subtasks."""


class _Question(NamedTuple):
    """A message that a subtask has not answered yet; ``by`` waits for the answer."""

    stream: _Stream
    message: _OfWrite
    by: _PendingWrite | _Write


class Streams:
    """The streams of all jobs.

    Args:
        send: sends a message to a worker; False if the worker is not alive.
        address: of a worker; None if the worker is not alive.
    """

    def __init__(
        self,
        term: int,
        send: Callable[[int, ControlMessage], bool],
        address: Callable[[int], WorkerAddress | None],
        pending: PendingRequests,
    ) -> None:
        self._term = term
        self._send = send
        self._address = address
        self._streams: dict[str, _Stream] = {}
        self._pending = pending
        self._ended_streams: dict[str, tuple[str, str]] = {}
        """Streams of the last :data:`ENDED_STREAMS_KEPT` ended jobs: the error text for tasks that try again;
        and the id of a job that finished and read an endless stream, whose last write may still be committed,
        else empty."""
        self._changed: set[str] = set()
        """Jobs whose streams may have changed since the last :meth:`changed`."""

    # --- journal ---------------------------------------------------------------------------------

    def changed(self) -> set[str]:
        """Jobs to :meth:`record` since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def record(self, job: str) -> dict[int, StreamRecord]:
        """The journal's records of the job's streams, by operator."""
        return {stream.operator: stream.record() for stream in self._streams.values() if stream.job.id == job}

    def desired(self, worker: int) -> list[_OfWrite]:
        """The messages that subtasks on a worker which comes back may have missed. Their answers may be lost
        as well."""
        found: list[_OfWrite] = []
        for stream in self._streams.values():
            for index in range(stream.parallelism):
                job = stream.job
                if stream.task(index).is_reachable and job.worker_of(stream.operator, index) == worker:
                    found += self._all_for(stream, index)
        return found

    # --- jobs ------------------------------------------------------------------------------------

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

    def add(self, job: Job, graph: JobGraph, records: Mapping[int, StreamRecord]) -> None:
        """Add the streams of a job: a new one with no ``records``, or a restored one with the result of
        :meth:`record`."""
        for operator, vertex in enumerate(graph.vertices):
            if vertex.stream:
                self._ended_streams.pop(vertex.stream, None)
                stream = self._streams[vertex.stream] = _Stream(
                    vertex.stream,
                    job,
                    operator,
                    vertex.parallelism,
                    vertex.bounded,
                    vertex.stream_schema,
                    operator in graph.snapshotted(),
                )
                if (record := records.get(operator)) is not None:
                    self._recall(stream, record)
                self._changed.add(job.id)

    def _recall(self, stream: _Stream, record: StreamRecord) -> None:
        """Restore a stream. A write that had not begun in all subtasks is announced again."""
        stream.writer, stream.ended, stream.ended_by = record.writer, record.ended, record.ended_by
        stream.forgotten = record.forgotten
        for each in record.writes:
            write = stream.writes[each.name] = _Write(
                each.partitions, 0, ended=each.ended, opened=set(each.opened)
            )
            if not each.begun:
                self._announce(stream, each.name, write)

    def remove(self, job: Job) -> list[Instruction]:
        """The job has ended: refuse the requests that wait for it."""
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
            self._ended_streams[name] = (end if finished else text, endless)
        while len(self._ended_streams) > ENDED_STREAMS_KEPT:
            del self._ended_streams[next(iter(self._ended_streams))]
        requests = [each for each in self._pending.of(_PendingWrite) if each.stream.job is job]
        refusals: list[Instruction] = [self._pending.refuse(each, error) for each in requests]
        for ticket, question in self._pending.questions(_Question):
            if question.stream.job is job:
                self._pending.close(ticket)
        return refusals

    # --- clients ---------------------------------------------------------------------------------

    def request(self, link: int, request: int, message: StreamRequest, at: float) -> list[Instruction]:
        """Raises ShuffleError: the request cannot be granted."""
        self._pending.require_room(_PendingWrite, link)
        if isinstance(message, CommitWrite) and (job := self._ended_streams.get(message.stream, ("", ""))[1]):
            return [Reply(link, request, Accepted(job=job))]
        stream = self._stream(message.stream)
        self._changed.add(stream.job.id)
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
                return self._open(link, request, stream, message, at)
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
        if name in self._ended_streams:
            raise UsageError(f"{self._ended_streams[name][0]}; submit the job again")
        known = ", ".join(sorted(self._streams)) or "none"
        raise UnknownName(
            f"no running job reads a stream {name!r} (there are: {known}): submit the job with "
            f"Table.from_spark({name!r}, ...) first"
        )

    def _open(
        self, link: int, request: int, stream: _Stream, message: OpenUpstream, at: float
    ) -> list[Instruction]:
        if not stream.lets_in(message.write, message.partition):
            raise _committed(stream)
        if message.schema_message != stream.schema_message:
            raise UsageError(f"what is written to stream {stream.name!r} does not have its schema")
        self._claim(stream, message.write)
        if stream.has_forgotten(message.write):
            return [Reply(link, request, self._forgotten(stream))]
        write = stream.writes.get(message.write) or self._begin(stream, message)
        write.connected_at = None
        if write.idle:
            write.idle = False
            stream.job.history.note(at, "write goes on", f"write {message.write} of stream {stream.name!r}")
            self._announce(stream, message.write, write)
        opening = _Opening(message, write)
        pending = self._pending.add(_PendingWrite(link, request, stream, opening=opening))
        if not write.open_answers:
            self._expect(pending, message)
        return []

    def _begin(self, stream: _Stream, message: OpenUpstream) -> _Write:
        """Announce a write to every subtask before any of its rows arrive.

        Otherwise a subtask none of whose partitions has begun would not hold the watermark back, and rows of
        the write could be late.
        """
        gone = self._forget_writes(stream)
        write = stream.writes[message.write] = _Write(message.partitions, 0)
        self._announce(stream, message.write, write, gone)
        return write

    def _announce(self, stream: _Stream, name: str, write: _Write, gone: Sequence[str] = ()) -> None:
        """Ask all subtasks to wait for it, and to forget the writes ``gone``."""
        write.open_answers = stream.parallelism
        for index in range(stream.parallelism):
            about = self._about(stream, index, name)
            begin = BeginWrite(partitions=write.partitions, forgotten=list(gone), **about)
            self._ask(stream, begin, write)

    def _forgotten(self, stream: _Stream) -> UpstreamOpened:
        """The answer to a writer of a batch that ended long ago: the batch is complete."""
        return UpstreamOpened(
            term=self._term,
            ticket=0,
            job=stream.job.id,
            worker=WorkerAddress(worker=0, epoch=0, host="", data_port=0),
            rows=ROWS_FORGOTTEN,
            checksum=0,
            complete=True,
            segment_bytes=0,
        )

    @staticmethod
    def _forget_writes(stream: _Stream) -> list[str]:
        """Gives those that workers are to forget too. Of a streaming query it is known which batches they
        were."""
        ended = [name for name, write in stream.writes.items() if write.ended]
        gone = ended[: max(0, len(ended) + 1 - limits.WRITES_KEPT)]
        for name in gone:
            del stream.writes[name]
            stream.job.progress.sources.forget(stream.operator, partial(_is_of, name))
            stream.job.subtasks.touch(*((stream.operator, index) for index in range(stream.parallelism)))
            query, batch = query_and_batch(name)
            if query:
                stream.forgotten[query] = max(batch, stream.forgotten.get(query, 0))
        return gone

    def _expect(self, pending: _PendingWrite, message: OpenUpstream) -> None:
        pending.opening = None
        about = self._about(pending.stream, message.partition % pending.stream.parallelism, message.write)
        expect = ExpectUpstream(
            partition=message.partition,
            attempt=message.attempt,
            connection=message.connection,
            sent=message.sent,
            **about,
        )
        self._ask(pending.stream, expect, pending)

    @staticmethod
    def _claim(stream: _Stream, write: str) -> None:
        """Make the write the writer of a bounded stream.

        Raises:
            UsageError: the stream is bounded and has another writer.
        """
        if not stream.bounded:
            return
        if stream.writer not in ("", write):
            if stream.ended:
                raise _committed(stream)
            raise UsageError(
                f"stream {stream.name!r} is being written by another save: a bounded stream takes one; wait "
                f"for its end, or cancel job {stream.job.id} and submit it again if that save is gone"
            )
        stream.writer = write

    def _commit(self, link: int, request: int, stream: _Stream, message: CommitWrite) -> list[Instruction]:
        if (stream.ended and stream.ended_by == message.write) or stream.has_forgotten(message.write):
            return [Reply(link, request, Accepted(job=stream.job.id))]
        self._claim(stream, message.write)
        pending = self._pending.add(_PendingWrite(link, request, stream, write=message.write))
        end = self._end_write(pending, message.partitions)
        pending.second = end if stream.bounded and not stream.ended else None
        return self._ask_all(pending, end)

    def _abort(
        self, link: int, request: int, stream: _Stream, message: AbortWrite, at: float
    ) -> list[Instruction]:
        """Abort a write. The job of a bounded stream fails; in an endless stream the write ends, and event
        time no longer waits for it."""
        if not stream.bounded:
            pending = self._pending.add(_PendingWrite(link, request, stream, write=message.write))
            return self._ask_all(pending, self._end_write(pending, []))
        # An abort by a write that is not the stream's writer has no effect: its own opening was refused.
        if stream.writer in ("", message.write):
            text = f"the write of stream {stream.name!r} was aborted: {message.reason}"
            stream.job.fail(ErrorInfo(code=UsageError.code, text=text), at)
        return [Reply(link, request, Accepted(job=stream.job.id))]

    def _end(self, link: int, request: int, stream: _Stream) -> list[Instruction]:
        if stream.ended:
            return [Reply(link, request, Accepted(job=stream.job.id))]
        pending = self._pending.add(_PendingWrite(link, request, stream))
        stream.ended = True
        return self._ask_all(pending, self._end_write(pending, []).model_copy(update={"last": True}))

    def _end_write(self, pending: _PendingWrite, partitions: list[int]) -> EndWrite:
        about = self._about(pending.stream, 0, pending.write)
        return EndWrite(partitions=partitions, last=False, **about)

    def _about(self, stream: _Stream, index: int, write: str) -> dict[str, Any]:
        """The fields shared by all messages to subtask ``index`` of a stream."""
        attempt = stream.task(index).attempt
        where = {"job": stream.job.id, "operator": stream.operator, "index": index, "task_attempt": attempt}
        return where | {"term": self._term, "ticket": 0, "write": write}

    def _ask_all(self, pending: _PendingWrite, end: EndWrite) -> list[Instruction]:
        stream = pending.stream
        pending.open_answers = stream.parallelism
        for index in range(stream.parallelism):
            mine = [number for number in end.partitions if number % stream.parallelism == index]
            self._ask(stream, end.model_copy(update={"index": index, "partitions": mine}), pending)
        return self.worker_ended()

    def _ask(self, stream: _Stream, message: _OfWrite, by: _PendingWrite | _Write) -> None:
        """Ask the current attempt of a subtask, or the next one when it is deployed. Each repetition has a
        new ticket, so a late answer of the previous attempt is ignored."""
        job, question = stream.job, self._expect_answer(_Question(stream, message, by))
        if stream.task(message.index).is_reachable:
            self._send(job.worker_of(stream.operator, message.index), question)

    def _expect_answer(self, question: _Question) -> _OfWrite:
        """Gives what is to be sent. A question that is asked again has another ticket: what the last attempt
        answers is ignored."""
        stream, message, by = question
        attempt = stream.task(message.index).attempt
        ticket = next(self._pending.tickets)
        message = message.model_copy(update={"task_attempt": attempt, "ticket": ticket})
        request = by if isinstance(by, Pending) else None
        self._pending.expect(ticket, question._replace(message=message), request)
        return message

    # --- restarts --------------------------------------------------------------------------------

    def redeployed(self, job: Job, operator: int, index: int) -> None:
        """The next attempt of a subtask was deployed: send it all announcements and open questions."""
        for stream in self._streams.values():
            if stream.job is job and stream.operator == operator:
                worker = job.worker_of(operator, index)
                for message in self._all_for(stream, index):
                    self._send(worker, message)

    def _all_for(self, stream: _Stream, index: int) -> list[_OfWrite]:
        """All that an attempt of a subtask is to hear."""
        found: list[_OfWrite] = []
        for name, write in stream.writes.items():
            about = self._about(stream, index, name)
            known = [*stream.writes]
            opened = sorted(each for each in write.opened if each % stream.parallelism == index)
            found.append(
                BeginWrite(partitions=write.partitions, idle=write.idle, known=known, opened=opened, **about)
            )
            if write.ended:
                found.append(EndWrite(partitions=[], last=False, **about))
        open_questions = [
            (ticket, question)
            for ticket, question in self._pending.questions(_Question)
            if question.stream is stream and question.message.index == index
        ]
        for ticket, question in open_questions:
            self._pending.close(ticket)
            found.append(self._expect_answer(question))
        if stream.ended and not any(
            isinstance(each.message, EndWrite) and each.message.last for _, each in open_questions
        ):
            about = self._about(stream, index, stream.ended_by)
            found.append(EndWrite(partitions=[], last=True, **about))
        return found

    def worker_ended(self) -> list[Instruction]:
        """Answer commits in place of finished subtasks whose worker is lost: a finished subtask has read all
        its partitions."""
        out: list[Instruction] = []
        for ticket, (stream, message, _) in self._pending.questions(_Question):
            task = stream.task(message.index)
            if task.is_reachable or task.state != "finished":
                continue
            if isinstance(message, EndWrite):
                out += self.answered(WriteEnded(term=self._term, ticket=ticket, missing=[]))
        return out

    # --- workers ---------------------------------------------------------------------------------

    def note_report(self, report: TaskReport, at: float) -> None:
        """Note the writes that have a connected program at a running subtask, and make others idle when their
        time is up."""
        subtask = report.attempt.subtask
        for stream in self._streams.values():
            is_other = (stream.job.id, stream.operator) != (subtask.job, subtask.operator)
            if is_other or (stream.bounded and not stream.ended):
                continue
            for name, write in stream.writes.items():
                paused = stream.job.state == "paused"
                if write.connected_at is None or name in report.writes or paused:
                    write.connected_at = at
                elif at - write.connected_at > limits.WRITE_IDLE_SECONDS:
                    self._leave_out(stream, name, write, at)

    def _leave_out(self, stream: _Stream, name: str, write: _Write, at: float) -> None:
        if write.ended or write.idle or write.open_answers:
            return
        write.idle, job = True, stream.job
        for index in range(stream.parallelism):
            about = self._about(stream, index, name)
            if stream.task(index).is_reachable:
                begin = BeginWrite(partitions=write.partitions, idle=True, **about)
                self._send(job.worker_of(stream.operator, index), begin)
        text = (
            f"write {name} of stream {stream.name!r}: no program was connected for "
            f"{limits.WRITE_IDLE_SECONDS:g} s; event time goes on without it"
        )
        job.history.note(at, "write idle", text)
        job.subtasks.touch((stream.operator, 0))

    def answered(self, message: UpstreamExpected | WriteBegun | WriteEnded) -> list[Instruction]:
        """Handle a worker's answer; ignored if its ticket is no longer open."""
        question = self._pending.question(message.ticket, _Question)
        if question is None:
            return []
        self._changed.add(question.stream.job.id)
        if isinstance(question.by, _PendingWrite) and isinstance(message, UpstreamExpected):
            if message.error is None or not question.stream.job.stopping:
                return [self._opened(question, question.by, message)]
            return []  # :meth:`remove` refuses it with the cause, which the worker does not know
        self._pending.close(message.ticket)
        if isinstance(question.by, _Write):
            return self._begun(question.by)
        if isinstance(message, WriteEnded):
            return self._ended(question.by, message)
        return []

    def _ended(self, pending: _PendingWrite, message: WriteEnded) -> list[Instruction]:
        pending.open_answers -= 1
        pending.missing += message.missing
        if pending.open_answers:
            return []
        stream = pending.stream
        if pending.missing:
            numbers = ", ".join(map(str, sorted(pending.missing)[:10]))
            error = UsageError(f"partitions {numbers} of the write are not complete")
            return [self._pending.refuse(pending, error)]
        if pending.write in stream.writes:
            stream.writes[pending.write].end()
        if pending.second is not None:
            # All partitions are complete, which a next attempt of their task may not know at once.
            end, pending.second = pending.second.model_copy(update={"last": True, "partitions": []}), None
            stream.ended, stream.ended_by = True, end.write
            return self._ask_all(pending, end)
        return [self._pending.answer(pending, Accepted(job=stream.job.id))]

    def _opened(self, question: _Question, pending: _PendingWrite, message: UpstreamExpected) -> Reply:
        if message.error is not None:
            error = error_from_code(message.error.code, message.error.text)
            return self._pending.refuse(pending, error)
        job = question.stream.job
        worker = job.worker_of(question.stream.operator, question.message.index)
        address = self._address(worker)
        if address is None:  # it is lost, and its task has finished
            gone = PeerLost(f"worker {worker}, which reads stream {question.stream.name!r}, is gone")
            return self._pending.refuse(pending, gone)
        question.stream.let_in(question.message)
        opened = UpstreamOpened(
            term=self._term,
            ticket=message.ticket,
            job=job.id,
            worker=address,
            rows=message.rows,
            checksum=message.checksum,
            complete=message.complete,
            segment_bytes=message.segment_bytes,
            base=message.base,
            stable=message.stable,
        )
        return self._pending.answer(pending, opened)

    def _begun(self, write: _Write) -> list[Instruction]:
        """Let those in that waited until every subtask knows of the write, unless the stream has ended."""
        write.open_answers -= 1
        waiting = [] if write.open_answers else list(self._pending.of(_PendingWrite))
        refused: list[Instruction] = []
        for pending in waiting:
            if (opening := pending.opening) is None or opening.write is not write:
                continue
            if pending.stream.lets_in(opening.message.write, opening.message.partition):
                self._expect(pending, opening.message)
            else:
                refused.append(self._pending.refuse(pending, _committed(pending.stream)))
        return refused


def _committed(stream: _Stream) -> UsageError:
    """Why nothing more is let in."""
    return UsageError(f"stream {stream.name!r} has ended: it was committed already")


def _is_of(write: str, split: str) -> bool:
    return write_and_partition(split)[0] == write

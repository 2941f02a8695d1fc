"""External clients of jobs: streams that they write, and kept results that they read. Pure.

A writer asks where a partition of its write goes. With the first of them the coordinator announces the
write to all subtasks, so that event time waits for it everywhere; then it announces the partition to its
subtask's worker, which answers how much of it is there, and sends the writer there with a ticket. A commit
asks every subtask whether its partitions are complete, and ends the write, and a bounded stream with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from minishuffle import limits
from minishuffle.coordinator.instructions import Instruction, Reply
from minishuffle.coordinator.jobs import Job, JobTable
from minishuffle.dataflow.graph import JobGraph
from minishuffle.errors import (
    InvalidGraph,
    PeerLost,
    ResourceExhausted,
    ShuffleError,
    UnknownName,
    UsageError,
    error_from_code,
)
from minishuffle.wire.clients import (
    AbortWrite,
    BeginWrite,
    CommitResult,
    CommitWrite,
    DescribeResult,
    DescribeStream,
    DropResult,
    EndStream,
    EndWrite,
    ExpectUpstream,
    FreeRows,
    KeptRows,
    OpenResult,
    OpenUpstream,
    ResultDescribed,
    ResultExpected,
    ResultOpened,
    ServeResult,
    StreamInfo,
    UpstreamExpected,
    UpstreamOpened,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.messages import Accepted, ControlMessage, ErrorInfo, Failure, WorkerAddress

__all__ = ["BATCHES_REPLAYABLE", "ResultRequest", "Results", "StreamRequest", "Streams"]


# --- results --------------------------------------------------------------------------------------
#
# Kept results: who reads which rows, and what may be dropped.
#
# The rows stay on the workers whose sinks wrote them, also after the job has ended. A reader is sent there
# with a ticket once the worker expects it. Rows of its last :data:`BATCHES_REPLAYABLE` committed batches are
# kept, so that it can read them again.


BATCHES_REPLAYABLE: Final = 2
"""Batches that were committed and can be read again: a streaming query may repeat its last ones."""

ResultRequest = DescribeResult | OpenResult | CommitResult


@dataclass(slots=True)
class _Result:
    """The rows of one sink. ``commits`` has, by subtask, where the last batches ended."""

    job: Job
    sink: str
    operator: int
    bounded: bool
    schema_message: bytes
    workers: list[WorkerAddress | None]
    commits: list[list[int]]
    dropped: bool = False

    def begin(self, subtask: int) -> int:
        """The first row that can be read."""
        ends = self.commits[subtask]
        return ends[0] if len(ends) > BATCHES_REPLAYABLE else 0

    def commit(self, subtask: int, end: int) -> bool:
        """Note where a batch ended; False if that is nothing new."""
        ends = self.commits[subtask]
        if ends and end <= ends[-1]:
            return False
        ends.append(end)
        del ends[: -BATCHES_REPLAYABLE - 1]
        return True


@dataclass(frozen=True, slots=True)
class _PendingRead:
    """A request that waits for a worker."""

    link: int
    request: int
    job: str
    worker: WorkerAddress


@dataclass(slots=True)
class Results:
    """Invariant: at most ``JOB_RESULTS_KEPT`` jobs that have ended have results.

    Args:
        send: a message to a worker that is alive; False if it is not.
        address: of a worker that is alive, or None.
        tickets: numbers that are never used again.
    """

    term: int
    jobs: JobTable
    send: Callable[[int, ControlMessage], bool]
    address: Callable[[int], WorkerAddress | None]
    tickets: Iterator[int]
    _results: dict[str, dict[str, _Result]] = field(default_factory=dict)
    """By job and sink."""
    _over: list[str] = field(default_factory=list)
    """Jobs that have ended and have results, in the order of their ends."""
    _pending: dict[int, _PendingRead] = field(default_factory=dict)

    # --- jobs ------------------------------------------------------------------------------------

    @staticmethod
    def check(graph: JobGraph) -> None:
        """Raises InvalidGraph if two sinks of the job have one name."""
        names = [vertex.sink for vertex in graph.vertices if vertex.sink]
        for name in names:
            if names.count(name) > 1:
                raise InvalidGraph(f"two sinks are named {name!r}: give each another name, to_spark('...')")

    def add(self, job: Job, graph: JobGraph) -> None:
        """A job was submitted."""
        found = {
            vertex.sink: _Result(
                job,
                vertex.sink,
                operator,
                vertex.bounded,
                vertex.sink_schema,
                [self.address(job.placement[index]) for index in range(vertex.parallelism)],
                [[] for _ in range(vertex.parallelism)],
            )
            for operator, vertex in enumerate(graph.vertices)
            if vertex.sink
        }
        if found:
            self._results[job.id] = found

    def job_ended(self, job: Job) -> None:
        """A job has ended: the oldest results beyond the limit are given up."""
        if job.id in self._results:
            self._over.append(job.id)
        while len(self._over) > limits.JOB_RESULTS_KEPT:
            oldest = self._over.pop(0)
            for result in self._results[oldest].values():
                result.dropped = True
            for worker in {
                worker for result in self._results[oldest].values() for worker in self._held(result)
            }:
                self.send(worker, DropResult(term=self.term, job=oldest))
        for name in [name for name in self._results if name not in self.jobs and name not in self._over]:
            del self._results[name]

    def _held(self, result: _Result) -> set[int]:
        """Workers that still keep rows of it."""
        return {at.worker for at in result.workers if at is not None and self._is_there(at)}

    def _is_there(self, at: WorkerAddress) -> bool:
        now = self.address(at.worker)
        return now is not None and now.epoch <= at.epoch

    # --- clients ---------------------------------------------------------------------------------

    def request(self, link: int, request: int, message: ResultRequest) -> list[Instruction]:
        """Raises ShuffleError: the request cannot be granted."""
        result = self._find(message.job, message.sink)
        match message:
            case DescribeResult():
                return [Reply(link, request, self._described(result))]
            case OpenResult():
                self._open(link, request, result, message)
                return []
            case CommitResult(offsets=offsets):
                self._commit(result, offsets)
                return [Reply(link, request, Accepted(job=result.job.id))]

    def _find(self, name: str, sink: str) -> _Result:
        job = self._job(name)
        found = self._results.get(job.id)
        if found is None:
            raise UnknownName(
                f"job {job.id} ({job.name}) keeps no results for other programs: end the stream with "
                "to_spark() and submit it again"
            )
        result = found.get(sink) if sink or len(found) > 1 else next(iter(found.values()))
        if result is None:
            raise UnknownName(
                f"job {job.id} ({job.name}) has no sink {sink!r}: name one of {', '.join(sorted(found))}"
            )
        if result.dropped:
            raise UsageError(
                f"the results of job {job.id} ({job.name}) were given up: those of the last "
                f"{limits.JOB_RESULTS_KEPT} jobs are kept; run it again"
            )
        return result

    def _job(self, name: str) -> Job:
        """By id; else the newest of that name."""
        known = {job: next(iter(found.values())).job for job, found in self._results.items()} | self.jobs
        if name in known:
            return known[name]
        named = [job for job in known.values() if job.name == name]
        return max(named, key=lambda job: job.submitted_at) if named else self.jobs.named(name)

    def _described(self, result: _Result) -> ResultDescribed:
        job = result.job
        if job.state in ("created", "running", "finished"):
            for subtask in range(len(result.workers)):
                self._worker(result, subtask)
        return ResultDescribed(
            job=job.id,
            name=job.name,
            sink=result.sink,
            schema_message=result.schema_message,
            bounded=result.bounded,
            state=job.state,
            terminal=job.terminal,
            submitted_at=job.submitted_at,
            causes=job.history.causes,
            subtasks=[
                KeptRows(subtask=subtask, begin=result.begin(subtask), end=rows)
                for subtask, rows in enumerate(job.rows_kept(result.operator))
            ],
        )

    def _worker(self, result: _Result, subtask: int) -> WorkerAddress:
        """Raises PeerLost: the worker that keeps the rows is gone."""
        at = result.workers[subtask]
        if at is None or not self._is_there(at):
            number = result.job.placement[subtask]
            raise PeerLost(
                f"worker {number}, which kept rows of job {result.job.id} ({result.job.name}), is gone and "
                "they with it: run the job again"
            )
        return at

    def _open(self, link: int, request: int, result: _Result, message: OpenResult) -> None:
        _require_room(link, self._pending.values())
        self._check_subtask(result, message.subtask)
        worker = self._worker(result, message.subtask)
        ticket = next(self.tickets)
        self._pending[ticket] = _PendingRead(link, request, result.job.id, worker)
        serve = ServeResult(
            term=self.term,
            job=result.job.id,
            operator=result.operator,
            index=message.subtask,
            task_attempt=result.job.attempt_of(result.operator, message.subtask),
            ticket=ticket,
            begin=message.begin,
            end=message.end,
        )
        self.send(worker.worker, serve)

    @staticmethod
    def _check_subtask(result: _Result, subtask: int) -> None:
        if not 0 <= subtask < len(result.workers):
            raise UsageError(
                f"sink {result.sink!r} of job {result.job.id} has {len(result.workers)} subtasks, and "
                f"subtask {subtask} was asked for: count from 0"
            )

    def _commit(self, result: _Result, offsets: dict[int, int]) -> None:
        rows = result.job.rows_kept(result.operator)
        for subtask, offset in offsets.items():
            self._check_subtask(result, subtask)
            if not 0 <= offset <= rows[subtask]:
                raise UsageError(
                    f"subtask {subtask} has {rows[subtask]} rows and offset {offset} was committed: commit "
                    "only what was read"
                )
        for subtask, offset in offsets.items():
            if result.commit(subtask, offset):
                free = FreeRows(
                    term=self.term,
                    job=result.job.id,
                    operator=result.operator,
                    index=subtask,
                    task_attempt=result.job.attempt_of(result.operator, subtask),
                    begin=result.begin(subtask),
                    read=offset,
                )
                self.send(self._worker(result, subtask).worker, free)

    # --- workers and links -----------------------------------------------------------------------

    def answered(self, message: ResultExpected) -> list[Instruction]:
        """What a worker answers to a ticket that nobody waits for any more is ignored."""
        pending = self._pending.pop(message.ticket, None)
        if pending is None:
            return []
        if message.error is not None:
            return [_failure(pending, error_from_code(message.error.code, message.error.text))]
        opened = ResultOpened(
            term=self.term,
            ticket=message.ticket,
            job=pending.job,
            worker=pending.worker,
            segment_bytes=message.segment_bytes,
        )
        return [Reply(pending.link, pending.request, opened)]

    def worker_ended(self, worker: int) -> list[Instruction]:
        """It will not answer any more."""
        gone = [ticket for ticket, pending in self._pending.items() if pending.worker.worker == worker]
        error = PeerLost(f"worker {worker}, which kept the rows, is gone: run the job again")
        return [_failure(self._pending.pop(ticket), error) for ticket in gone]

    def forget(self, link: int) -> None:
        """A client is gone."""
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.link == link]:
            del self._pending[ticket]

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert len(self._over) <= limits.JOB_RESULTS_KEPT
        for found in self._results.values():
            for result in found.values():
                assert all(len(ends) <= BATCHES_REPLAYABLE + 1 for ends in result.commits)
                assert result.dropped == (result.job.terminal and result.job.id not in self._over)


def _require_room(link: int, pending: Iterable[_PendingRead | _PendingWrite | _Opening]) -> None:
    """Raises ResourceExhausted: too many requests of the link wait for workers."""
    if sum(waiting.link == link for waiting in pending) >= limits.LINK_REQUESTS_MAX:
        raise ResourceExhausted(
            f"{limits.LINK_REQUESTS_MAX} requests of this client wait for answers of workers: wait for them"
        )


def _failure(pending: _PendingRead | _PendingWrite | _Opening, error: ShuffleError) -> Reply:
    return Reply(pending.link, pending.request, Failure(code=error.code, text=str(error)))


# --- streams --------------------------------------------------------------------------------------

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
            finished = job.state == "finished"
            endless = job.id if finished and not stream.bounded else ""
            self._over[name] = (end if finished else text, endless)
        while len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]
        out: list[Instruction] = [_failure(self._pending.pop(ticket), error) for ticket in gone]
        beginning = [ticket for ticket, (stream, _) in self._beginning.items() if stream.job is job]
        for ticket in beginning:
            _, write = self._beginning.pop(ticket)
            out += [_failure(opening, error) for opening in write.waiting]
        return out

    def forget(self, link: int) -> None:
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.link == link]:
            del self._pending[ticket]
        for _, write in self._beginning.values():
            write.waiting = [opening for opening in write.waiting if opening.link != link]

    # --- clients ---------------------------------------------------------------------------------

    def request(self, link: int, request: int, message: StreamRequest, at: float) -> list[Instruction]:
        """Raises ShuffleError: the request cannot be granted."""
        openings = (opening for _, write in self._beginning.values() for opening in write.waiting)
        _require_room(link, chain(self._pending.values(), openings))
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
        return [_failure(opening, error)]

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
            return [_failure(pending, UsageError(f"partitions {numbers} of the write are not complete"))]
        return [Reply(pending.link, pending.request, Accepted(job=pending.stream.job.id))]

    def _opened(self, pending: _PendingWrite, message: UpstreamExpected) -> Reply:
        if message.error is not None:
            return _failure(pending, error_from_code(message.error.code, message.error.text))
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

"""Kept results of sinks: where their rows are, and when they may be deleted. Pure.

The rows stay on the workers whose sinks wrote them, even after the job has ended. A reader gets a worker's
address and a ticket once that worker expects it. The rows of its last :data:`BATCHES_REPLAYABLE` committed
batches are kept, so that it can read them again.

Each attempt of a sink's subtask keeps a *part* of the rows. The next attempt continues the row numbers from
the greatest end that may have been announced to readers. Rows on a lost worker are lost; they count as lost
unless they were committed. In a job with a guarantee they come again in the next part: it begins at a
snapshot behind which nothing was committed.

The journal has the places of the parts, the commits, the announced ends and the dropped results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from minishuffle import limits
from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.instructions import Instruction, Reply
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.jobindex import JobTable
from minishuffle.coordinator.journal.codec import Record
from minishuffle.errors import InvalidGraph, PeerLost, UnknownName, UsageError, error_from_code
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.clients import (
    CommitResult,
    DescribeResult,
    DropResult,
    FreeRows,
    KeptRows,
    OpenResult,
    ResultDescribed,
    ResultExpected,
    ResultOpened,
    ServeResult,
)
from minishuffle.wire.messages import ControlMessage, WorkerAddress
from minishuffle.wire.requests import Accepted

__all__ = ["BATCHES_REPLAYABLE", "GIVEN_UP", "ResultRequest", "Results"]

BATCHES_REPLAYABLE: Final = 2
"""Number of committed batches that can be read again: a streaming query may repeat its last ones."""
GIVEN_UP: Final = "what its sinks keep for readers is given up, to make room"
"""Warning to a client that cancels a job while the journal cannot be written: the job's results are dropped,
to make room on the disk."""

ResultRequest = DescribeResult | OpenResult | CommitResult


class RecordedPart(NamedTuple):
    """The part of one attempt: rows from ``begin`` to the beginning of the next part."""

    begin: int
    attempt: int
    at: WorkerAddress | None


@dataclass(slots=True)
class ResultRecord(Record):
    """The places and commits of one sink's rows, as they are journaled."""

    parts: list[list[RecordedPart]]
    """Parts by subtask, in order; the last one grows."""
    commits: list[list[int]]
    """Ends of the last committed batches, by subtask."""
    dropped: bool = False
    """The rows were given up."""


@dataclass(slots=True)
class _Result:
    """The rows of one sink."""

    job: Job
    sink: str
    operator: int
    bounded: bool
    schema_message: bytes
    kept: ResultRecord

    def announce(self) -> None:
        """Record that readers are about to learn the current end of the rows."""
        self.job.subtasks.announce(self.operator)

    def ranges(self, subtask: int) -> list[tuple[RecordedPart, int]]:
        """The readable parts of a subtask, each with its end."""
        parts = self.kept.parts[subtask]
        end = max(parts[-1].begin, self.job.subtasks.rows_kept(self.operator)[subtask])
        ends = [*(part.begin for part in parts[1:]), end]
        return [(part, last) for part, last in zip(parts, ends, strict=True)]

    def begin(self, subtask: int) -> int:
        """The first row of a subtask that can be read."""
        ends = self.kept.commits[subtask]
        return ends[0] if len(ends) > BATCHES_REPLAYABLE else 0

    def comes_again(self, subtask: int, part: RecordedPart) -> bool:
        """Whether uncommitted rows of a part, which are lost with its worker, are made again by a later
        attempt of the sink."""
        is_last = part is self.kept.parts[subtask][-1]
        return self.job.graph.settings.is_guaranteed and not (is_last and self.job.terminal)

    def commit(self, subtask: int, end: int) -> bool:
        """Note the end of a committed batch; False if it was committed before."""
        ends = self.kept.commits[subtask]
        if ends and end <= ends[-1]:
            return False
        ends.append(end)
        del ends[: -BATCHES_REPLAYABLE - 1]
        return True


def _ended_at(results: Mapping[str, _Result]) -> float:
    """When the job of these results ended."""
    return next(iter(results.values())).job.ended_at


@dataclass(slots=True, eq=False)
class _PendingRead(Pending):
    """A reader that waits until its worker expects it."""

    job: str
    worker: WorkerAddress
    end: int
    serve: ServeResult
    """The message sent to the worker."""


@dataclass(slots=True)
class Results:
    """The kept results of all jobs.

    Invariant: at most ``JOB_RESULTS_KEPT`` ended jobs have results.

    Args:
        send: sends a message to a worker; False if the worker is not alive.
        address: of a worker; None if the worker is not alive.
    """

    term: int
    jobs: JobTable
    send: Callable[[int, ControlMessage], bool]
    address: Callable[[int], WorkerAddress | None]
    pending: PendingRequests
    _results: dict[str, dict[str, _Result]] = field(default_factory=dict)
    """Results by job and sink."""
    _ended_jobs: list[str] = field(default_factory=list)
    """Ended jobs with results."""
    _to_drop: set[str] = field(default_factory=set)
    """Jobs whose results are dropped when they end."""
    _changed: set[str] = field(default_factory=set)
    """Jobs whose results may have changed since the last :meth:`changed`."""

    # --- journal ---------------------------------------------------------------------------------

    def changed(self) -> set[str]:
        """Jobs to :meth:`record` since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def record(self, job: str) -> dict[int, ResultRecord]:
        """The journal's records of the job's results, by operator."""
        return {result.operator: result.kept for result in self._results.get(job, {}).values()}

    # --- jobs ------------------------------------------------------------------------------------

    @staticmethod
    def check(graph: JobGraph) -> None:
        """Raises InvalidGraph if two sinks of the job have one name."""
        names = [vertex.sink for vertex in graph.vertices if vertex.sink]
        for name in names:
            if names.count(name) > 1:
                raise InvalidGraph(f"two sinks are named {name!r}: give each another name, to_spark('...')")

    def add(self, job: Job, graph: JobGraph, records: Mapping[int, ResultRecord]) -> None:
        """Add the results of a job: a new one with no ``records``, or a restored one with the result of
        :meth:`record`."""
        found = {
            vertex.sink: _Result(
                job,
                vertex.sink,
                operator,
                vertex.bounded,
                vertex.sink_schema,
                records[operator] if operator in records else self._first_kept(job, operator),
            )
            for operator, vertex in enumerate(graph.vertices)
            if vertex.sink
        }
        if found:
            self._results[job.id] = found
            self._changed.add(job.id)

    def _first_kept(self, job: Job, operator: int) -> ResultRecord:
        keys = [(operator, index) for index in range(job.graph.vertices[operator].parallelism)]
        workers = [job.slots.placement[job.slot_of(key)] for key in keys]
        parts = [[RecordedPart(0, FIRST_ATTEMPT, self.address(worker))] for worker in workers]
        return ResultRecord(parts, [[] for _ in keys])

    def job_ended(self, job: Job) -> None:
        """A job has ended: drop the oldest results beyond the limit."""
        if job.id in self._to_drop:
            self._drop(job.id)
        elif not self._is_dropped(job.id):
            self._ended_jobs.append(job.id)
        while len(self._ended_jobs) > limits.JOB_RESULTS_KEPT:
            self._drop(min(self._ended_jobs, key=lambda name: _ended_at(self._results[name])))
        for name in [
            name for name in self._results if name not in self.jobs and name not in self._ended_jobs
        ]:
            del self._results[name]

    def give_up(self, job: Job) -> bool:
        """Drop the results of a job, at once or when the job ends. False if it has none."""
        if self._is_dropped(job.id):
            return False
        self._to_drop.add(job.id)
        if job.terminal:
            self._drop(job.id)
        return True

    def ended_already(self, job: Job) -> UsageError:
        """The error for a request to cancel a job that has ended."""
        hint = f"; 'jobs cancel {job.id} --give-up-results' frees what it keeps"
        kept = "" if self._is_dropped(job.id) else hint
        return UsageError(f"job {job.id} ({job.name}) cannot be cancelled: it is {job.state} already{kept}")

    def _is_dropped(self, name: str) -> bool:
        """Whether a job has no results, or has dropped all of them."""
        return all(result.kept.dropped for result in self._results.get(name, {}).values())

    def _drop(self, name: str) -> None:
        """Drop the results of an ended job, on all workers that had a slot of it or still keep rows."""
        workers = set[int]()
        for result in self._results[name].values():
            result.kept.dropped = True
            workers |= {*self._held(result), *result.job.slots.workers()}
        for worker in sorted(workers):
            self.send(worker, DropResult(term=self.term, job=name))
        self._ended_jobs = [each for each in self._ended_jobs if each != name]
        self._to_drop.discard(name)
        self._changed.add(name)

    def redeployed(self, job: Job, operator: int, index: int) -> None:
        """The next attempt of a subtask was deployed: begin its part."""
        for result in self._results.get(job.id, {}).values():
            if result.operator == operator:
                parts = result.kept.parts[index]
                begin = job.subtasks.rows_kept(operator)[index]
                at = self.address(job.slots.placement[job.slot_of((operator, index))])
                parts[:] = [part for part in parts if part.begin < begin]
                parts.append(RecordedPart(begin, job.subtasks[operator, index].attempt, at))
                self._changed.add(job.id)

    def _held(self, result: _Result) -> set[int]:
        """Workers that still keep rows of a result."""
        found = {part.at for parts in result.kept.parts for part in parts}
        return {at.worker for at in found if at is not None and self._is_there(at)}

    def _is_there(self, at: WorkerAddress | None) -> bool:
        now = self.address(at.worker) if at is not None else None
        return at is not None and now is not None and now.epoch <= at.epoch

    # --- clients ---------------------------------------------------------------------------------

    def request(self, link: int, request: int, message: ResultRequest) -> list[Instruction]:
        """Raises ShuffleError: the request cannot be granted."""
        result = self._find(message.job, message.sink)
        match message:
            case DescribeResult():
                return [Reply(link, request, self._described(result))]
            case OpenResult():
                return self._open(link, request, result, message)
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
        if result.kept.dropped:
            raise UsageError(
                f"the results of job {job.id} ({job.name}) were given up: those of the last "
                f"{limits.JOB_RESULTS_KEPT} jobs are kept, but for jobs that are cancelled with "
                "--give-up-results, or while the coordinator's journal cannot be written; run it again"
            )
        return result

    def _job(self, name: str) -> Job:
        """The job with this id, else the newest job with this name."""
        known = {job: next(iter(found.values())).job for job, found in self._results.items()} | self.jobs
        if name in known:
            return known[name]
        named = [job for job in known.values() if job.name == name]
        return max(named, key=lambda job: job.submitted_at) if named else self.jobs.named(name)

    def _described(self, result: _Result) -> ResultDescribed:
        job = result.job
        result.announce()
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
            subtasks=[self._kept(result, subtask) for subtask in range(len(result.kept.parts))],
        )

    def _kept(self, result: _Result, subtask: int) -> KeptRows:
        begin, ranges = result.begin(subtask), result.ranges(subtask)
        lost = sum(
            max(0, end - max(begin, part.begin))
            for part, end in ranges
            if not (self._is_there(part.at) or result.comes_again(subtask, part))
        )
        return KeptRows(subtask=subtask, begin=begin, end=ranges[-1][1], lost=lost)

    def _open(self, link: int, request: int, result: _Result, message: OpenResult) -> list[Instruction]:
        """Prepare the worker whose part has the first requested row; the reply follows its answer."""
        self.pending.require_room(_PendingRead, link)
        self._check_subtask(result, message.subtask)
        ranges = result.ranges(message.subtask)
        part, last = next(((part, end) for part, end in ranges if message.begin < end), ranges[-1])
        end = message.end if part is ranges[-1][0] else min(message.end, last)
        if part.at is None or not self._is_there(part.at):
            number = part.at.worker if part.at is not None else 0
            why = (
                f"worker {number}, which kept rows of job {result.job.id} ({result.job.name}), is gone and "
                "they with it: run the job again"
            )
            nowhere = WorkerAddress(worker=0, epoch=0, host="", data_port=0)
            lost = ResultOpened(
                term=self.term,
                ticket=0,
                job=result.job.id,
                worker=nowhere,
                segment_bytes=0,
                end=end,
                lost=why,
                comes_again=result.comes_again(message.subtask, part),
            )
            return [Reply(link, request, lost)]
        ticket = next(self.pending.tickets)
        serve = ServeResult(
            term=self.term,
            job=result.job.id,
            operator=result.operator,
            index=message.subtask,
            task_attempt=part.attempt,
            ticket=ticket,
            begin=message.begin,
            end=end,
        )
        read = self.pending.add(_PendingRead(link, request, result.job.id, part.at, end, serve))
        self.pending.expect(ticket, read, read)
        self.send(part.at.worker, serve)
        return []

    @staticmethod
    def _check_subtask(result: _Result, subtask: int) -> None:
        if not 0 <= subtask < len(result.kept.parts):
            raise UsageError(
                f"sink {result.sink!r} of job {result.job.id} has {len(result.kept.parts)} subtasks, and "
                f"subtask {subtask} was asked for: count from 0"
            )

    def _commit(self, result: _Result, offsets: dict[int, int]) -> None:
        rows = result.job.subtasks.rows_kept(result.operator)
        for subtask, offset in offsets.items():
            self._check_subtask(result, subtask)
            if not 0 <= offset <= rows[subtask]:
                raise UsageError(
                    f"subtask {subtask} has {rows[subtask]} rows and offset {offset} was committed: commit "
                    "only what was read"
                )
        self._changed.add(result.job.id)
        for subtask, offset in offsets.items():
            if result.commit(subtask, offset):
                self._free(result, subtask, offset)

    def _free(self, result: _Result, subtask: int, read: int) -> None:
        begin, ranges = result.begin(subtask), result.ranges(subtask)
        for part, _ in ranges:
            if part.at is not None and self._is_there(part.at):
                free = FreeRows(
                    term=self.term,
                    job=result.job.id,
                    operator=result.operator,
                    index=subtask,
                    task_attempt=part.attempt,
                    begin=begin,
                    read=read,
                )
                self.send(part.at.worker, free)
        result.kept.parts[subtask] = [part for part, end in ranges[:-1] if end > begin] + [ranges[-1][0]]

    # --- workers and links -----------------------------------------------------------------------

    def answered(self, message: ResultExpected) -> list[Instruction]:
        """Handle a worker's answer; ignored if its ticket is no longer open."""
        pending = self.pending.question(message.ticket, _PendingRead)
        if pending is None:
            return []
        if message.error is not None:
            error = error_from_code(message.error.code, message.error.text)
            return [self.pending.refuse(pending, error)]
        opened = ResultOpened(
            term=self.term,
            ticket=message.ticket,
            job=pending.job,
            worker=pending.worker,
            segment_bytes=message.segment_bytes,
            end=pending.end,
        )
        return [self.pending.answer(pending, opened)]

    def desired(self, worker: int) -> list[DropResult | ServeResult]:
        """The messages that a worker which comes back may have missed."""
        dropped: list[DropResult | ServeResult] = [
            DropResult(term=self.term, job=name)
            for name, found in self._results.items()
            if any(result.kept.dropped and worker in result.job.slots.workers() for result in found.values())
        ]
        reads = self.pending.of(_PendingRead)
        return dropped + [each.serve for each in reads if each.worker.worker == worker]

    def worker_ended(self, worker: int, epoch: int, at: float) -> list[Instruction]:
        """A worker is lost: refuse the readers that wait for it, and count its uncommitted rows as lost,
        unless they come again. Rows of its earlier epochs were counted when those were lost."""
        for found in self._results.values():
            for result in found.values():
                if not (result.job.terminal or result.job.graph.settings.is_guaranteed):
                    self._lose(result, worker, epoch, at)
        error = PeerLost(f"worker {worker}, which kept the rows, is gone: run the job again")
        gone = [each for each in self.pending.of(_PendingRead) if each.worker.worker == worker]
        return [self.pending.refuse(each, error) for each in gone]

    def _lose(self, result: _Result, worker: int, epoch: int, at: float) -> None:
        for subtask, commits in enumerate(result.kept.commits):
            read = commits[-1] if commits else 0
            for part, end in result.ranges(subtask):
                begin = max(read, part.begin)
                if part.at is None or part.at.worker != worker or part.at.epoch < epoch:
                    continue
                if begin < end:
                    result.job.lose_results(f"{result.sink}[{subtask}]", range(begin, end), worker, at)

    def unread_at(self, worker: int) -> list[str]:
        """Jobs with uncommitted rows on a worker."""
        return [name for name, found in self._results.items() if any(self._unread(found, worker))]

    def _unread(self, found: Mapping[str, _Result], worker: int) -> Iterator[bool]:
        for result in found.values():
            for subtask, commits in enumerate(result.kept.commits if not result.kept.dropped else ()):
                read = commits[-1] if commits else 0
                for part, end in result.ranges(subtask):
                    is_there = part.at is not None and part.at.worker == worker and self._is_there(part.at)
                    yield is_there and max(read, part.begin) < end

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert len(self._ended_jobs) <= limits.JOB_RESULTS_KEPT
        for found in self._results.values():
            for result in found.values():
                assert all(len(ends) <= BATCHES_REPLAYABLE + 1 for ends in result.kept.commits)
                assert result.kept.dropped == (result.job.terminal and result.job.id not in self._ended_jobs)
                for parts in result.kept.parts:
                    begins = [part.begin for part in parts]
                    assert parts and begins == sorted(set(begins))

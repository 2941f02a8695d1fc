"""External clients of a worker: programs that write into its tasks or read what its sinks kept.

The coordinator announces each with a ticket, which the client shows when it connects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    ShuffleError,
    TaskCancelled,
    clipped,
    described,
)
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.spool import Spool
from minishuffle.ids import AttemptId, JobId, PartitionId
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.clients import (
    BeginWrite,
    DropResult,
    EndWrite,
    ExpectUpstream,
    FreeRows,
    ResultExpected,
    ServeResult,
    UpstreamExpected,
    WriteBegun,
    WriteEnded,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import ControlMessage, ErrorInfo
from minishuffle.worker.external.clientgate import UPSTREAM_EDGE, Progress, UpstreamGate
from minishuffle.worker.interpreter import compete
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.handoff import LoopInbox, TaskPaths

__all__ = ["ResultReaders", "ExternalClients"]


# --- results --------------------------------------------------------------------------------------
#
# Programs that read kept results from this worker: each has a ticket of the coordinator's, and a thread
# here that writes its rows into a partition, as a task does: under the reader's credit, from a pool.
#
# Their segments are not those of the network memory. The coordinator promises that to jobs and does not
# know of readers: a job would fail or wait for what a reader holds, as long as its program likes. And a
# reader that waited for what jobs leave might wait for ever, if the job waits for its readers.


BUFFERS_MAX: Final = 64
"""Segments that one reader's rows may wait in."""
RESULT_EDGE: Final = 0xFFFF_FFFE
"""In the id of a partition that a reader is served from: no edge of the graph."""
_log = logging.getLogger("minishuffle.worker")


class _Reading:
    """A connected reader, and the thread that serves it.

    Args:
        failed: called on the loop when the rows cannot be read; before the thread's end.
    """

    def __init__(
        self,
        message: ServeResult,
        spool: Spool,
        segments: NetworkBufferPool,
        inbox: LoopInbox,
        failed: Callable[[ShuffleError], None],
    ) -> None:
        self._message = message
        self._spool = spool
        self._inbox = inbox
        self._failed = failed
        paths = self._paths = TaskPaths(inbox)
        name = f"result {message.job}/{message.operator}.{message.index} for client {message.ticket}"
        pool = self._pool = segments.create_pool(name, 1, BUFFERS_MAX)
        pool.on_available(paths.bell.ring)
        partition_id = PartitionId(JobId(message.job), RESULT_EDGE, message.index)
        self.partition = PipelinedPartition(
            partition_id, range(1), lambda: paths.acquire(pool), paths.notify, TaskCounters()
        )
        self._left = self._ended = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises:
        ResourceExhausted: there cannot be another thread.
        """
        try:
            self.thread.start()
        except RuntimeError as error:
            self._pool.destroy()
            raise ResourceExhausted(
                f"the rows cannot be read: {error}; read fewer parts at once or raise the process limit"
            ) from error

    def _run(self) -> None:
        compete()
        message, partition = self._message, self.partition
        try:
            for rows, parts in self._spool.read(message.begin, message.end):
                self._paths.check()
                partition.write(0, rows, parts)
            partition.finish()
        except TaskCancelled:
            _log.debug("client %d left before the end", message.ticket)
        except ShuffleError as error:
            self._inbox.post(self._failed, error)
        except Exception as error:  # memory, or the disk: the reader waits for an answer
            _log.exception("the rows of client %d cannot be read", message.ticket)
            text = f"the rows cannot be read: {described(error)}"
            self._inbox.post(self._failed, ResourceExhausted(clipped(text, limits.ERROR_TEXT_BYTES_MAX // 4)))
        finally:
            self._inbox.post(self._on_end)

    # --- loop ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The reader is gone."""
        self._left = True
        self._paths.close()
        self._clean_up()

    def _on_end(self) -> None:
        self._ended = True
        self._clean_up()

    def _clean_up(self) -> None:
        """Give the segments back once neither the thread nor the link uses them."""
        if self._left and self._ended:
            self.partition.release(written_off=False)
            self._pool.destroy()


class ResultReaders:
    """Args:
    term: gives the coordinator's term, which may rise.
    send: a message to the coordinator.
    """

    def __init__(
        self,
        term: Callable[[], int],
        deployment: Deployment,
        inbox: LoopInbox,
        send: Callable[[ControlMessage], None],
    ) -> None:
        self._term = term
        self._deployment = deployment
        self.pool = NetworkBufferPool(limits.RESULT_SEGMENTS, deployment.services.pool.segment_bytes)
        """Buffers for rows on their way to readers."""
        self._inbox = inbox
        self._send = send
        self._tickets: dict[int, ServeResult] = {}
        self._coming: dict[DataLink, ServeResult] = {}
        """Connected, and have not asked for their partition yet."""
        self._readings: dict[DataLink, _Reading] = {}

    # --- what the coordinator says ---------------------------------------------------------------

    def serve(self, message: ServeResult | FreeRows | DropResult) -> None:
        match message:
            case ServeResult():
                self._expect(message)
            case FreeRows():
                self._deployment.free_rows(_attempt_id(message), message.begin, message.read)
            case DropResult(job=job):
                self._deployment.drop_spools(job)

    def _expect(self, message: ServeResult) -> None:
        try:
            self._spool(message).check(message.begin, message.end)
            if len(self._readings) + len(self._coming) >= limits.RESULT_READERS_MAX:
                raise ResourceExhausted(
                    f"{limits.RESULT_READERS_MAX} programs read results from this worker already: read "
                    "fewer parts at once"
                )
        except ShuffleError as error:
            info = ErrorInfo(code=error.code, text=str(error))
            self._send(ResultExpected(term=self._term(), ticket=message.ticket, error=info))
            return
        self._tickets[message.ticket] = message
        if len(self._tickets) > limits.EXTERNAL_TICKETS_MAX:
            del self._tickets[next(iter(self._tickets))]
        segment_bytes = self.pool.segment_bytes
        self._send(ResultExpected(term=self._term(), ticket=message.ticket, segment_bytes=segment_bytes))

    def _spool(self, message: ServeResult) -> Spool:
        spool = self._deployment.spools.get(_attempt_id(message))
        if spool is None:
            raise PeerLost(f"this worker keeps no results of job {message.job} (any more): run it again")
        return spool

    # --- links -----------------------------------------------------------------------------------

    def ticket(self, number: int) -> ServeResult | None:
        """The request of an expected reader that has not connected yet."""
        return self._tickets.get(number)

    def link_up(self, link: DataLink) -> None:
        """The reader has come."""
        message = self._tickets.pop(link.peer.worker, None)
        if message is None:  # another with the same ticket was faster
            link.abort(PeerLost(f"client {link.peer.worker} is not expected here any more"))
        else:
            self._coming[link] = message

    def requested(self, link: DataLink, request: PartitionRequest) -> None:
        """It asks for its partition, once."""
        message = self._coming.pop(link, None)
        connection, channel = link.connection, request.channel

        def failed(error: ShuffleError) -> None:
            connection.fail_producer(channel, error)
            link.flush_soon()

        try:
            asked = request.partition
            if message is None or (asked.job, asked.producer) != (message.job, message.index):
                raise RemoteProtocolError("this program may not ask for that partition")
            spool = self._spool(message)
            reading = _Reading(message, spool, self.pool, self._inbox, failed)
            reading.start()
        except ShuffleError as error:
            connection.refuse(channel, error)
            link.flush_soon()
            return
        self._readings[link] = reading
        serve(link, request, reading.partition.subpartitions[0])

    def link_down(self, link: DataLink) -> None:
        self._coming.pop(link, None)
        reading = self._readings.pop(link, None)
        if reading is not None:
            reading.leave()

    def close(self) -> list[threading.Thread]:
        """Stop serving clients. Returns the threads, which are about to end."""
        readings = list(self._readings.values())
        self._readings.clear()
        for reading in readings:
            reading.leave()
        return [reading.thread for reading in readings]


# --- external clients ---------------------------------------------------------------------------------


class ExternalClients:
    """The external clients of a worker.

    Args:
        term: returns the coordinator's term, which may rise.
        readers: the readers of kept results.
        send: sends a message to the coordinator.
    """

    def __init__(
        self,
        term: Callable[[], int],
        deployment: Deployment,
        readers: ResultReaders,
        send: Callable[[ControlMessage], None],
    ) -> None:
        self.readers = readers
        self._term = term
        self._deployment = deployment
        self._send = send
        self._tickets: dict[int, ExpectUpstream] = {}

    def serve(self, message: BeginWrite | ExpectUpstream | EndWrite) -> None:
        """Handle a message of the coordinator about external writes."""
        attempt = self._deployment.attempts.get(_attempt_id(message))
        gate = attempt.upstreams if attempt is not None else None
        if gate is None:
            self._serve(message)
        else:
            gate.once_resumed(partial(self._serve, message))

    def _serve(self, message: BeginWrite | ExpectUpstream | EndWrite) -> None:
        match message:
            case BeginWrite():
                self._begin(message)
            case ExpectUpstream():
                self._expect(message)
            case EndWrite():
                self._end(message)

    def _begin(self, message: BeginWrite) -> None:
        attempt = self._deployment.attempts.get(_attempt_id(message))
        gate = attempt.upstreams if attempt is not None else None
        if attempt is None or gate is None or attempt.paths.cancelled:
            return  # The coordinator asks the next attempt, or tells the client that the job has ended.
        for write in message.forgotten:
            gate.forget(write)
        if message.known:
            gate.keep(message.known)
        here = range(message.index, message.partitions, attempt.task.parallelism)
        mine = here if message.partitions else None
        gate.begin(message.write, mine, idle=message.idle, opened=message.opened)
        self._send(WriteBegun(term=self._term(), ticket=message.ticket))

    def _expect(self, message: ExpectUpstream) -> None:
        """Take the partition over from older attempts, and tell the coordinator what is there."""
        ticket = message.ticket

        def ready(progress: Progress) -> None:
            if not progress.complete:
                self._tickets[ticket] = message
                if len(self._tickets) > limits.EXTERNAL_TICKETS_MAX:
                    del self._tickets[next(iter(self._tickets))]
            self._send(
                UpstreamExpected(
                    term=self._term(),
                    ticket=ticket,
                    rows=progress.rows,
                    checksum=progress.checksum,
                    complete=progress.complete,
                    segment_bytes=self._deployment.services.pool.segment_bytes,
                    base=progress.base,
                    stable=gate.stable(progress),
                )
            )

        attempt = self._deployment.attempts.get(_attempt_id(message))
        if attempt is None or (attempt.paths.cancelled and attempt.task.state != "finished"):
            return  # As when a write begins.
        try:
            gate = self._gate(message)
            gate.expect(
                message.write,
                message.partition,
                message.attempt,
                ready,
                connection=message.connection,
                sent=message.sent,
            )
        except ShuffleError as error:
            info = ErrorInfo(code=error.code, text=str(error))
            self._send(UpstreamExpected(term=self._term(), ticket=ticket, error=info))

    def _end(self, message: EndWrite) -> None:
        attempt = self._deployment.attempts.get(_attempt_id(message))
        if attempt is not None and attempt.upstreams is not None:
            answer = partial(self._answer_end, message)
            attempt.upstreams.once_settled(message.write, message.partitions, answer)

    def _answer_end(self, message: EndWrite) -> None:
        attempt = self._deployment.attempts.get(_attempt_id(message))
        gate = attempt.upstreams if attempt is not None else None
        # The gate of a task that finished still knows what it read; else as when a write begins.
        if attempt is None or gate is None:
            return
        if attempt.paths.cancelled and attempt.task.state != "finished":
            return
        missing = gate.end_write(message.write, message.partitions)
        if message.last and not missing:
            gate.end()
        self._send(WriteEnded(term=self._term(), ticket=message.ticket, missing=missing))

    def _gate(self, message: ExpectUpstream) -> UpstreamGate:
        attempt = self._deployment.attempts.get(_attempt_id(message))
        gate = attempt.upstreams if attempt is not None else None
        if attempt is None or gate is None or attempt.paths.cancelled:
            raise PeerLost(
                f"task {message.operator}[{message.index}] of job {message.job} does not run here any more"
            )
        return gate

    # --- links -----------------------------------------------------------------------------------

    def refusal(self, ticket: int, term: int) -> str | None:
        """Why a client may not connect, or None; ``term`` is of the coordinator that gave it the ticket.

        Each term numbers its tickets from 1.
        """
        message = self._tickets.get(ticket) or self.readers.ticket(ticket)
        if message is None or term < self._term() or message.term < term:
            return f"client {ticket} is not expected here (any more)"
        return None

    def link_up(self, link: DataLink) -> None:
        """A client has connected. If it writes, request its partition over its own connection."""
        if link.peer.worker not in self._tickets:
            self.readers.link_up(link)
            return
        message = self._tickets.pop(link.peer.worker)
        try:
            channel = self._gate(message).open_channel(
                message.write, message.partition, message.attempt, link.abort
            )
        except ShuffleError as error:
            link.abort(error)
            return
        partition = PartitionId(JobId(message.job), UPSTREAM_EDGE, message.partition)
        channel.attach_remote(link, PartitionRequest(partition, message.index, message.attempt))

    def forget(self, job: str) -> None:
        """The job has ended: its tickets are void."""
        for number in [number for number, message in self._tickets.items() if message.job == job]:
            del self._tickets[number]


def _attempt_id(message: ServeResult | FreeRows | BeginWrite | ExpectUpstream | EndWrite) -> AttemptId:
    return AttemptId.of(message.job, message.operator, message.index, message.task_attempt)

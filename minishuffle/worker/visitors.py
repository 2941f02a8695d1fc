"""Programs that are no workers, at this worker's door: each has a ticket of the coordinator's."""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.clients import (
    EndWrite,
    ExpectUpstream,
    UpstreamExpected,
    WriteEnded,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import ControlMessage, ErrorInfo
from minishuffle.worker.deployment import Deployment
from minishuffle.worker.results import ResultReaders
from minishuffle.worker.task import Task
from minishuffle.worker.upstreams import UPSTREAM_EDGE, Progress, UpstreamGate

__all__ = ["Visitors"]


class Visitors:
    """Args:
    readers: those of kept results.
    send: a message to the coordinator.
    """

    def __init__(
        self,
        term: int,
        deployment: Deployment,
        readers: ResultReaders,
        send: Callable[[ControlMessage], None],
    ) -> None:
        self.readers = readers
        self._term = term
        self._deployment = deployment
        self._send = send
        self._tickets: dict[int, ExpectUpstream] = {}

    def serve(self, message: ExpectUpstream | EndWrite) -> None:
        """What the coordinator says of programs that write."""
        if isinstance(message, ExpectUpstream):
            self._expect(message)
        else:
            self._end(message)

    def _expect(self, message: ExpectUpstream) -> None:
        """Take the partition over from older attempts, and tell the coordinator what is there."""
        ticket = message.ticket

        def ready(progress: Progress) -> None:
            if not progress.complete:
                self._tickets[ticket] = message
            self._send(
                UpstreamExpected(
                    term=self._term,
                    ticket=ticket,
                    rows=progress.rows,
                    checksum=progress.checksum,
                    complete=progress.complete,
                    segment_bytes=self._deployment.pool.segment_bytes,
                )
            )

        try:
            gate, parallelism = self._gate(message.job, message.operator, message.index)
            mine = range(message.index, message.partitions, parallelism)
            gate.expect(message.write, message.partition, message.attempt, mine, ready)
        except ShuffleError as error:
            info = ErrorInfo(code=error.code, text=str(error))
            self._send(UpstreamExpected(term=self._term, ticket=ticket, error=info))

    def _end(self, message: EndWrite) -> None:
        task = self._deployment.tasks.get((message.job, message.operator, message.index))
        gate = _gate_of(task)
        # The gate of a task that finished still knows what it read. Of one that ended otherwise the job is
        # about to end, and the coordinator tells whoever asked.
        if task is None or gate is None or (task.paths.cancelled and task.state != "finished"):
            return
        missing = gate.missing(message.write, message.partitions)
        if message.last and not missing:
            gate.end()
        self._send(WriteEnded(term=self._term, ticket=message.ticket, missing=missing))

    def _gate(self, job: str, operator: int, index: int) -> tuple[UpstreamGate, int]:
        task = self._deployment.tasks.get((job, operator, index))
        gate = _gate_of(task)
        if task is None or gate is None or task.paths.cancelled:
            raise PeerLost(f"task {operator}[{index}] of job {job} does not run here any more")
        return gate, task.parallelism

    # --- links -----------------------------------------------------------------------------------

    def refusal(self, ticket: int, term: int) -> str | None:
        """Why a client may not connect, or None."""
        if term != self._term or not (ticket in self._tickets or self.readers.expects(ticket)):
            return f"client {ticket} is not expected here (any more)"
        return None

    def link_up(self, link: DataLink) -> None:
        """The client has come. One that writes: request its partition over its own connection."""
        if link.peer.worker not in self._tickets:
            self.readers.link_up(link)
            return
        message = self._tickets.pop(link.peer.worker)
        try:
            gate, _ = self._gate(message.job, message.operator, message.index)
            channel = gate.open_channel(message.write, message.partition, message.attempt)
        except ShuffleError as error:
            link.abort(error)
            return
        channel.connect(link.connection, link.flush_soon)
        channel.hang_up = link.abort
        request = PartitionRequest(
            0,
            message.job,
            UPSTREAM_EDGE,
            message.partition,
            message.index,
            message.attempt,
            1,
            1,
            0,
        )
        link.connection.request_partition(channel.consumer, request)
        link.flush_soon()

    def forget(self, job: str) -> None:
        """The job is over."""
        for number in [number for number, message in self._tickets.items() if message.job == job]:
            del self._tickets[number]


def _gate_of(task: Task | None) -> UpstreamGate | None:
    """Where programs write into the task, if they do."""
    gate = task.gates[0] if task is not None and task.gates else None
    return gate if isinstance(gate, UpstreamGate) else None

"""Reads rows that a sink kept, as a consumer on the credit protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.elements import AssemblyBudget, decode
from minishuffle.exchange.gate import InputGate, RemoteInputChannel
from minishuffle.external.access import Access
from minishuffle.external.connection import ExternalConnection
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.clients import OpenResult, ResultOpened
from minishuffle.wire.frames import PartitionRequest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ResultReader"]

EXCLUSIVE_BUFFERS: Final = 2
WAIT_SECONDS: Final = 1.0


class ResultReader:
    """Rows ``begin`` to ``end`` of one subtask of a sink. Use it in a ``with`` statement, or close it.

    Args:
        job, sink, subtask: as :func:`~minishuffle.external.results.describe_result` tells them.

    Raises (from :meth:`batches`):
        UnknownName: there is no such job or sink.
        UsageError: the rows are not there (any more).
        ResourceExhausted: the worker serves too many readers already.
        PeerLost, AuthenticationError: coordinator or worker cannot be reached, or refuses the secret.
    """

    def __init__(self, access: Access, job: str, sink: str, subtask: int, begin: int, end: int) -> None:
        self._access = access
        self._request = OpenResult(job=job, sink=sink, subtask=subtask, begin=begin, end=end)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Take nothing more; may be called again, and from within :meth:`batches`."""
        self._stack.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order, each time from the first on. A batch stays whole after the end."""
        self.close()
        if self._request.begin == self._request.end:
            return
        try:
            yield from self._read(*self._open())
        finally:
            self.close()

    def _open(self) -> tuple[ExternalConnection, InputGate]:
        with self._access.control() as control:
            reply = control.request(self._request)
        if not isinstance(reply, ResultOpened):
            raise RemoteProtocolError(f"the coordinator answered with {type(reply).__name__}")
        connection = self._stack.enter_context(
            ExternalConnection(
                self._access, reply.worker, reply.ticket, reply.term, _nothing, reply.segment_bytes
            )
        )
        gate = connection.run(lambda: self._gate(connection, reply.job))
        self._stack.callback(connection.run, gate.close)
        return connection, gate

    def _gate(self, connection: ExternalConnection, job: str) -> InputGate:
        """(Loop.) A gate with one channel, which is requested."""
        paths, subtask = connection.paths, self._request.subtask
        gate = InputGate(
            0,
            0,
            connection.pool.create_pool("input", EXCLUSIVE_BUFFERS + 1, connection.pool.total),
            connection.pool.segment_bytes,
            paths.bell.ring,
            paths.give_back,
            AssemblyBudget(limits.ASSEMBLY_BYTES_MAX),
            None,
            connection.counters,
        )
        channel = RemoteInputChannel(gate, subtask, EXCLUSIVE_BUFFERS)
        gate.add(channel)
        link = connection.link
        channel.connect(link.connection, link.flush_soon)
        request = PartitionRequest(0, job, 0, subtask, 0, 1, 1, 1, 0)
        link.connection.request_partition(channel.consumer, request)
        link.flush_soon()
        return gate

    def _read(self, connection: ExternalConnection, gate: InputGate) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        bell, rows = connection.paths.bell, 0
        while not gate.finished:
            bell.clear()
            element = gate.poll()
            if element is None:
                if not gate.finished:
                    bell.wait(WAIT_SECONDS)
                continue
            batch = decode(element.format, element.rows, element.payload)
            if not isinstance(batch, pa.RecordBatch):
                raise RemoteProtocolError("kept results are not Arrow columns")
            rows += batch.num_rows
            yield batch
        wanted = self._request.end - self._request.begin
        if rows != wanted:
            raise RemoteProtocolError(f"the worker sent {rows} rows where {wanted} were asked for")


def _nothing(link: DataLink, events: list[ConnectionEvent]) -> None:
    """A worker that serves results asks for nothing."""

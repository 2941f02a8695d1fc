"""A cluster that programs which are no workers write into, and a function that waits for the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.cli.demo import scrape, total
from minishuffle.client import JobHandle
from minishuffle.config import read_secret
from minishuffle.errors import PeerLost
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.remote.access import Access
from minishuffle.remote.connection import ExternalConnection
from minishuffle.remote.writer import StreamWriter
from minishuffle.wire.messages import WorkerAddress
from support import waiting

SECONDS_MAX = 30.0
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


def numbered(first: int, count: int) -> pa.RecordBatch:
    """``count`` rows that are all different, from number ``first`` on."""
    numbers = list(range(first, first + count))
    return pa.record_batch([numbers, [f"row {number}" for number in numbers]], schema=SCHEMA)


class Field:
    """One cluster, and jobs that read the stream ``orders``."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        address = cluster.client.address
        secret = read_secret(cluster.state_dir / "secret")
        self.access = Access(address.host, address.port, "local", secret)
        self.folder = folder

    def submit(
        self,
        hold: bool = False,
        bounded: bool = True,
        parallelism: int = 2,
        stream: str = "orders",
        restarts: bool = True,
    ) -> JobHandle:
        """A job that gives the numbers back; with ``hold`` it takes no row before :meth:`go`."""
        path = self.folder / f"{stream}-go"
        path.unlink(missing_ok=True)

        def taken(batch: pa.RecordBatch) -> pa.RecordBatch:
            deadline = time.monotonic() + SECONDS_MAX
            while hold and not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return batch.select(["n"])

        read = Table.from_spark(stream, SCHEMA, bounded=bounded).map_batches(taken, schema={"n": "int64"})
        settings = JobSettings() if restarts else JobSettings(restart_strategy="none")
        return self.cluster.submit(read.collect(), parallelism=parallelism, settings=settings)

    def go(self, stream: str = "orders") -> None:
        (self.folder / f"{stream}-go").touch()

    def writer(
        self,
        partition: int = 0,
        attempt: int = 1,
        write: str = "w",
        partitions: int = 1,
        stream: str = "orders",
        schema: pa.Schema = SCHEMA,
        access: Access | None = None,
    ) -> StreamWriter:
        return StreamWriter(
            access or self.access,
            stream,
            schema,
            write=write,
            partition=partition,
            partitions=partitions,
            attempt=attempt,
        )

    def refused(self) -> float:
        """Connections that the workers refused."""
        workers = self.cluster.status().workers
        samples = scrape([Address(info.host, info.metrics_port) for info in workers])
        return total(samples, "minishuffle_connections_refused_total")

    def calm(self) -> None:
        """Cancel what runs, and wait until it is over."""
        for job in self.cluster.client.jobs():
            handle = self.cluster.client.handle(job.job)
            if job.state in ("running", "deploying", "created"):
                handle.cancel()
            handle.wait_until_over(SECONDS_MAX)


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    return waiting.until


@pytest.fixture(scope="session")
def rows() -> Callable[[int, int], pa.RecordBatch]:
    return numbered


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with LocalCluster(workers=2, slots=4, segment_bytes=4096, network_memory_bytes=1 << 21) as cluster:
        cluster.client.status()
        yield Field(cluster, tmp_path_factory.mktemp("field"))


@pytest.fixture
def field(shared: Field) -> Iterator[Field]:
    yield shared
    shared.calm()


@pytest.fixture
def stray() -> Callable[[Field, int], None]:
    """A program that comes with a ticket of its own making."""

    def come(field: Field, ticket: int) -> None:
        info = field.cluster.status().workers[0]
        worker = WorkerAddress(worker=info.worker, epoch=info.epoch, host=info.host, data_port=info.data_port)
        with ExternalConnection(
            field.access, worker, lambda link, events: None, ticket=ticket, term=1, segment_bytes=4096
        ):
            raise AssertionError("the worker let it in")

    return come


@pytest.fixture
def cut() -> Callable[[StreamWriter], None]:
    """Breaks the connection of a writer for good, as the end of its process would."""

    def broken(writer: StreamWriter) -> None:
        connection = writer._connection
        writer._reconnects_left = 0
        assert connection is not None
        connection._loop.call_soon_threadsafe(connection.link.abort, PeerLost("cut by the test"))
        connection.settle()

    return broken


@pytest.fixture
def buffers_sent() -> Callable[[StreamWriter], int]:
    """How many buffers of a writer's have gone out."""

    def count(writer: StreamWriter) -> int:
        return writer._partition.buffers_out()

    return count


@pytest.fixture
def is_cut() -> Callable[[StreamWriter], bool]:
    """Whether the connection of a writer has ended."""

    def ended(writer: StreamWriter) -> bool:
        return writer._connection is not None and writer._connection.error is not None

    return ended


@pytest.fixture
def field_of_one(tmp_path: Path) -> Iterator[Field]:
    """A cluster of one worker, to be killed."""
    with LocalCluster(workers=1, slots=2, restart_workers=False) as cluster:
        yield Field(cluster, tmp_path)

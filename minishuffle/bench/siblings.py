"""``bench isolation``: what a consumer that stands still does to its siblings on the same connection.

One job with one edge, on two workers. Producer i, on the first worker, feeds one consumer, on the second, and
no other; all these pairs share what connects the workers. They are paced to :data:`LOAD` of what was measured
as fast as they go, so no sibling has a reason to slow down. Then one consumer waits, and goes on again. The
rates of the siblings meanwhile, beside those before and after, are what isolation is: near 1 with credits,
near 0 with TCP alone once everything between the pair is full (the others' rows stand behind those that
nobody takes).

Beside the rows go latency markers, in-band events that need no credit, as barriers do not: ``barrier_ms`` is
how late the latest of :data:`EVENTS` came through the siblings while the one consumer stood still, as the
upper edge of its bucket.
"""

from __future__ import annotations

import math
import os
import re
import socket
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from minishuffle.api.stream import Stream
from minishuffle.bench.numbered import connections_to
from minishuffle.client import Client, JobHandle
from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Payload
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import WorkerInfo

__all__ = ["measure_isolation", "metrics_text", "sum_of"]

ROW_BYTES: Final = 16_384
PAIRS: Final = 8
LOAD: Final = 0.6
"""What all pairs together send, as a share of the capacity."""
FULL_SECONDS_MAX: Final = 0.5
"""How long it may take a pair to fill what lies between its ends; asserted."""
SETTLE_SECONDS: Final = 2.0
"""From a change until the siblings' rates are looked at."""
CAPACITY_SECONDS: Final = 2.0
SOCKET_BYTES: Final = 1 << 18
"""Linux lets them grow until they hold seconds of a pair's rate; these are twice as much at most."""
EVENTS: Final = 50
LATENCY_INTERVAL: Final = 0.02
SEGMENT_BYTES: Final = 16_384
CATCH_UP_SECONDS: Final = 0.05
STARTED_SECONDS_MAX: Final = 60.0
Table: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class Controls:
    """What the benchmark tells the tasks, and they tell it: a file that all processes have in memory. Each
    number is written by one side.

    Args:
        path: of the file.
        subtasks: of each operator.
    """

    def __init__(self, path: str, subtasks: int) -> None:
        self.path = path
        self.subtasks = subtasks

    @property
    def size(self) -> int:
        """Numbers in the file."""
        return 3 + 2 * self.subtasks

    def open(self) -> Table:
        """``[rows/s of a pair, whether to end, the consumer that waits or -1, …]``; then the consumer of
        each producer (-1: none, -2: not known yet), and the rows that each consumer has taken."""
        return np.memmap(self.path, np.float64, "r+", shape=(self.size,))

    def create(self) -> Table:
        """The file with nothing decided."""
        Path(self.path).write_bytes(bytes(8 * self.size))
        table = self.open()
        table[2] = -1
        table[3 : 3 + self.subtasks] = -2
        return table


class PacedPairs:
    """Source with a split for each producer: rows (consumer, payload), as the controls say."""

    format = "rows"
    bounded = True

    def __init__(self, controls: Controls) -> None:
        self._controls = controls

    def splits(self) -> Sequence[int]:
        return range(self._controls.subtasks)

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        """A row at a time; no time that was lost is made up for but a moment."""
        table, payload, due = self._controls.open(), bytes(ROW_BYTES), 0.0
        while not table[1]:
            consumer, rate = int(table[3 + split]), float(table[0])
            if consumer < 0:
                time.sleep(0.01)
                continue
            if rate:
                now = time.monotonic()
                due = max(due, now - CATCH_UP_SECONDS) + 1 / rate
                if due > now:
                    time.sleep(due - now)
            yield [(consumer, payload)]


class CountingSink:
    """Counts the rows that it takes, and waits while the controls say so."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls

    def open(self, context: TaskContext) -> None:
        self._index = context.index
        self._table = self._controls.open()

    def write(self, batch: Payload) -> None:
        table, index = self._table, self._index
        while table[2] == index and not table[1]:
            time.sleep(0.005)
        table[3 + self._controls.subtasks + index] += len(batch)

    def close(self) -> None:
        """It has no result."""


def measure_isolation(
    *, flow_control: Literal["credit", "tcp"], pairs: int, seconds: float
) -> dict[str, Any]:
    """Run it once; ``seconds`` are those of each of the three phases.

    Raises:
        ShuffleError: the job failed, it does not run as it should to show anything, or too much fits between
            the two ends of a pair to tell the phases apart.
    """
    settings = JobSettings(
        flow_control=flow_control,
        restart_strategy="none",
        buffers_per_channel=1,
        floating_buffers_per_gate=8,
        latency_interval=LATENCY_INTERVAL,
        latency_granularity="subtask",
    )
    needed = (SEGMENT_BYTES + 256) * 8 * pairs * (2 * pairs + 16)
    with tempfile.TemporaryDirectory() as directory:
        controls = Controls(os.path.join(directory, "controls"), 2 * pairs)
        table = controls.create()
        source = Stream.source(PacedPairs(controls))
        stream = source.partition(lambda row, consumers: row[0]).to(CountingSink(controls))
        with LocalCluster(
            2, pairs, segment_bytes=SEGMENT_BYTES, network_memory_bytes=max(64 << 20, needed)
        ) as cluster:
            handle = cluster.submit(stream, name="bench-isolation", parallelism=2 * pairs, settings=settings)
            run = IsolationRun(cluster.client, handle, table, pairs)
            try:
                found = run.measure(seconds, one_way=flow_control == "tcp")
            finally:
                table[1] = 1
            handle.wait(120)
    return {"flow_control": flow_control, **found}


class IsolationRun:
    """The job while it runs."""

    def __init__(self, client: Client, handle: JobHandle, table: Table, pairs: int) -> None:
        self._client, self._handle, self._table = client, handle, table
        self._pairs = pairs
        self._counts = table[3 + 2 * pairs :]
        self._consumers: list[int] = []
        """Those of the pairs, in their order."""
        self._producers: list[int] = []

    def measure(self, seconds: float, *, one_way: bool) -> dict[str, Any]:
        """Everything but the mode; ``one_way``: the pairs are to share a one-way connection."""
        sender, receiver = self._match()
        time.sleep(1.0)
        self._sockets(sender, receiver, SOCKET_BYTES)
        capacity = float(self._rates(CAPACITY_SECONDS).sum()) * ROW_BYTES
        if not capacity:
            raise ShuffleError(
                f"no pair moved a row in {CAPACITY_SECONDS:g} s: use fewer channels, or a machine with less "
                "load"
            )
        rate = LOAD * capacity / self._pairs
        self._table[0] = rate / ROW_BYTES
        time.sleep(SETTLE_SECONDS)
        full = self._bytes_between(sender, receiver) / rate
        self._check((sender, receiver), full, one_way=one_way)
        before = self._rates(seconds)
        self._table[2] = self._consumers[0]
        time.sleep(SETTLE_SECONDS)
        events = self._events(receiver)
        waiting = self._rates(seconds)
        late = _latest(events, self._events(receiver))
        self._table[2] = -1
        time.sleep(SETTLE_SECONDS)
        after = self._rates(seconds)
        usual = (before[1:] + after[1:]) / 2
        if not usual.all():
            raise ShuffleError("a pair stood still while all consumers ran")
        return {
            "sibling_ratio": round(statistics.median((waiting[1:] / usual).tolist()), 4),
            "barrier_ms": late,
            "pairs": self._pairs,
            "channels": self._pairs**2,
            "capacity_bytes_per_second": round(capacity),
            "pair_bytes_per_second": round(rate),
            "full_after_seconds": round(full, 3),
        }

    def _match(self) -> tuple[WorkerInfo, WorkerInfo]:
        """Give each producer of one worker its consumer on the other; gives both workers."""
        deadline = time.monotonic() + STARTED_SECONDS_MAX
        tasks = self._handle.info().tasks
        while any(task.state != "running" for task in tasks):
            if time.monotonic() > deadline:
                raise ShuffleError("the job's tasks do not all run")
            time.sleep(0.05)
            tasks = self._handle.info().tasks
        workers = {each.worker: each for each in self._client.status().workers if each.state == "alive"}
        first, last = min(workers), max(workers)
        self._producers = [each.index for each in tasks if each.operator == 0 and each.worker == first]
        self._consumers = [each.index for each in tasks if each.operator == 1 and each.worker == last]
        if len(self._producers) != self._pairs or len(self._consumers) != self._pairs:
            raise ShuffleError("the subtasks are not spread evenly over the two workers")
        for split in range(2 * self._pairs):
            self._table[3 + split] = -1
        for producer, consumer in zip(self._producers, self._consumers, strict=True):
            self._table[3 + producer] = consumer
        return workers[first], workers[last]

    def _rates(self, seconds: float) -> Table:
        """Rows per second that each pair's consumer takes."""
        before, begin = self._counts[self._consumers].copy(), time.monotonic()
        time.sleep(seconds)
        rates: Table = (self._counts[self._consumers] - before) / (time.monotonic() - begin)
        return rates

    # --- what is asserted -------------------------------------------------------------------------

    def _bytes_between(self, sender: WorkerInfo, receiver: WorkerInfo) -> float:
        """What fits between the ends of a pair: the gate's buffers and those of both sockets."""
        gate = (2 * self._pairs + 8) * SEGMENT_BYTES
        sent, received = self._sockets(sender, receiver)
        return gate + max(sent) + max(received)

    @staticmethod
    def _sockets(sender: WorkerInfo, receiver: WorkerInfo, size: int = 0) -> tuple[list[int], list[int]]:
        """What sockets hold of the connections between them, sent and received; ``size``: set that first."""
        address, sizes = Address(receiver.host, receiver.data_port), (list[int](), list[int]())
        for each in connections_to(address, sender.pid):  # the lower one of two workers dials
            sizes[0].append(_buffer(each, socket.SO_SNDBUF, size))
        for each in connections_to(address, receiver.pid, accepted=True):
            sizes[1].append(_buffer(each, socket.SO_RCVBUF, size))
        return sizes

    def _check(self, workers: Sequence[WorkerInfo], full: float, *, one_way: bool) -> None:
        """All pairs share one connection, no row has stayed in a worker, and what is between fills soon."""
        for worker in workers:
            text = metrics_text(self._client, worker)
            found = _connections(text)
            # One that goes one way is there each way.
            if found != ((3.0, 1.0) if one_way else (1.0, 0.0)):
                what = f"{found[0]:g} connections and reads {found[1]:g} that go one way"
                raise ShuffleError(f"worker {worker.worker} has {what}")
            if sum_of(text, "minishuffle_network_buffers_total", 'path="local"'):
                raise ShuffleError(f"rows have stayed inside worker {worker.worker}")
        if full > FULL_SECONDS_MAX:
            raise ShuffleError(
                f"what lies between the ends of a pair takes it {full:.2f} s to fill, at most "
                f"{FULL_SECONDS_MAX} are allowed: use fewer channels, or a machine with less load"
            )

    def _events(self, receiver: WorkerInfo) -> dict[float, float]:
        """How many markers have come from the siblings' producers to their consumers, by the upper edge of
        what they took, in seconds; cumulative."""
        sources = {f"0.{each}" for each in self._producers[1:]}
        found: defaultdict[float, float] = defaultdict(float)
        for labels, value in _LATENCY.findall(metrics_text(self._client, receiver)):
            has = dict(_LABEL.findall(labels))
            if has["source"] in sources and int(has["subtask"]) in self._consumers[1:]:
                found[float(has["le"])] += float(value)
        return found


def metrics_text(client: Client, worker: WorkerInfo) -> str:
    """What a worker says at ``/metrics``. Raises OSError if it cannot be asked."""
    headers = {"Authorization": f"Bearer {client.read_token}"}
    request = urllib.request.Request(f"http://{worker.host}:{worker.metrics_port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10.0) as response:
        return str(response.read().decode())


def _buffer(connection: socket.socket, option: int, size: int) -> int:
    if size:
        connection.setsockopt(socket.SOL_SOCKET, option, size)
    return connection.getsockopt(socket.SOL_SOCKET, option)


_LATENCY: Final = re.compile(r"^minishuffle_latency_seconds_bucket\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def sum_of(text: str, family: str, label: str) -> float:
    """The sum of a family's series with that label, in the text of ``/metrics``."""
    series = re.findall(rf"^{family}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in series if label in labels)


def _connections(text: str) -> tuple[float, float]:
    """How many there are, and how many of them are read for jobs with flow_control=tcp: one that has stopped
    for want of a buffer, as all do now and then, is among these."""
    inlets = (
        sum_of(text, "minishuffle_one_way_connections", f'state="{state}"')
        for state in ("reading", "stopped")
    )
    return sum_of(text, "minishuffle_connections", ""), sum(inlets)


def _latest(before: dict[float, float], after: dict[float, float]) -> float | None:
    """The upper edge, in milliseconds, below which all markers came that have come in between; None if they
    are fewer than :data:`EVENTS`."""
    came = {edge: count - before.get(edge, 0.0) for edge, count in sorted(after.items())}
    everything = came.get(math.inf, 0.0)
    if everything < EVENTS:
        return None
    return next(1000 * edge for edge, count in came.items() if count == everything)

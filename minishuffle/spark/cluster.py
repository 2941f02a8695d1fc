"""A cluster whose workers run on Spark's executors.

Each worker is a job of Spark with one task, in a job group of its own, so that one that is lost takes no
other with it (a barrier stage would end all of them). Spark supplies the slots; the coordinator's
heartbeats say which worker is alive. A lost executor is a lost worker, and another is ordered. Dynamic
allocation keeps executors on which a worker runs. Speculation leaves stages of one task alone unless it is
given a duration, after which each worker would be ended in favour of its copy: that is refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, UsageError
from minishuffle.launch import LocalProcesses, settings_flags
from minishuffle.local import LocalCluster
from minishuffle.replacements import Orders
from minishuffle.spark.session import spark_error
from minishuffle.transport.credentials import Credentials

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from minishuffle.api.stream_base import StreamBase
    from minishuffle.client import JobHandle
    from minishuffle.plan.graph import JobSettings

__all__ = ["SparkCluster", "WorkerSupplier"]


POLL_SECONDS: Final = 0.5
CANCEL_SECONDS: Final = 30.0
END_SECONDS: Final = 5.0
"""For an executor to end a worker that hangs, which takes a second, and for one to end by order."""
SPECULATION_DURATION: Final = "spark.speculation.task.duration.threshold"


class WorkerSupplier:
    """A thread that keeps so many workers running on executors.

    Args:
        processes: the coordinator's.

    Raises:
        UsageError: the session is one of Spark Connect, which has no jobs to name; or it ends workers
            in favour of copies.
    """

    def __init__(
        self,
        spark: SparkSession,
        workers: int,
        cluster: str,
        processes: LocalProcesses,
        secret: bytes,
        *,
        flags: list[str],
        tls: Credentials | None = None,
    ) -> None:
        from pyspark.sql import SparkSession

        if not isinstance(spark, SparkSession):
            raise UsageError(
                "workers cannot be started through Spark Connect: start them from a program with a "
                "session of its own on that master"
            )
        conf = spark.sparkContext.getConf()
        if conf.get("spark.speculation", "false") == "true" and conf.get(SPECULATION_DURATION) is not None:
            raise UsageError(
                f"Spark would end each worker in favour of a copy: leave out {SPECULATION_DURATION}, or "
                "spark.speculation"
            )
        self._spark = spark
        self._context = spark.sparkContext
        self._cluster = cluster
        self._processes = processes
        self._secret = secret
        self._flags = tuple(flags)
        self._tls = tls
        self._orders = Orders(workers)
        self._lock = threading.Lock()
        self._ended: list[tuple[int, str]] = []
        self._jobs: dict[int, threading.Thread] = {}
        self._lost: dict[int, float] = {}
        """Orders whose workers were lost and whose jobs have not ended: since when."""
        self._seen: set[int] = set()
        self._alive: set[int] = set()
        self._broken = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker supplier", daemon=True)

    def start(self, timeout: float) -> None:
        """Order the workers and wait until all are registered.

        Raises:
            ShuffleError: executors cannot run them; with the first reason.
            PeerLost: the coordinator ended.
            ResourceExhausted: ``timeout`` seconds have passed.
        """
        self._thread.start()
        deadline = time.monotonic() + timeout
        while len(self._alive) < self._orders.wanted:
            self.check()
            if (code := self._processes.coordinator.process.poll()) is not None:
                tail = self._processes.coordinator.tail()
                raise PeerLost(f"the coordinator ended with code {code}\n{tail}")
            if time.monotonic() > deadline:
                raise ResourceExhausted(
                    f"{len(self._alive)} of {self._orders.wanted} workers came up within {timeout:g} s: give "
                    f"Spark {self._orders.wanted} free cores, or ask for fewer workers"
                    + (f" ({self._orders.first_failure})" if self._orders.first_failure else "")
                )
            self._stopping.wait(POLL_SECONDS / 5)

    def check(self) -> None:
        """Look whether workers that are lost are still replaced.

        Raises:
            ShuffleError: they are not; with the first reason.
        """
        reason = self._orders.first_failure if self._orders.failed else self._broken
        if reason:
            raise ShuffleError(f"the executors run no more workers: {reason}")

    def order_no_more(self) -> None:
        """Workers that end from now on are not replaced."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(CANCEL_SECONDS)

    def stop(self) -> None:
        """Have every job end: those whose workers do not end by the coordinator's order, since there is none,
        say, are cancelled, and the workers end with their tasks."""
        self.order_no_more()
        ordered = time.monotonic() + END_SECONDS
        for order in self._alive & self._jobs.keys():
            self._jobs[order].join(max(0.0, ordered - time.monotonic()))
        deadline = time.monotonic() + CANCEL_SECONDS
        while (left := self._running()) and time.monotonic() < deadline:
            for order in left:  # Again and again: a job that Spark does not have yet is not cancelled.
                self._context.cancelJobGroup(self._group(order))
            self._jobs[left[0]].join(POLL_SECONDS)

    def _running(self) -> list[int]:
        return [order for order, job in self._jobs.items() if job.is_alive()]

    def _group(self, order: int) -> str:
        return f"minishuffle-{os.getpid()}-{self._processes.address.port}-worker-{order}"

    # --- the supplier's thread -------------------------------------------------------------------

    def _run(self) -> None:
        from minishuffle.client import Client

        with Client(self._processes.address, self._secret, cluster=self._cluster, tls=self._tls) as client:
            while not self._stopping.wait(POLL_SECONDS):
                try:
                    with contextlib.suppress(ShuffleError):  # It does not answer, and is asked again.
                        self._look(client)
                except Exception as error:  # Whatever Spark raises; check() tells.
                    self._broken = str(spark_error(error, "Spark takes no orders"))
                    return

    def _look(self, client: Any) -> None:
        now = time.monotonic()
        states = {worker.worker: worker.state for worker in client.status().workers}
        alive = {worker for worker, state in states.items() if state == "alive"}
        self._seen |= alive
        self._alive = alive
        with self._lock:
            ended, self._ended = self._ended, []
        for order, reason in ended:
            self._jobs.pop(order).join()
            self._lost.pop(order, None)
            self._orders.ended(order, reason, order in self._seen, now)
        for order in [order for order in self._orders.open if states.get(order) == "lost"]:
            self._orders.lost(order)
            self._lost[order] = now
        for order, at in self._lost.items():
            if now >= at + END_SECONDS:  # Its executor may hang, too: Spark is not waited for.
                self._context.cancelJobGroup(self._group(order))
        for order in self._orders.due(now):
            self._order(order)

    def _order(self, order: int) -> None:
        from pyspark import inheritable_thread_target

        from minishuffle.spark.executors import WorkerOrder

        work = WorkerOrder(
            order, self._cluster, self._processes.address, self._secret, self._flags, self._tls
        )

        def run() -> None:
            reason = "Spark cancelled it"
            try:
                self._context.setJobGroup(self._group(order), f"minishuffle worker {order}", True)
                found = self._context.parallelize([0], 1).mapPartitions(work).collect()
                reason = found[0] if found else reason
            except Exception as error:  # Whatever Spark raises, the order has ended and another is placed.
                reason = str(spark_error(error, f"Spark did not run worker {order} to its end"))
            with self._lock:
                self._ended.append((order, reason))

        self._jobs[order] = job = threading.Thread(
            target=inheritable_thread_target(self._spark)(run), name=f"worker {order}", daemon=True
        )
        job.start()


class SparkCluster(LocalCluster):
    """A coordinator in this program's machine, and ``workers`` workers on the executors of ``spark``.

    Used like :class:`~minishuffle.LocalCluster`. Each worker holds one core of Spark for as long as the
    cluster is up, so Spark needs more cores than that for jobs of its own.

    Args:
        host: where the coordinator listens; an address that all executors can reach.

    Raises (on entry):
        ShuffleError: executors cannot run workers; with the first reason.
        ResourceExhausted: Spark did not supply all of them within ``startup_timeout`` seconds.
    """

    def __init__(
        self,
        spark: SparkSession,
        workers: int = 2,
        slots: int = 2,
        *,
        host: str | None = None,
        startup_timeout: float = 120.0,
        **settings: Any,
    ) -> None:
        if local := {"standby", "restart_workers"} & settings.keys():
            raise UsageError(f"lost workers on executors are ordered anew: leave out {min(local)}")
        super().__init__(workers, slots, restart_workers=False, startup_timeout=startup_timeout, **settings)
        self._spark = spark
        self._host = host or str(spark.conf.get("spark.driver.host", "127.0.0.1"))
        self._supplier: WorkerSupplier | None = None

    def __enter__(self) -> Self:
        self._start(0, self._host)
        assert self._processes is not None
        try:
            self._supplier = WorkerSupplier(
                self._spark,
                self._count,
                "local",
                self._processes,
                self._secret,
                flags=settings_flags(self._settings),
                tls=self._tls,
            )
            self._supplier.start(self._startup_timeout)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._supplier is not None:
                self._supplier.order_no_more()
        finally:
            try:
                super().__exit__(kind, error, traceback)
            finally:
                if self._supplier is not None:
                    self._supplier.stop()

    def submit(
        self,
        stream: StreamBase,
        *,
        name: str = "job",
        parallelism: int | None = None,
        settings: JobSettings | None = None,
        restore_from: str | Path = "",
        drop_state: Sequence[str] = (),
        trust_snapshot: bool = False,
    ) -> JobHandle:
        """Start a job; see :meth:`Client.submit`.

        Raises:
            ShuffleError: workers were lost and the executors run no others; with the first reason.
        """
        if self._supplier is not None:
            self._supplier.check()
        return super().submit(
            stream,
            name=name,
            parallelism=parallelism,
            settings=settings,
            restore_from=restore_from,
            drop_state=drop_state,
            trust_snapshot=trust_snapshot,
        )

    @property
    def workers(self) -> dict[int, int]:
        """Worker id -> process id, of the workers that are alive."""
        return {worker.worker: worker.pid for worker in self.status().workers if worker.state == "alive"}

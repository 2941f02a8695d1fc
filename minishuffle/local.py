"""A whole cluster for the length of a ``with`` block, or of a notebook: real processes on this machine."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal as signals
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from minishuffle.client import Client, JobHandle, JobResult
from minishuffle.config import create_secret, read_coordinator, with_tls_files
from minishuffle.errors import PeerLost, ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.launch import (
    POLL_SECONDS,
    LocalProcesses,
    Machines,
    checked_settings,
    start_processes,
    stop_children,
)
from minishuffle.notebook import cluster_html
from minishuffle.supervision import Supervisor
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.requests import ClusterStatus

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.api.stream import Stream, Table
    from minishuffle.api.stream_base import StreamBase
    from minishuffle.plan.graph import JobSettings

__all__ = ["LocalCluster", "remove_abandoned_state"]

T = TypeVar("T")
"""A row."""

# --- state ----------------------------------------------------------------------------------------
#
# Directories of clusters that live as long as a program. A program that is killed leaves its own behind;
# the lock that it held on a file in there is gone with it, however it ended.

STATE_PREFIX = "minishuffle-"
OWNER_FILE = "owner"
REMOVALS_MAX = 40


def _make_state_dir() -> tuple[Path, int]:
    """A directory of mode 0700, and the descriptor that holds the lock on it."""
    directory = Path(tempfile.mkdtemp(prefix=STATE_PREFIX))
    new = directory / f"{OWNER_FILE}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / OWNER_FILE)  # Never there without its lock while its owner lives.
    return directory, descriptor


def _remove_state(directory: Path) -> None:
    """Remove all of it, also what processes that are about to end are still writing there."""
    for _ in range(REMOVALS_MAX):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(POLL_SECONDS)


def remove_abandoned_state() -> None:
    """Remove state directories of this user's whose owners are dead."""
    for file in Path(tempfile.gettempdir()).glob(f"{STATE_PREFIX}*/{OWNER_FILE}"):
        with contextlib.suppress(OSError):  # It is another user's, or locked, or just being removed.
            if file.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_state(file.parent)
            finally:
                os.close(descriptor)


# --- local_cluster --------------------------------------------------------------------------------

NOT_RUNNING = "this LocalCluster is not running: use it in a 'with' statement, or call its start()"
STOP_GRACE_SECONDS = 15.0
SUPERVISOR_SECONDS = 2.0
"""For a coordinator to answer the supervisor, which asks again; to leave the cluster may take so long."""


def _check_one_table(table: Table) -> None:
    """Raises UsageError if its ``collect`` sinks take different columns."""
    from minishuffle.plan.end_steps import collected_schemas

    schemas = collected_schemas(table.plan)
    first = next(iter(schemas), "")
    for name, schema in schemas.items():
        if schema != schemas[first]:
            raise UsageError(
                f"the collect sinks {first!r} and {name!r} take different columns, and run() gives one "
                f"table: write result = cluster.submit(...).wait(), and take result.table({first!r}) and "
                f"result.table({name!r}), which is JobResult.table(name)"
            )


def _one_table(result: JobResult) -> pa.Table:
    """What all ``collect`` sinks have sent, of tables; no columns if there are no such sinks."""
    import pyarrow as pa

    from minishuffle.exchange.collected import table_of

    batches = [batch for sent in result.batches.values() for batch in sent]
    return table_of(batches) if batches else pa.table({})


class LocalCluster:
    """One coordinator and ``workers`` worker processes with ``slots`` slots each, on loopback.

    ``standby`` more workers wait, with everything loaded, for the slots of a lost one. For each worker
    process that is lost a new one is started, unless ``restart_workers`` is false; it is a standby worker if
    there are too few, and no task waits for its slots. A coordinator that is lost is started again, unless
    ``restart_coordinator`` is false; whoever waits for a job waits on meanwhile. If it is lost soon after its
    start more than ``limits.COORDINATOR_RESTARTS_MAX`` times in a row, the workers are stopped, and whoever
    waits gets the reason.

    With ``tls`` all connections use TLS, with certificates of a CA that is made for this cluster.

    Entering it starts them and waits until all are registered; leaving it stops them and removes
    their state directory. :meth:`start` and :meth:`stop` do the same where a block does not fit, as in
    notebooks, which show its workers and jobs. The processes end with this one even if it is killed, and the
    next cluster removes the directory then. Further keywords are fields of
    :class:`~minishuffle.config.ClusterSettings`, e.g. ``segment_bytes=4096``.

    Raises (on entry):
        UsageError: a number or a setting does not fit.
        ShuffleError: a process ended at its start; the text has the end of its log.
        ResourceExhausted: not all processes were ready within ``startup_timeout`` seconds.
    """

    def __init__(
        self,
        workers: int = 2,
        slots: int = 2,
        *,
        standby: int = 0,
        restart_workers: bool = True,
        restart_coordinator: bool = True,
        tls: bool = False,
        startup_timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        if workers < 1:
            raise UsageError(f"a cluster needs at least one worker, not {workers}")
        if standby < 0:
            raise UsageError(f"a cluster has no or some workers on standby, not {standby}")
        self._standby = standby
        self._restart_workers = restart_workers
        self._restart_coordinator = restart_coordinator
        self._supervisor: Supervisor | None = None
        self._count = workers
        self._settings = checked_settings(slots=slots, **settings)
        self._makes_certificates = tls
        if tls and self._settings.tls_files is not None:
            raise UsageError("tls=True makes certificates: leave it out, or the settings that name some")
        self._startup_timeout = startup_timeout
        self._state_dir: Path | None = None
        self._state_lock = -1
        self._processes: LocalProcesses | None = None
        self._client: Client | None = None
        self._secret = b""
        self._tls: Credentials | None = None

    def __repr__(self) -> str:
        where = "not running" if self._processes is None else f"at {self._processes.address}"
        return f"<{type(self).__name__} of {self._count} workers, {where}>"

    def _repr_html_(self) -> str | None:
        """Its workers and jobs now, in a notebook; None where it does not run: then its text is shown."""
        try:
            return cluster_html(self.status())
        except ShuffleError:
            return None

    def start(self) -> Self:
        """Start it without a ``with`` statement: until :meth:`stop`, or the end of the program.

        Raises:
            UsageError: it runs already.
        """
        started = self.__enter__()
        atexit.register(self.stop)
        return started

    def stop(self) -> None:
        """Cancel all jobs and stop the processes, if it runs."""
        atexit.unregister(self.stop)
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self._start(self._count, "127.0.0.1")
        return self

    def _start(self, workers: int, host: str, machines: Machines | None = None) -> None:
        if self._processes is not None:
            raise UsageError("this cluster is running already")
        remove_abandoned_state()
        state_dir, self._state_lock = _make_state_dir()
        self._state_dir = state_dir
        try:
            secret_file = state_dir / "secret"
            self._secret = create_secret(secret_file)
            if self._makes_certificates:
                from minishuffle.authority import throw_away_files  # For weight.

                self._settings = with_tls_files(self._settings, throw_away_files(state_dir, host))
            self._tls = Credentials.of(self._settings)
            self._processes = start_processes(
                cluster="local",
                state_dir=state_dir,
                secret_file=secret_file,
                workers=workers,
                standby=self._standby,
                settings=self._settings,
                host=host,
                machines=machines,
                timeout=self._startup_timeout,
            )
            address = self._processes.address
            self._client = Client(
                address,
                self._secret,
                cluster="local",
                reconnect_timeout=self._settings.coordinator_timeout if self._restart_coordinator else 0.0,
                find=self._find,
                tls=self._tls,
            )
            watching = Client(
                address, self._secret, cluster="local", timeout=SUPERVISOR_SECONDS, tls=self._tls
            )
            with contextlib.suppress(PeerLost):  # It connects now, if it can, and not at some moment later.
                watching.status()
            self._supervisor = Supervisor(
                self._processes,
                watching,
                coordinator=self._restart_coordinator,
                workers=self._restart_workers,
            )
            self._supervisor.start()
        except BaseException:
            self._stop(ask=False)
            raise

    def _find(self) -> Address:
        """Where the coordinator is; raises PeerLost: it is not started again."""
        if self._supervisor is not None and self._supervisor.failure is not None:
            raise self._supervisor.failure
        place = read_coordinator(self.state_dir)
        return self._running().address if place is None else place.address

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(ask=True)

    @property
    def client(self) -> Client:
        """A connection to the coordinator."""
        if self._client is None:
            raise UsageError(NOT_RUNNING)
        return self._client

    @property
    def state_dir(self) -> Path:
        """Where the processes log; removed at the end."""
        if self._state_dir is None:
            raise UsageError(NOT_RUNNING)
        return self._state_dir

    def spark_options(self) -> dict[str, str]:
        """The options by which ``format("minishuffle")`` of Spark finds this cluster:
        ``df.write.format("minishuffle").options(**cluster.spark_options())``."""
        return self.client.spark_options(self.state_dir / "secret")

    @property
    def workers(self) -> dict[int, int]:
        """Worker id -> process id, of the last process that this object started for each worker."""
        return {worker: child.pid for worker, child in self._running().workers.items()}

    @property
    def web_port(self) -> int:
        """Port of the coordinator's web server (``/metrics``, ``/sd/prometheus``)."""
        return self._running().web_port

    @overload
    def run(
        self,
        stream: Table,
        *,
        parallelism: int | None = None,
        timeout: float | None = None,
        settings: JobSettings | None = None,
        allow_loss: bool = False,
    ) -> pa.Table: ...

    @overload
    def run(
        self,
        stream: Stream[T],
        *,
        parallelism: int | None = None,
        timeout: float | None = None,
        settings: JobSettings | None = None,
        allow_loss: bool = False,
    ) -> list[T]: ...

    def run(
        self,
        stream: Table | Stream[Any],
        *,
        parallelism: int | None = None,
        timeout: float | None = None,
        settings: JobSettings | None = None,
        allow_loss: bool = False,
    ) -> Any:
        """Run a job to its end and give what its ``collect`` sinks have sent, in no particular order: of a
        Table a ``pyarrow.Table``, of a Stream a list of rows.

        One that ends in no sink ends in ``collect()`` here. One that has other sinks alone gives no rows:
        ``submit(...).wait()`` gives what these did. Of several sinks (:meth:`Stream.together`) all rows are
        in the one list, those of tables as dicts, or in the one table, if all of them are tables and have the
        same columns.

        A warning is logged of late records that were dropped, see :meth:`JobHandle.wait`. The job is
        cancelled when ``timeout`` seconds pass or the wait is interrupted.

        Raises:
            UsageError: the ``collect`` sinks of tables have different columns.
            TaskFailed: a function raised too often, or no worker was left; see :meth:`JobHandle.wait`.
            RowsLost: rows were lost with a task or worker that failed, and ``allow_loss`` is not set.
            TimeoutError: ``timeout`` seconds passed.
        """
        from minishuffle.api.stream import Stream, Table

        if isinstance(stream, Table | Stream) and not stream.plan.node.is_sink:
            stream = stream.collect()
        if isinstance(stream, Table):
            _check_one_table(stream)
        handle = self.submit(stream, parallelism=parallelism, settings=settings)
        try:
            result = handle.wait(timeout, allow_loss=allow_loss)
            return _one_table(result) if isinstance(stream, Table) else result.rows
        except BaseException as error:
            # Any other Exception means that the job has ended or its cluster is gone. After Ctrl-C, or what a
            # handler of SIGTERM raises, nobody waits any more.
            if isinstance(error, TimeoutError) or not isinstance(error, Exception):
                with contextlib.suppress(UsageError):  # It ended just now.
                    handle.cancel()
            raise

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
        """Start a job; see :meth:`Client.submit`."""
        return self.client.submit(
            stream,
            name=name,
            parallelism=parallelism,
            settings=settings,
            restore_from=restore_from,
            drop_state=drop_state,
            trust_snapshot=trust_snapshot,
        )

    def status(self) -> ClusterStatus:
        """Workers with their connections, and jobs."""
        return self.client.status()

    def kill_worker(self, worker: int, signal: int = signals.SIGKILL) -> None:
        """Send a signal to a worker's process.

        Raises:
            UnknownName: there is no such worker.
        """
        workers = self._running().workers
        if worker not in workers:
            raise UnknownName(f"there is no worker {worker}; the workers are {sorted(workers)}")
        workers[worker].send_signal(signal)

    def kill_coordinator(self) -> None:
        """Send SIGKILL to the coordinator's process, and wait for its end."""
        process = self._running().coordinator.process
        process.kill()
        process.wait()

    def _running(self) -> LocalProcesses:
        if self._processes is None:
            raise UsageError(NOT_RUNNING)
        return self._processes

    def _stop(self, *, ask: bool) -> None:
        """Stop every process and remove the state directory; kills at once when interrupted."""
        supervisor, self._supervisor = self._supervisor, None
        processes, self._processes = self._processes, None
        client, self._client = self._client, None
        grace = STOP_GRACE_SECONDS
        try:
            if supervisor is not None:
                supervisor.stop()
            if client is not None and processes is not None:
                if ask:
                    try:
                        client.stop_cluster()
                    except ShuffleError:
                        # It is being stopped by process id in any case; only the orderly end was missed.
                        if processes.coordinator.process.poll() is None:
                            grace = 2.0
                client.close()
            if processes is not None:
                stop_children(processes.children, grace)
        except BaseException:
            if processes is not None:
                stop_children(processes.children, 0.0)
            raise
        finally:
            if self._state_dir is not None:
                _remove_state(self._state_dir)
                os.close(self._state_lock)
                self._state_dir = None

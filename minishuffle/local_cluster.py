"""A whole cluster for the length of a ``with`` block: real processes on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal as signals
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minishuffle.client import Client, JobHandle
from minishuffle.config import create_secret
from minishuffle.errors import ShuffleError, UnknownName, UsageError
from minishuffle.launch import LocalProcesses, checked_settings, start_processes, stop_children
from minishuffle.wire.messages import ClusterStatus

if TYPE_CHECKING:
    from minishuffle.dataflow.graph import JobSettings
    from minishuffle.dataflow.stream import Stream

__all__ = ["LocalCluster"]

STOP_GRACE_SECONDS = 15.0


class LocalCluster:
    """One coordinator and ``workers`` worker processes with ``slots`` slots each, on loopback.

    Entering it starts them and waits until all are registered; leaving it stops them and removes
    their state directory. The processes end with this one even if it is killed. Further keywords are
    fields of :class:`~minishuffle.config.ClusterSettings`, e.g. ``segment_bytes=4096``.

    Raises (on entry):
        UsageError: a number or a setting does not fit.
        ShuffleError: a process ended at its start; the text has the end of its log.
        ResourceExhausted: not all processes were ready within ``startup_timeout`` seconds.
    """

    def __init__(
        self, workers: int = 2, slots: int = 2, *, startup_timeout: float = 60.0, **settings: Any
    ) -> None:
        if workers < 1:
            raise UsageError(f"a cluster needs at least one worker, not {workers}")
        self._count = workers
        self._settings = checked_settings(slots=slots, **settings)
        self._startup_timeout = startup_timeout
        self._state_dir: Path | None = None
        self._processes: LocalProcesses | None = None
        self._client: Client | None = None
        self._secret = b""

    def __enter__(self) -> LocalCluster:
        self._start(self._count, "127.0.0.1")
        return self

    def _start(self, workers: int, host: str) -> None:
        if self._processes is not None:
            raise UsageError("this cluster is running already")
        state_dir = Path(tempfile.mkdtemp(prefix="minishuffle-"))  # mode 0700
        self._state_dir = state_dir
        try:
            secret_file = state_dir / "secret"
            self._secret = create_secret(secret_file)
            self._processes = start_processes(
                cluster="local",
                state_dir=state_dir,
                secret_file=secret_file,
                workers=workers,
                settings=self._settings,
                host=host,
                timeout=self._startup_timeout,
            )
            self._client = Client(self._processes.address, self._secret, cluster="local")
        except BaseException:
            self._stop(ask=False)
            raise

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
            raise UsageError("this LocalCluster is not running: use it in a 'with' statement")
        return self._client

    @property
    def state_dir(self) -> Path:
        """Where the processes log; removed at the end."""
        if self._state_dir is None:
            raise UsageError("this LocalCluster is not running: use it in a 'with' statement")
        return self._state_dir

    @property
    def workers(self) -> dict[int, int]:
        """Worker id -> process id, of the workers that this object started."""
        return {worker: child.pid for worker, child in self._running().workers.items()}

    @property
    def web_port(self) -> int:
        """Port of the coordinator's web server (``/metrics``, ``/sd/prometheus``)."""
        return self._running().web_port

    def run(
        self,
        stream: Stream,
        *,
        parallelism: int | None = None,
        timeout: float | None = None,
        settings: JobSettings | None = None,
    ) -> list[Any]:
        """Run a job to its end and give the rows of its ``collect`` sink, in no particular order.

        The job is cancelled when ``timeout`` seconds pass or the wait is interrupted.

        Raises:
            TaskFailed: a function raised or a process died; see :meth:`JobHandle.wait`.
            TimeoutError: ``timeout`` seconds passed.
        """
        handle = self.submit(stream, parallelism=parallelism, settings=settings)
        try:
            return handle.wait(timeout).rows
        except BaseException as error:
            # Another Exception says that the job is over or its cluster gone; what is none, be it Ctrl-C or
            # of a handler of SIGTERM, that nobody waits any more.
            if isinstance(error, TimeoutError) or not isinstance(error, Exception):
                with contextlib.suppress(UsageError):  # It ended just now.
                    handle.cancel()
            raise

    def submit(
        self,
        stream: Stream,
        *,
        name: str = "job",
        parallelism: int | None = None,
        settings: JobSettings | None = None,
    ) -> JobHandle:
        """Start a job; see :meth:`Client.submit`."""
        return self.client.submit(stream, name=name, parallelism=parallelism, settings=settings)

    def status(self) -> ClusterStatus:
        """Workers with their connections, and jobs."""
        return self.client.status()

    def kill_worker(self, worker: int, signal: int = signals.SIGKILL) -> None:
        """Send a signal to a worker's process.

        Raises:
            UnknownName: there is no such worker.
        """
        workers = self.workers
        if worker not in workers:
            raise UnknownName(f"there is no worker {worker}; the workers are {sorted(workers)}")
        os.kill(workers[worker], signal)

    def _running(self) -> LocalProcesses:
        if self._processes is None:
            raise UsageError("this LocalCluster is not running: use it in a 'with' statement")
        return self._processes

    def _stop(self, *, ask: bool) -> None:
        """Stop every process and remove the state directory; kills at once when interrupted."""
        processes, self._processes = self._processes, None
        client, self._client = self._client, None
        grace = STOP_GRACE_SECONDS
        try:
            if client is not None and processes is not None:
                if ask and all(child.process.poll() is None for child in processes.children):
                    try:
                        client.stop_cluster()
                    except ShuffleError:
                        # It is being stopped by process id in any case; only the farewell was missed.
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
                shutil.rmtree(self._state_dir, ignore_errors=True)
                self._state_dir = None

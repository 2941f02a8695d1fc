"""A whole cluster for the length of a ``with`` block: real processes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import signal as signals
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from pydantic import ValidationError

from minishuffle.client import Client, JobHandle
from minishuffle.config import ClusterSettings, create_secret, load_settings
from minishuffle.errors import ResourceExhausted, ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.replacements import Replacements
from minishuffle.wire.requests import ClusterStatus

if TYPE_CHECKING:
    from minishuffle.dataflow.graph import JobSettings
    from minishuffle.dataflow.stream import Stream

__all__ = [
    "Child",
    "DETACH",
    "LocalCluster",
    "LocalProcesses",
    "WorkerReplacer",
    "checked_settings",
    "remove_abandoned_state",
    "settings_flags",
    "signals_later",
    "spawn",
    "start_processes",
    "stop_children",
    "wait_until_ready",
]


# --- launch ---------------------------------------------------------------------------------------
#
# Coordinator and workers as child processes of this one, on this machine.
#
# Every child writes its standard output and error to files in the state directory (a pipe that
# nobody reads would block user code that prints), and its first line of output is one JSON object
# that says where it listens. A child holds the read end of a pipe from its parent as standard input
# and stops when that pipe reaches its end, so that it never outlives the parent, however the parent
# dies, unless the parent has written DETACH into it.


_log = logging.getLogger("minishuffle.local")
DETACH = b"detach\n"
"""What a parent tells its children by when they may outlive it."""
POLL_SECONDS = 0.02
LOG_TAIL_LINES = 20


@dataclass(slots=True)
class Child:
    """One process that this one started. ``out`` and ``log`` are its standard output and error."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)
    """What its ready line said."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def detach(self) -> None:
        """Let the process outlive this one."""
        assert self.process.stdin is not None
        self.process.stdin.write(DETACH)
        self.process.stdin.flush()

    def tail(self) -> str:
        """The last lines that the process wrote to its standard error."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


class Machines(Protocol):
    """Where the processes of a cluster run, if not all on this machine: worker n on number n, and the
    coordinator on number 0."""

    def address(self, number: int) -> str:
        """Where processes there listen."""
        ...

    def command(self, number: int) -> list[str]:
        """What stands in front of a command that is to run there."""
        ...


@dataclass(slots=True)
class WorkerLaunch:
    """How worker processes of one cluster are started."""

    state_dir: Path
    before: Sequence[str]
    """Arguments in front of the command."""
    after: Sequence[str]
    """Arguments behind it."""
    host: str
    machines: Machines | None
    """Each worker is on ``host``, or on a machine of its own."""
    processors: Mapping[int, int]
    """By worker, of those that stay on one."""
    started: Counter[int] = field(default_factory=Counter)
    """Processes so far, by worker; each has files of its own."""

    def start(self, worker: int, standby: bool) -> Child:
        """Start a process for that worker id.

        Raises:
            UsageError: its output cannot be kept in the state directory.
            OSError: there cannot be another process.
        """
        host = self.machines.address(worker) if self.machines else self.host
        arguments = [*self.before, "worker", "start", "--id", str(worker), "--host", host, *self.after]
        if worker in self.processors:
            arguments += ["--processor", str(self.processors[worker])]
        if standby:
            arguments.append("--standby")
        self.started[worker] += 1
        number = self.started[worker]
        name = f"worker-{worker}" if number == 1 else f"worker-{worker}-{number}"
        return spawn(name, arguments, self.state_dir, self.machines.command(worker) if self.machines else [])


@dataclass(slots=True)
class LocalProcesses:
    """A coordinator and its workers, all of them ready."""

    address: Address
    web_port: int
    coordinator: Child
    workers: dict[int, Child]
    """By worker id, from 1; the last process of each."""
    launch: WorkerLaunch

    @property
    def children(self) -> list[Child]:
        return [*self.workers.values(), self.coordinator]


def checked_settings(toml: Path | None = None, **flags: Any) -> ClusterSettings:
    """Settings from all layers, with errors in one sentence.

    Raises:
        UnknownName: what a flag, the TOML file or the environment names is not a setting, or the file
            does not exist.
        UsageError: a value does not fit, or the file is not TOML.
    """
    for name in flags:
        if name not in ClusterSettings.model_fields:
            known = ", ".join(sorted(ClusterSettings.model_fields))
            raise UnknownName(f"there is no setting {name!r}; the settings are {known}")
    try:
        return load_settings(toml, **flags)
    except FileNotFoundError as error:
        raise UnknownName(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {problem} (got {first['input']!r})" if where else problem
        raise UsageError(f"setting {text}") from None


def settings_flags(settings: ClusterSettings) -> list[str]:
    """All settings as flags, so that child processes see the same whatever their environment."""
    flags: list[str] = []
    for name in ClusterSettings.model_fields:
        value, flag = getattr(settings, name), name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


@contextmanager
def signals_later() -> Iterator[None]:
    """Hold back signals that would break the start of a process off: it would run on, unknown to anybody.

    They come at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def spawn(name: str, arguments: Sequence[str], state_dir: Path, front: Sequence[str] = ()) -> Child:
    """Start ``python -m minishuffle.cli`` with ``arguments``, behind ``front``, in a session of its own.

    Of its own so that Ctrl-C in the terminal reaches the parent alone, which then stops its children
    in order.

    Raises:
        UsageError: its output cannot be kept in ``state_dir``.
    """
    out, log = state_dir / f"{name}.out", state_dir / f"{name}.log"
    command = [*front, sys.executable, "-m", "minishuffle.cli", *arguments, "--exit-with-parent"]
    with _output(out) as stdout, _output(log) as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            # Modules that functions refer to by name are found where this process finds them.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    return Child(name, process, out, log)


def _output(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name another state directory with --state-dir"
        ) from error


def wait_until_ready(child: Child, deadline: float) -> dict[str, Any]:
    """Wait for the ready line of a child; ``deadline`` is of ``time.monotonic()``.

    Raises:
        ShuffleError: the process ended first; the text ends with what it wrote to standard error.
        ResourceExhausted: the deadline passed.
    """
    while True:
        ended = child.process.poll()
        first, newline, _ = child.out.read_bytes().partition(b"\n")
        if newline:
            child.ready = json.loads(first)
            return child.ready
        if ended is not None:
            raise ShuffleError(f"{child.name} ended with code {ended} before it was ready\n{child.tail()}")
        if time.monotonic() > deadline:
            raise ResourceExhausted(
                f"{child.name} (pid {child.pid}) was not ready in time; give it more time or look at "
                f"{child.log}\n{child.tail()}"
            )
        time.sleep(POLL_SECONDS)


def stop_children(children: Sequence[Child], grace_seconds: float) -> None:
    """End every child that still runs: by the end of its standard input, then TERM, then KILL; at most
    ~2 graces."""
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()
    _wait_all(children, grace_seconds)
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    _wait_all(children, min(grace_seconds, 2.0))
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()


def _wait_all(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _pins(workers: int, processors: Sequence[int]) -> list[int | None]:
    """The processor of each worker; None for one that the kernel may move.

    The threads of a worker share the interpreter's lock. When it passes to a thread on another processor,
    that one has to be woken up, which takes longer than a small batch does. So each worker stays on one, if
    all processors have equally many workers.
    """
    if workers % len(processors):
        return [None] * workers
    return [processors[number % len(processors)] for number in range(workers)]


def start_processes(
    *,
    cluster: str,
    state_dir: Path,
    secret_file: Path,
    workers: int,
    standby: int = 0,
    settings: ClusterSettings,
    host: str = "127.0.0.1",
    machines: Machines | None = None,
    port: int = 0,
    web_port: int = 0,
    timeout: float = 60.0,
) -> LocalProcesses:
    """Start one coordinator, ``workers`` workers (ids 1, 2, …) and after them ``standby`` workers on standby,
    and wait until all are registered.

    Port 0 takes a free one; ``pin_workers`` of the settings gives processors as :func:`_pins` says. When
    anything goes wrong, whatever was started is stopped before the error is raised.
    """
    flags = settings_flags(settings)
    deadline = time.monotonic() + timeout
    common = ["--cluster", cluster, "--state-dir", str(state_dir), "--secret-file", str(secret_file)]
    listen = ["--host", host, "--port", str(port), "--web-port", str(web_port)]
    started: list[Child] = []
    try:
        arguments = [*common, "coordinator", "start", *listen, *flags]
        with signals_later():
            coordinator = spawn("coordinator", arguments, state_dir, machines.command(0) if machines else [])
            started.append(coordinator)
        where = wait_until_ready(coordinator, deadline)
        address = Address(host, int(where["port"]))
        by_id: dict[int, Child] = {}
        pins = _pins(workers, sorted(os.sched_getaffinity(0))) if settings.pin_workers else []
        pinned = {worker: processor for worker, processor in enumerate(pins, 1) if processor is not None}
        before = [*common, "--coordinator", str(address)]
        launch = WorkerLaunch(state_dir, before, flags, host, machines, pinned)
        for worker in range(1, workers + standby + 1):
            with signals_later():
                by_id[worker] = launch.start(worker, worker > workers)
                started.append(by_id[worker])
        for child in by_id.values():
            wait_until_ready(child, deadline)
    except BaseException:
        stop_children(started, grace_seconds=2.0)
        raise
    return LocalProcesses(address, int(where["web_port"]), coordinator, by_id, launch)


REPLACE_POLL_SECONDS = 0.1
"""Between two looks at worker processes."""
REPLACE_POLL_SECONDS_LOST = 0.02
"""The same while a lost one has no replacement."""


class WorkerReplacer:
    """Starts a process in place of each worker process that is lost: see :class:`Replacements`.

    One that ends in order, after SIGTERM for one, is not replaced. Either somebody calls :meth:`check` again
    and again, or :meth:`start` has a thread do so.

    Args:
        standby: how many standby workers there are to be.
        client: a connection that nobody else uses meanwhile; closed by :meth:`stop`.
    """

    def __init__(self, processes: LocalProcesses, standby: int, client: Client) -> None:
        self._processes = processes
        self._client = client
        self._replacements = Replacements(list(processes.workers), standby)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker replacer", daemon=True)
        self._ended: dict[int, Child] = {}
        """By worker id, the last process that was seen to have ended."""

    def start(self) -> None:
        """Have a thread look until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Start no more processes; those that were started run on."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        pending = False
        while not self._stopping.wait(REPLACE_POLL_SECONDS_LOST if pending else REPLACE_POLL_SECONDS):
            with contextlib.suppress(ShuffleError):  # It does not answer, and is asked again.
                self.check()
            pending = self._replacements.pending

    def check(self) -> dict[int, Child]:
        """Start what is due; gives the new processes by worker id.

        Raises:
            ShuffleError: the coordinator does not answer, or refuses.
        """
        now = time.monotonic()
        for worker, child in self._processes.workers.items():
            code = child.process.poll()
            if code is None or self._ended.get(worker) is child:
                continue
            self._ended[worker] = child
            if code:
                self._replacements.lost(worker, now)
        if not self._replacements.pending or self._processes.coordinator.process.poll() is not None:
            return {}
        new: dict[int, Child] = {}
        for worker, standby in self._replacements.due(self._client.status(), now):
            old = self._processes.workers[worker]
            if self._stopping.is_set():
                break
            try:
                with signals_later():
                    new[worker] = self._processes.launch.start(worker, standby)
                    self._processes.workers[worker] = new[worker]
            except (OSError, UsageError) as error:
                _log.warning(
                    "no process can be started in place of %s (pid %d): %s", old.name, old.pid, error
                )
                self._replacements.lost(worker, now)
                continue
            if old.process.stdin is not None:
                old.process.stdin.close()
        return new


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

STOP_GRACE_SECONDS = 15.0


class LocalCluster:
    """One coordinator and ``workers`` worker processes with ``slots`` slots each, on loopback.

    ``standby`` more workers wait, with everything loaded, for the slots of a lost one. For each worker
    process that is lost a new one is started, unless ``restart_workers`` is false: as a standby worker if
    there are too few, and else as a regular one.

    Entering it starts them and waits until all are registered; leaving it stops them and removes
    their state directory. The processes end with this one even if it is killed, and the next cluster
    removes the directory then. Further keywords are fields of
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
        startup_timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        if workers < 1:
            raise UsageError(f"a cluster needs at least one worker, not {workers}")
        if standby < 0:
            raise UsageError(f"a cluster has no or some workers on standby, not {standby}")
        self._standby = standby
        self._restart_workers = restart_workers
        self._replacer: WorkerReplacer | None = None
        self._count = workers
        self._settings = checked_settings(slots=slots, **settings)
        self._startup_timeout = startup_timeout
        self._state_dir: Path | None = None
        self._state_lock = -1
        self._processes: LocalProcesses | None = None
        self._client: Client | None = None
        self._secret = b""

    def __enter__(self) -> LocalCluster:
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
            self._client = Client(self._processes.address, self._secret, cluster="local")
            if self._restart_workers:
                own = Client(self._processes.address, self._secret, cluster="local")
                self._replacer = WorkerReplacer(self._processes, self._standby, own)
                self._replacer.start()
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
        """Worker id -> process id, of the last process that this object started for each worker."""
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
        allow_loss: bool = False,
    ) -> list[Any]:
        """Run a job to its end and give the rows of its ``collect`` sink, in no particular order.

        The job is cancelled when ``timeout`` seconds pass or the wait is interrupted.

        Raises:
            TaskFailed: a function raised too often, or no worker was left; see :meth:`JobHandle.wait`.
            RowsLost: rows were lost with a task or worker that failed, and ``allow_loss`` is not set.
            TimeoutError: ``timeout`` seconds passed.
        """
        handle = self.submit(stream, parallelism=parallelism, settings=settings)
        try:
            return handle.wait(timeout, allow_loss=allow_loss).rows
        except BaseException as error:
            # Any other Exception means that the job has ended or its cluster is gone. After Ctrl-C, or what a
            # handler of SIGTERM raises, nobody waits any more.
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
        workers = self._running().workers
        if worker not in workers:
            raise UnknownName(f"there is no worker {worker}; the workers are {sorted(workers)}")
        workers[worker].process.send_signal(signal)

    def _running(self) -> LocalProcesses:
        if self._processes is None:
            raise UsageError("this LocalCluster is not running: use it in a 'with' statement")
        return self._processes

    def _stop(self, *, ask: bool) -> None:
        """Stop every process and remove the state directory; kills at once when interrupted."""
        replacer, self._replacer = self._replacer, None
        processes, self._processes = self._processes, None
        client, self._client = self._client, None
        grace = STOP_GRACE_SECONDS
        try:
            if replacer is not None:
                replacer.stop()
            if client is not None and processes is not None:
                if ask and all(child.process.poll() is None for child in processes.children):
                    try:
                        client.stop_cluster()
                    except ShuffleError:
                        # It is being stopped by process id in any case; only the orderly end was missed.
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

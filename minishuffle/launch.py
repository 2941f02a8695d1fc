"""Coordinator and workers as child processes of this one, on this machine.

Every child writes its standard output and error to files in the state directory (a pipe that nobody reads
would block user code that prints), and its first line of output is one JSON object that says where it
listens. A child holds the read end of a pipe from its parent as standard input and stops when that pipe
reaches its end, so that it never outlives the parent, however the parent dies, unless the parent has written
DETACH into it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, BinaryIO, Protocol

from pydantic import ValidationError

from minishuffle.config import HASH_SEED, ClusterSettings, hash_seed, load_settings, read_secret
from minishuffle.errors import PeerLost, ResourceExhausted, ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.postmortem import Observation, observed

__all__ = [
    "Child",
    "DETACH",
    "LocalProcesses",
    "Machines",
    "OUTLIVED",
    "ProcessDescriptor",
    "checked_settings",
    "line_object",
    "settings_flags",
    "signals_later",
    "spawn",
    "start_processes",
    "stop_children",
    "wait_until_ready",
]

DETACH = b"detach\n"
"""Written by a parent whose children may outlive it."""
POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
"""For a process to end by SIGKILL."""
LOG_TAIL_LINES = 20
OUTLIVED = "does not end by SIGKILL: a disk or a device that it uses does not answer"
_log = logging.getLogger("minishuffle.local")


class ProcessDescriptor:
    """Refers to a child process itself (``pidfd_open(2)``), whose number is another's some time after its
    end."""

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process
        try:
            self._number = os.pidfd_open(process.pid)
        except OSError:  # A sandbox refuses it, or the limit of descriptors does.
            self._number = -1

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self._number < 0:
            self._process.send_signal(number)  # It looks first whether the process has ended.
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._number, number)

    def close(self) -> None:
        """Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


@dataclass(slots=True)
class Child:
    """A child process. ``out`` and ``log`` are its standard output and error."""

    name: str
    process: Popen[bytes]
    out: Path
    log: Path
    ready: dict[str, Any] | None = None
    """Contents of its ready line; None before it was read."""
    observation: Observation = field(default_factory=lambda: Observation(None))
    """The observation of its end, if it is a worker."""
    _descriptor: ProcessDescriptor = field(init=False)

    def __post_init__(self) -> None:
        self._descriptor = ProcessDescriptor(self.process)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def own_pid(self) -> int:
        """The process id under which it registers: its command may have a prefix that started it as another
        process."""
        ready = self.read_ready()
        return self.pid if ready is None else int(ready["pid"])

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._descriptor.send_signal(number)

    def close(self) -> None:
        """Let go of it, which ends it if it runs; may be called again."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.observation.close()
        self._descriptor.close()

    def read_ready(self) -> dict[str, Any] | None:
        """The value of :attr:`ready` now: the first line that is an object. Code that runs at Python's start,
        such as ``sitecustomize``, may have printed other lines."""
        if self.ready is None and self.out.exists():
            *lines, _ = self.out.read_bytes().split(b"\n")
            found = map(line_object, lines)
            self.ready = next((each for each in found if each is not None), None)
        return self.ready

    def detach(self) -> None:
        """Let the process outlive this one.

        Raises:
            PeerLost: it has ended.
        """
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), DETACH)  # No buffer, which close() would have to write out.
        except BrokenPipeError:
            text = f"{self.name} (pid {self.pid}) has ended already; look at {self.log}\n{self.tail()}"
            raise PeerLost(text.rstrip()) from None

    def tail(self) -> str:
        """The last lines that the process wrote to its standard error, or why there may be none."""
        if not self.log.parent.exists():
            return f"its output is not there any more: {self.log.parent} was removed"
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = text.splitlines()[-LOG_TAIL_LINES:]
        if not _has_room(self.log.parent):
            lines.append(f"there is no room left in {self.log.parent}, where its output goes: make some")
        return "\n".join(lines)


def line_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, if it is one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _has_room(directory: Path) -> bool:
    return os.statvfs(directory).f_bavail > 0


class Machines(Protocol):
    """Where the processes of a cluster run, if not all on this machine: worker n on number n, and the
    coordinator on number 0."""

    def address(self, number: int) -> str:
        """Where processes there listen."""
        ...

    def command(self, number: int) -> list[str]:
        """The prefix of a command that runs there."""
        ...


@dataclass(slots=True)
class CoordinatorLaunch:
    """How the coordinator of one cluster is started, any number of times."""

    state_dir: Path
    before: Sequence[str]
    """Arguments before the command."""
    after: Sequence[str]
    """Arguments after it."""
    front: Sequence[str]
    """In front of all of that."""
    started: int = 0
    """Processes so far; each has files of its own."""

    def start(self, port: int, web_port: int) -> Child:
        """Start a process, before the workers; port 0 takes a free one. A second one goes on for the first,
        which has ended.

        Raises:
            UsageError: its output cannot be kept in the state directory.
            OSError: there cannot be another process.
        """
        ports = ["--port", str(port), "--web-port", str(web_port)]
        arguments = [*self.before, "coordinator", "start", *ports, *self.after]
        arguments.append("--take-over" if self.started else "--workers-anew")
        self.started += 1
        name = "coordinator" if self.started == 1 else f"coordinator-{self.started}"
        return spawn(name, arguments, self.state_dir, self.front)


@dataclass(slots=True)
class WorkerLaunch:
    """How worker processes of one cluster are started."""

    state_dir: Path
    before: Sequence[str]
    """Arguments before the command."""
    after: Sequence[str]
    """Arguments after it."""
    host: str
    machines: Machines | None
    """Each worker is on ``host``, or on a machine of its own."""
    processors: Mapping[int, int]
    """Processor by worker, for workers that stay on one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that they have besides those of this process."""
    started: Counter[int] = field(default_factory=Counter)
    """Processes so far, by worker; each has files of its own."""

    def start(self, worker: int, coordinator: Address, *, standby: bool = False) -> Child:
        """Start a process for that worker id, which registers there, with ``standby`` as a standby worker.

        Raises:
            UsageError: its output cannot be kept in the state directory.
            OSError: there cannot be another process.
        """
        host = self.machines.address(worker) if self.machines else self.host
        arguments = [*self.before, "--coordinator", str(coordinator), "worker", "start"]
        arguments += ["--id", str(worker), "--host", host, *self.after]
        if worker in self.processors:
            arguments += ["--processor", str(self.processors[worker])]
        if standby:
            arguments.append("--standby")
        self.started[worker] += 1
        number = self.started[worker]
        name = f"worker-{worker}" if number == 1 else f"worker-{worker}-{number}"
        front = self.machines.command(worker) if self.machines else []
        with observed() as (observation, more, descriptors):
            child = spawn(
                name,
                [*arguments, *more],
                self.state_dir,
                front,
                descriptors,
                environment=self.environment,
            )
        observation.began(child.pid)
        child.observation = observation
        return child


@dataclass(slots=True)
class LocalProcesses:
    """A coordinator and its workers, all of them ready."""

    address: Address
    web_port: int
    coordinator: Child
    """The last process of it."""
    workers: dict[int, Child]
    """By worker id, from 1; the last process of each."""
    launch: WorkerLaunch
    coordinator_launch: CoordinatorLaunch
    hung: list[Child] = field(default_factory=list)
    """Workers that hang and are being ended."""

    @property
    def children(self) -> list[Child]:
        workers = list(self.workers.values())
        return [*workers, *(child for child in self.hung if child not in workers), self.coordinator]

    def kill_hung(self) -> None:
        """Wait no longer for them to end in order."""
        for child in self.hung:
            child.send_signal(signal.SIGKILL)


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


def spawn(
    name: str,
    arguments: Sequence[str],
    state_dir: Path,
    front: Sequence[str] = (),
    descriptors: Sequence[int] = (),
    *,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start ``python -m minishuffle.cli`` with ``arguments``, behind ``front``, in a session of its own; it
    inherits ``descriptors``, and has these variables in its ``environment`` beside those of this process.

    Of its own so that Ctrl-C in the terminal reaches the parent alone, which then stops its children
    in order.

    Raises:
        UsageError: its output cannot be kept in ``state_dir``.
    """
    out, log = state_dir / f"{name}.out", state_dir / f"{name}.log"
    command = [*front, sys.executable, "-m", "minishuffle.cli", *arguments, "--exit-with-parent"]
    # Modules that functions refer to by name are found where this process finds them.
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    with _output(out) as stdout, _output(log) as stderr:
        process = Popen(
            command,
            stdin=PIPE,
            stdout=stdout,
            stderr=stderr,
            env=variables,
            start_new_session=True,
            pass_fds=descriptors,
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
        if (ready := child.read_ready()) is not None:
            return ready
        if ended is not None:
            raise ShuffleError(f"{child.name} ended with code {ended} before it was ready\n{child.tail()}")
        if time.monotonic() > deadline:
            tail = child.tail()
            raise ResourceExhausted(
                f"{child.name} (pid {child.pid}) was not ready in time: see how busy this machine is, and "
                "try again, or start it from a program, LocalCluster(startup_timeout=...); it has written "
                + (f"\n{tail}" if tail else "nothing")
            )
        time.sleep(POLL_SECONDS)


def stop_children(children: Sequence[Child], grace_seconds: float) -> None:
    """End every child that still runs: by the end of its standard input, then TERM, then KILL; at most
    ~2 graces. One that does not end even so, as its system call cannot be interrupted, is left and named."""
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()
    _wait_all(children, grace_seconds)
    for child in children:
        if child.process.poll() is None:
            child.send_signal(signal.SIGTERM)
    _wait_all(children, min(grace_seconds, 2.0))
    for child in children:
        if child.process.poll() is None:
            child.send_signal(signal.SIGKILL)
    for child in children:
        try:
            child.process.wait(KILL_SECONDS)
        except TimeoutExpired:
            _log.warning("%s (pid %d) %s", child.name, child.pid, OUTLIVED)
        child.close()


def _wait_all(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _pins(workers: int, processors: Sequence[int]) -> list[int | None]:
    """The processor of each worker; None: the kernel may move it.

    The threads of a worker share the interpreter's lock. Passing the lock to a thread on another processor
    wakes that processor up, which takes longer than a small batch does. So each worker stays on one
    processor, if all processors have equally many workers.
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
    front = machines.command(0) if machines else []
    coordinators = CoordinatorLaunch(state_dir, common, ["--host", host, *flags], front)
    started: list[Child] = []
    try:
        with signals_later():
            coordinator = coordinators.start(port, web_port)
            started.append(coordinator)
        where = wait_until_ready(coordinator, deadline)
        address = Address(host, int(where["port"]))
        by_id: dict[int, Child] = {}
        pins = _pins(workers, sorted(os.sched_getaffinity(0))) if settings.pin_workers else []
        pinned = {worker: processor for worker, processor in enumerate(pins, 1) if processor is not None}
        hashes = {HASH_SEED: hash_seed(read_secret(secret_file))}
        launch = WorkerLaunch(state_dir, common, flags, host, machines, pinned, hashes)
        for worker in range(1, workers + standby + 1):
            with signals_later():
                by_id[worker] = launch.start(worker, address, standby=worker > workers)
                started.append(by_id[worker])
        for child in by_id.values():
            wait_until_ready(child, deadline)
    except BaseException:
        stop_children(started, grace_seconds=2.0)
        raise
    return LocalProcesses(address, int(where["web_port"]), coordinator, by_id, launch, coordinators)

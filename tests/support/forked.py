"""Processes of clusters that are forked from one which has imported everything.

A test run starts hundreds of coordinators and workers, and each takes 0.3 to 0.45 s of processor time for
its imports, and each worker 0.25 s for what its tasks import: a quarter of the whole. These begin where the
imports have ended, and end before their modules are taken apart. In all else they are processes as ``spawn``
starts them: a session, standard streams, environment and memory of their own. Those that the
command line starts (``cluster up``, ``demo``, programs of users) import for themselves.

This file is also the program that imports and forks. All processes that share the tests of a run have what
one of them has started: it forks a template for each, which forks what that one asks for. Workers of even and
of odd ids come from two programs, which hash texts in two ways: nothing but functions of users goes by how
Python hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

HASH_SEED = "PYTHONHASHSEED"
REQUEST_BYTES_MAX = 1 << 20
START_SECONDS_MAX = 60.0
DESCRIPTORS_MAX = 8
"""Three streams, those that a process inherits besides, and where its exit code goes."""
POLL_SECONDS = 0.02
SHARED_SECONDS = 1.0
"""How often is looked whether there are templates left, without which a program ends."""
FREE = (
    *("MINISHUFFLE_", "PYTEST_", "PYSPARK_", "SPARK_"),
    # Sessions of Spark set the first, polars the second, and tests the others.
    *("JAVA_HOME", "_RJEM_MALLOC_CONF", "TMPDIR", "XDG_STATE_HOME"),
    # Those of a template are its own.
    HASH_SEED,
)
"""How variables begin that no import looks at: a process may have other values than its template."""

ON_HOST = ["ip", "netns", "exec"]
"""How a command begins that is to run on a host of ``minishuffle.bench.hosts``; the name of that follows."""
HOSTS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
"""Of ``setns(2)``, which Python has from 3.12 on."""

JEMALLOC = "jemalloc_bg_thd"
"""A thread that comes with pyarrow; jemalloc starts another one in what is forked."""


# --- the program ----------------------------------------------------------------------------------


def share(listening: socket.socket) -> socket.socket:
    """Fork a template for each test process that connects; returns in these alone, with the connection, and
    ends with the last of them."""
    templates: set[int] = set()
    while True:
        if select.select([listening], [], [], SHARED_SECONDS if templates else None)[0]:
            connection, _ = listening.accept()
            wait_for_own_threads()
            if (pid := os.fork()) == 0:
                listening.close()
                connection.send(str(os.getpid()).encode())
                return connection
            templates.add(pid)
            connection.close()
        elif (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            templates.discard(ended)
            if not templates:
                os._exit(0)


def serve(connection: socket.socket) -> None:
    """Fork a process for each request; returns in these alone, and ends when nobody asks any more."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([connection, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            report_ended(running)
        if connection in readable:
            text, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
            if not text:
                os._exit(0)
            *inherited, status = descriptors
            wait_for_own_threads()
            if (pid := os.fork()) == 0:
                become(json.loads(text), inherited)
                return
            running[pid] = status
            for descriptor in inherited:
                os.close(descriptor)
            connection.send(str(pid).encode())


def wait_for_own_threads() -> None:
    """A fork takes only the main thread along. One that has just begun has no name of its own so far."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not other_threads() <= {JEMALLOC}:
        assert time.monotonic() < deadline, f"there are other threads: {other_threads()}"
        select.select([], [], [], POLL_SECONDS)


def other_threads() -> set[str]:
    """The names of all threads but the main one."""
    tasks = [each for each in Path("/proc/self/task").iterdir() if each.name != str(os.getpid())]
    return {(each / "comm").read_text().strip() for each in tasks}


def report_ended(running: dict[int, int]) -> None:
    """Write the exit codes of those that have ended, in the way of ``subprocess``."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with open(running.pop(pid), "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(str(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Turn this process, just forked, into what was asked for; the first descriptors are its streams."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 200) for each in descriptors]  # Out of each other's way.
    os.closerange(0, min(high))
    os.closerange(max(high) + 1, 1024)
    for number, descriptor in zip([0, 1, 2, *request["inherits"]], high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    if request["host"]:
        join_host(request["host"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.path[0] = request["directory"]
    sys.argv[1:] = request["arguments"]


def join_host(name: str) -> None:
    """Be on that host: what this thread, the only one but jemalloc's, opens from now on is there."""
    with (HOSTS / name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot join host {name}")


def run() -> None:
    """The program: its arguments are what to import for, and the number of the socket on which test processes
    connect. It is nobody's child, as it ends with the last of them."""
    if os.fork():
        os._exit(0)
    _, kind, descriptor = sys.argv[1:]
    sys.path[0] = ""  # Not the folder of this file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # As the command line has it.
    from minishuffle.cli import entry

    with entry.importing():
        import uvloop  # noqa: F401

        import minishuffle.cli.main
        import minishuffle.cli.worker
        from minishuffle.wire import messages

        if kind == "coordinator":
            import minishuffle.coordinator.journal.lock
            import minishuffle.coordinator.process
            import minishuffle.web.rest
            import minishuffle.web.server
        else:
            # What tasks load. pyarrow loads pandas, where that is installed, for the first array it makes.
            import pandas  # noqa: F401
            import pyarrow.compute  # noqa: F401

            import minishuffle.connectors
            import minishuffle.kernels.machinecode as machinecode
            import minishuffle.operators
            import minishuffle.web.server
            import minishuffle.worker.service

            machinecode.load_kernels()
            for package in (minishuffle.connectors, minishuffle.operators):
                for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                    importlib.import_module(module.name)
        for each in messages.ControlMessage.by_type.values():
            each.model_rebuild()  # Else each process makes it for itself, at its first message of that type.
    serve(share(socket.socket(fileno=int(descriptor))))
    try:
        entry.main()
    except SystemExit as ended:
        _code.append(ended.code)
        raise


_code: list[Any] = []
"""With which a forked process ends, once it is known."""


def leave() -> None:
    """End at once, behind all else that is done at the end: to take every module apart copies each page that
    is shared with the template."""
    if _code and isinstance(_code[0], int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code[0])


# --- its client -----------------------------------------------------------------------------------


class Forked:
    """A process, with what its launcher uses of ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], pid: int, stdin: BinaryIO, status: int) -> None:
        self.args = args
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._status = status
        self._looking = threading.Lock()
        """The cluster's supervisor looks from a thread of its own."""

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)

    def poll(self) -> int | None:
        return self._look(0)

    def _look(self, seconds: float) -> int | None:
        with self._looking:
            if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
                code = os.read(self._status, 16)
                self.returncode = int(code) if code else -signal.SIGKILL  # Its template was killed first.
                os.close(self._status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._look(POLL_SECONDS)) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """A process that forks others, for one kind of them; started with the variables of the first."""

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        self._environment = bound(environment)
        self.pid = 0
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self.pid:  # Else the program was about to end with the last of its templates.
            assert time.monotonic() < deadline, f"no template for a {kind}"
            self.connection = connected(kind, environment)
            with contextlib.suppress(ConnectionError):
                self.pid = int(self.connection.recv(32) or 0)
            if not self.pid:
                self.connection.close()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables may come from it."""
        return bound(environment) == self._environment and not select.select([self.connection], [], [], 0)[0]

    def fork(self, command: Sequence[str], how: Mapping[str, Any], host: str) -> Forked:
        """``command`` is ``python -m minishuffle.cli`` and arguments; ``how`` is what ``Popen`` takes."""
        request = {
            "arguments": command[3:],
            "host": host,
            "environment": dict(how["env"]),
            "directory": os.getcwd(),
            "inherits": list(how["pass_fds"]),
        }
        stdin, feed = os.pipe()
        status, report = os.pipe()
        given = [stdin, how["stdout"].fileno(), how["stderr"].fileno(), *how["pass_fds"], report]
        socket.send_fds(self.connection, [json.dumps(request).encode()], given)
        os.close(stdin)
        os.close(report)
        return Forked(command, int(self.connection.recv(32)), open(feed, "wb"), status)


def connected(kind: str, environment: Mapping[str, str]) -> socket.socket:
    """A connection to the program for that kind, which is started if no test process of this run has done so
    with these variables. Its name is gone with it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    variables = hashlib.sha256(json.dumps(sorted(bound(environment).items())).encode()).hexdigest()[:16]
    name = f"\0minishuffle-tests-{run}-{kind}-{variables}"
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(START_SECONDS_MAX)
        try:
            connection.connect(name)
            return connection
        except ConnectionRefusedError:
            connection.close()
        assert time.monotonic() < deadline, f"nobody listens for a {kind}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # Another test process is about to listen.
            listening.listen()
            start(kind, listening, environment)


def start(kind: str, listening: socket.socket, environment: Mapping[str, str]) -> None:
    """Start the program for that kind."""
    # The third word is what ``worker kill`` and others know a process of ours by.
    command = [sys.executable, str(Path(__file__)), "minishuffle", kind, str(listening.fileno())]
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        env={name: value for name, value in environment.items() if name != HASH_SEED},
        start_new_session=True,
        check=True,
    )


def bound(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a template and what it forks have in common."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE)}


_templates: dict[str, Template] = {}


def started(command: Sequence[str], **how: Any) -> Forked | subprocess.Popen[bytes]:
    """What ``minishuffle.launch`` starts a process with, in place of ``subprocess.Popen``."""
    host, own = split(command)
    kind = kind_of(own)
    if kind is None:
        return subprocess.Popen(command, **how)
    if kind not in _templates:
        _templates[kind] = Template(kind, how["env"])
    if not _templates[kind].fits(how["env"]):
        return subprocess.Popen(command, **how)
    return _templates[kind].fork(own, how, host)


def split(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The name of the host that a command is for, empty for this one, and what is to run there."""
    if list(command[: len(ON_HOST)]) == ON_HOST:
        return command[len(ON_HOST)], command[len(ON_HOST) + 1 :]
    return "", command


def kind_of(command: Sequence[str]) -> str | None:
    """Which template forks what that command is; None: it stands behind another command, or is wrong."""
    if command[0] != sys.executable:
        return None
    if "coordinator" in command:
        return "coordinator"
    number = command[command.index("--id") + 1]
    if not number.isdecimal():
        return None
    return "odd worker" if int(number) % 2 else "even worker"


def template_processes() -> set[int]:
    return {each.pid for each in _templates.values()}


def template_descriptors() -> set[int]:
    return {each.connection.fileno() for each in _templates.values()}


def end_templates() -> None:
    """At the end of all tests."""
    for each in _templates.values():
        with each.connection, contextlib.suppress(OSError):
            each.connection.shutdown(socket.SHUT_WR)
            each.connection.recv(1)  # Its end.
    _templates.clear()


if __name__ == "__main__":
    atexit.register(leave)  # The last one to be called, as the first that is registered.
    run()

"""``minishuffle worker start|kill`` and ``minishuffle coordinator start``: the processes themselves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import click

from minishuffle.cli import doctor
from minishuffle.cli.completion import complete_worker
from minishuffle.cli.entry import importing
from minishuffle.cli.firstprocess import run_behind_init
from minishuffle.cli.ownprocesses import is_minishuffle
from minishuffle.cli.session import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    FiniteRange,
    Session,
    json_option,
    late_global_options,
    print_json,
    session_of,
    settings_from,
    settings_options,
)
from minishuffle.cli.systemd import Notifier
from minishuffle.cli.terminal import echo
from minishuffle.config import HASH_SEED, ClusterSettings, CoordinatorFinder, hash_seed, with_tls_files
from minishuffle.errors import UnknownName, UsageError
from minishuffle.launch import DETACH
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.messages import WORKER_NUMBER_MAX
from minishuffle.wire.requests import WorkerInfo

if TYPE_CHECKING:
    from minishuffle.worker.tasks.crashrecord import CrashRecord

__all__ = ["coordinator", "signal_worker", "worker"]

_log = logging.getLogger("minishuffle.cli")
ORPHAN_SECONDS = 20.0
PR_SET_PDEATHSIG = 1
"""``prctl(2)``: the signal that this process gets when the thread that started it ends."""
EXIT_INTERRUPTED = 130
PROCESSOR_MAX = 65_535
"""More than Linux numbers."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a process in order."""
DRAIN_LOOK_SECONDS = 0.2
"""Between two looks whether a worker has left."""
DRAIN_SECONDS_MAX = 1e9
SIGNALS = ("KILL", "TERM", "STOP", "CONT")

Ready = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Endings:
    """What a process is to end for; a signal is no order to end the cluster."""

    by_signal: asyncio.Event = field(default_factory=asyncio.Event)
    by_parent: asyncio.Event = field(default_factory=asyncio.Event)
    """Who started this process has ended, or wants an end of all that it has started; as does who types
    Ctrl-C where a worker runs."""
    any: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: asyncio.Event) -> None:
        event.set()
        self.any.set()


@click.group()
def worker() -> None:
    """Start a worker here, or send one a signal."""


@click.group()
def coordinator() -> None:
    """Start a coordinator here."""


def process_options(command: Any) -> Any:
    """Options of both kinds of process."""
    parent = click.option(
        "--exit-with-parent",
        is_flag=True,
        help="Stop when standard input reaches its end without a line 'detach'.",
    )
    return settings_options(parent(late_global_options(command)))


@worker.command("start")
@click.option(
    "--id",
    "number",
    type=click.IntRange(0, WORKER_NUMBER_MAX),
    default=0,
    help="Worker id; 0 takes any free one.",
)
@click.option(
    "--processor",
    type=click.IntRange(0, PROCESSOR_MAX),
    help="Run on this processor alone, counted from 0. Default: on any.",
)
@click.option(
    "--web-port", type=click.IntRange(0, 65535), default=0, help="Port of /metrics; 0 takes any free one."
)
@click.option("--standby", is_flag=True, help="Wait, with everything loaded, for the slots of a lost worker.")
@click.option(
    "--host",
    default="",
    help="Address to listen on. Default: that of this machine by which it reaches the coordinator.",
)
@click.option(
    "--advertise",
    default="",
    metavar="ADDRESS",
    help="Address by which others reach this worker, if it is not --host. Default, for a --host that stands "
    "for all: the one that the coordinator sees.",
)
@click.option(
    "--crash-record",
    type=click.IntRange(0),
    hidden=True,
    help="Descriptor of the memory file by which a launcher learns what tasks had in hand.",
)
@process_options
@click.pass_context
def start_worker(
    context: click.Context,
    /,
    number: int,
    processor: int | None,
    web_port: int,
    standby: bool,
    crash_record: int | None,
    host: str,
    advertise: str,
    exit_with_parent: bool,
    **values: Any,
) -> None:
    """Run a worker in the foreground; prints one JSON line when it is registered.

    SIGTERM has its tasks move to free slots of other workers, within drain_timeout, before it ends; Ctrl-C
    ends it at once.
    """
    if processor is not None:
        _pin(processor)
    session = session_of(context)
    settings = _found_tls(session, settings_from(values))
    _hash_alike(session.secret())
    run_behind_init()
    secret, address, directory = session.secret(), session.address(), session.make_directory()
    tls = Credentials.of(settings)
    with importing():
        from minishuffle.kernels.machinecode import load_kernels
        from minishuffle.web.guard import WebAccess
        from minishuffle.web.server import serve_worker_web
        from minishuffle.worker.service import run_worker

        load_kernels()
    record = _opened(crash_record)

    async def body(ready: Ready, endings: Endings) -> None:
        await run_worker(
            settings,
            coordinator=address,
            secret=secret,
            cluster=session.cluster,
            host=host,
            advertise=advertise,
            requested_worker=number,
            standby=standby,
            spool_directory=str(directory),
            find=CoordinatorFinder(directory),
            record=record,
            tls=tls,
            web=lambda snapshot, bound: serve_worker_web(
                snapshot, web_port, WebAccess.of_worker(settings, bound, secret, advertise), tls=tls
            ),
            ready=ready,
            stop=endings.by_parent,
            leave=endings.by_signal,
        )

    context.exit(run_process("worker", settings, exit_with_parent, body, last_words=record.leave))


def _hash_alike(secret: bytes) -> None:
    """Begin this process anew unless it hashes texts as the other workers of the cluster do."""
    seed = hash_seed(secret)
    if os.environ.get(HASH_SEED) != seed:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: seed})


def _opened(descriptor: int | None) -> CrashRecord:
    """The record at that descriptor, or one that nobody reads."""
    from minishuffle.worker.tasks.crashrecord import CrashRecord

    if descriptor is not None:
        try:
            return CrashRecord(descriptor)
        except OSError as error:  # What stands in front of the command has closed it.
            _log.warning("what tasks have in hand is not recorded: %s", error.strerror or error)
    return CrashRecord()


def _pin(processor: int) -> None:
    """Keep this process on one processor: the threads that libraries have started, and all that follow."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {processor})
    except OSError:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise UsageError(f"--processor {processor}: this process may use {usable}") from None


@coordinator.command("start")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--web-port", type=click.IntRange(0, 65535), help="Web page and metrics. Default: --port + 1.")
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Take the place of a coordinator that runs with the same state directory, which ends.",
)
@click.option(
    "--workers-anew",
    is_flag=True,
    help="All workers are started anew, too: those of before leave no place on standby to fill.",
)
@process_options
@click.pass_context
def start_coordinator(
    context: click.Context,
    /,
    port: int,
    web_port: int | None,
    take_over: bool,
    workers_anew: bool,
    host: str,
    exit_with_parent: bool,
    **values: Any,
) -> None:
    """Run a coordinator in the foreground; prints one JSON line when it listens.

    Ctrl-C and SIGTERM end this process alone: jobs and workers run on, and the coordinator that is started
    next with this state directory goes on with them. 'cluster down' ends them.
    """
    run_behind_init()
    session = session_of(context)
    settings = _found_tls(session, settings_from(values))
    secret = session.secret()
    tls = Credentials.of(settings)
    web_port = web_port if web_port is not None else (port + 1 if 0 < port < 65535 else 0)
    if take_over:  # Else one that runs is to be named first.
        doctor.require_free_ports(host, port, web_port)
    directory = session.make_directory()
    with importing():
        from minishuffle.coordinator.journal.lock import sole_coordinator
        from minishuffle.coordinator.process import run_coordinator
        from minishuffle.web.guard import WebAccess
        from minishuffle.web.server import serve_coordinator_web
    access = WebAccess.of_coordinator(settings, host, secret)

    async def body(ready: Ready, endings: Endings) -> None:
        await run_coordinator(
            settings,
            cluster=session.cluster,
            host=host,
            port=port,
            state_dir=directory,
            secret=secret,
            web=partial(serve_coordinator_web, access=access, tls=tls),
            web_port=web_port,
            ready=ready,
            stop=endings.by_parent,
            leave=endings.by_signal,
            tls=tls,
            workers_anew=workers_anew,
        )

    with sole_coordinator(directory, session.cluster, secret, take_over=take_over):
        doctor.require_free_ports(host, port, web_port)
        code = run_process("coordinator", settings, exit_with_parent, body)
    context.exit(code)


def _found_tls(session: Session, settings: ClusterSettings) -> ClusterSettings:
    """The same, with what the coordinator of the state directory uses if they say nothing of TLS: who goes on
    for it, or joins it, has to use it too."""
    if settings.tls_files is not None or (files := session.tls_files()) is None:
        return settings
    return with_tls_files(settings, files)


def say_ready(kind: str, info: dict[str, Any]) -> None:
    """Write the line that a launcher reads. A process that cannot works all the same: what runs on a machine
    whose disk is full may still be lost, and need another in its place."""
    line = json.dumps({"ready": kind, "pid": os.getpid(), **info})
    descriptor = sys.stdout.fileno() if sys.stdout is not None else -1  # It was closed before the start.
    try:
        os.write(descriptor, f"{line}\n".encode())
    except OSError as error:
        _log.warning("cannot write where this %s listens (%s): %s", kind, error.strerror, line)


def run_process(
    kind: str,
    settings: ClusterSettings,
    exit_with_parent: bool,
    body: Callable[[Ready, Endings], Awaitable[None]],
    *,
    last_words: Callable[[], None] = lambda: None,
) -> int:
    """Run a process's coroutine until it ends or a signal stops it; gives the exit code.

    SIGTERM and the end of standard input stop it in order (0), so does Ctrl-C (130); a second
    signal ends it at once, after ``last_words``.
    """
    interrupted = False
    notifier = Notifier(os.environ, os.getpid())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        endings = Endings()

        def on_signal(number: int) -> None:
            nonlocal interrupted
            if endings.any.is_set():
                last_words()
                os._exit(128 + number)
            interrupted = number == signal.SIGINT
            at_once = interrupted and kind == "worker"
            endings.note(endings.by_parent if at_once else endings.by_signal)

        for number in ENDING:
            loop.add_signal_handler(number, on_signal, number)
        _leave_forks_their_signals()
        if exit_with_parent:
            _watch_parent(loop, partial(endings.note, endings.by_parent))

        def ready(info: dict[str, Any]) -> None:
            say_ready(kind, info)
            notifier.ready(loop, settings.heartbeat_timeout)

        await body(ready, endings)

    with asyncio.Runner(loop_factory=_loop_factory(settings)) as runner:
        runner.run(run())
    return EXIT_INTERRUPTED if interrupted else 0


@cache  # Two pairs of hooks would save and restore what the other has set.
def _leave_forks_their_signals() -> None:
    """Have signals to what a user's function forks be its own.

    The handler of a loop only writes to a descriptor that the loop reads, and a copy of it would write to the
    same one: this process would stop in the copy's place, which ``multiprocessing`` ends by SIGTERM. Signals
    that come before the copy has put that right wait.
    """
    masks = threading.local()

    def before() -> None:
        masks.saved = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.saved)

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.saved)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _loop_factory(settings: ClusterSettings) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not settings.use_uvloop:
        return None
    import uvloop

    return uvloop.new_event_loop


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Stop when standard input ends, and end for certain even if user code keeps the process; no more
    once the parent has said that this process may outlive it. A process that SIGSTOP holds up goes on when
    the parent dies (Linux), and sees it then."""
    import ctypes  # For weight: the commands that are in this file, too, start without.

    if hasattr(system := ctypes.CDLL(None), "prctl"):
        system.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        while line := os.read(sys.stdin.fileno(), 1024):
            if line == DETACH:
                return
        try:
            loop.call_soon_threadsafe(stop)
        except RuntimeError:
            return  # The loop is closed: the process is ending by itself.
        threading.Event().wait(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@worker.command()
@click.argument("number", metavar="WORKER", type=int, shell_complete=complete_worker)
@click.option("--signal", "name", type=click.Choice(SIGNALS), default="KILL", show_default=True)
@json_option
@late_global_options
@click.pass_context
def kill(context: click.Context, number: int, name: str, as_json: bool) -> None:
    """Send a signal to a worker of this machine, to see what the cluster makes of it."""
    with session_of(context).client() as client:
        workers = {info.worker: info for info in client.status().workers if info.state == "alive"}
    if number not in workers:
        there = ", ".join(map(str, sorted(workers))) or "none"
        raise UnknownName(f"there is no worker {number}; alive: {there}")
    info = workers[number]
    signal_worker(info, getattr(signal, f"SIG{name}"))
    if as_json:
        print_json({"worker": number, "pid": info.pid, "signal": name})
    else:
        echo(f"worker {number} (pid {info.pid}) was sent SIG{name}")


@worker.command()
@click.argument("number", metavar="WORKER", type=int, shell_complete=complete_worker)
@click.option(
    "--timeout", type=FiniteRange(0, DRAIN_SECONDS_MAX), help="End after so many seconds in any case."
)
@click.option("--wait", is_flag=True, help="Return when the worker has left.")
@json_option
@late_global_options
@click.pass_context
def drain(context: click.Context, number: int, timeout: float | None, wait: bool, as_json: bool) -> None:
    """Have a worker leave: its tasks move as soon as other workers have slots for them, and it ends when
    nothing runs on it."""
    with session_of(context).client() as client:
        client.drain(number, timeout)
        while wait and any(each.worker == number and each.draining for each in client.status().workers):
            time.sleep(DRAIN_LOOK_SECONDS)
    if as_json:
        print_json({"worker": number, "timeout": timeout, "left": wait})
    else:
        echo(f"worker {number} has left" if wait else f"worker {number} leaves when nothing runs on it")


def signal_worker(info: WorkerInfo, number: signal.Signals) -> None:
    """Send a signal to a worker of this machine.

    Raises:
        UnknownName: it is on another machine, or that process is none of ours.
    """
    doctor.require_local(info.host, f"worker {info.worker}")
    if not is_minishuffle(info.pid):
        raise UnknownName(
            f"worker {info.worker} is not process {info.pid} of this machine: type the command there"
        )
    os.kill(info.pid, number)

"""``minishuffle cluster up|status|down``: a cluster on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from minishuffle.authority import Authority, here, throw_away_files
from minishuffle.cli import doctor, tables
from minishuffle.cli.ownprocesses import LAUNCHER, alive, is_stopped, own_processes
from minishuffle.cli.session import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Session,
    json_option,
    late_global_options,
    print_json,
    session_of,
    settings_from,
    settings_options,
)
from minishuffle.cli.statefolders import snapshot_use
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.config import ClusterSettings, create_secret, read_token, web_token, with_tls_files
from minishuffle.errors import AuthenticationError, PeerLost, ResourceExhausted, ShuffleError, UsageError
from minishuffle.ids import Address
from minishuffle.launch import Child, LocalProcesses, settings_flags, start_processes, stop_children
from minishuffle.local import remove_abandoned_state
from minishuffle.observe.prometheus import prometheus_command, prometheus_config
from minishuffle.supervision import Supervisor, how_it_ended
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.requests import JOB_LIVE

if TYPE_CHECKING:
    from minishuffle.spark.cluster import WorkerSupplier

__all__ = ["cluster"]

START_SECONDS = 60.0
SPARK_START_SECONDS = 120.0
STOP_SECONDS = 20.0
ENDING_SECONDS = 5.0
"""For a coordinator that lives and does not answer: another command may have asked it to stop."""
LAUNCHER_SECONDS = 30.0
"""For that to end what it has started: it asks a coordinator that may not answer, and then gives it time."""
POLL_SECONDS = 0.1
NOTE_SECONDS = 2.0
"""After which 'cluster down' says whom it waits for."""
CONNECT_SECONDS = 2.0
LOCK_FILE = "starting.lock"
"""Locked by the 'cluster up' that is starting processes, whose process id it holds."""


@click.group()
def cluster() -> None:
    """Start, look at and stop a cluster on this machine."""


@cluster.command()
@click.option(
    "--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Worker processes."
)
@click.option(
    "--standby",
    type=click.IntRange(0, 256),
    default=0,
    show_default=True,
    help="More worker processes, which wait with everything loaded for the slots of a lost worker.",
)
@click.option(
    "--restart-workers/--no-restart-workers",
    default=True,
    show_default=True,
    help="Start a new process for each that is lost; not with --detach.",
)
@click.option("--on-spark", metavar="MASTER", help="Run the workers on the executors of that Spark master.")
@click.option("--spark-python", metavar="PATH", help="Python of Spark's executors; by default this one.")
@click.option(
    "--tls",
    is_flag=True,
    help="Have all connections use TLS, with certificates of a CA made for this cluster.",
)
@click.option("--detach", is_flag=True, help="Return when the cluster is ready; 'cluster down' stops it.")
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--web-port", type=click.IntRange(0, 65535), help="Web page and metrics. Default: --port + 1.")
@settings_options
@late_global_options
@click.pass_context
def up(
    context: click.Context,
    /,
    workers: int,
    standby: int,
    restart_workers: bool,
    on_spark: str | None,
    spark_python: str | None,
    tls: bool,
    detach: bool,
    host: str,
    port: int,
    web_port: int | None,
    **values: Any,
) -> None:
    """Start a coordinator and workers; Ctrl-C stops them all."""
    session = session_of(context)
    settings = settings_from(values)
    if tls and settings.tls_files is not None:
        raise UsageError("--tls makes certificates: leave it out, or the options that name files")
    if on_spark:
        _check_for_spark(detach=detach, standby=standby)
    credentials = None if tls else Credentials.of(settings)
    web_port = web_port if web_port is not None else (port + 1 if 0 < port < 65535 else 0)
    if not session.directory().exists():  # What is refused leaves none behind.
        _refuse_beside_others(session)
        doctor.require_free_ports(host, port, web_port)
    session.make_directory()
    with _starting_alone(session):
        _refuse_second(session)
        doctor.require_free_ports(host, port, web_port)
        if tls:
            settings = with_tls_files(settings, throw_away_files(session.directory(), host))
            credentials = Credentials.of(settings)
        count = 0 if on_spark else workers
        processes = _start(session, settings, (count, standby), Address(host, port), web_port)
        try:
            _write_record(session, processes, host, detached=detach)
            web = str(Address(host, processes.web_port))
            prometheus_config(web, session.directory(), read_token(session.secret()), settings.tls_files)
        except BaseException:
            stop_children(processes.children, grace_seconds=2.0)
            raise
    keep = False
    with Client(processes.address, session.secret(), cluster=session.cluster, tls=credentials) as client:
        try:
            with _supplied(on_spark, spark_python, workers, session, processes, settings) as supplier:
                if detach:  # Only now that a record says where they are.
                    for child in processes.children:
                        child.detach()
                _tell(session, processes, settings, workers, standby)
                keep = detach
                if not detach:
                    echo("Ctrl-C stops the cluster.")
                    supervisor = Supervisor(processes, client, workers=restart_workers)
                    _watch(session, processes, supplier, supervisor, host)
        finally:
            if not keep:
                _stop(client, processes)
                session.record_path().unlink(missing_ok=True)


def _check_for_spark(*, detach: bool, standby: int) -> None:
    """Raises UsageError: workers on executors do without that."""
    if detach:
        raise UsageError("Spark's driver runs in this command: leave out --detach, or end it with '&'")
    if standby:
        raise UsageError("lost workers on Spark's executors are ordered anew: leave out --standby")


@contextlib.contextmanager
def _starting_alone(session: Session) -> Iterator[None]:
    """Have nobody else start a cluster in this state directory for the length of the block, at the end of
    which a record says that there is one. Two coordinators of one directory take it from each other.

    Raises:
        ResourceExhausted: somebody else is starting one.
    """
    path = session.directory() / LOCK_FILE
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Gone with this process, however it ends.
        except BlockingIOError:
            holder = f" (pid {number})" if (number := file.read().strip()) else ""
            raise ResourceExhausted(
                f"another {LAUNCHER}{holder} is starting a cluster in {session.directory()}: "
                f"wait until it is up, or start another with --cluster NAME or --state-dir"
            ) from None
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _start(
    session: Session, settings: ClusterSettings, workers: tuple[int, int], place: Address, web_port: int
) -> LocalProcesses:
    """Start a coordinator at that place, and so many workers and standby workers."""
    remove_abandoned_state()
    if not session.secret_path().exists():
        create_secret(session.secret_path())
    session.secret()  # One that cannot be used is an error before anything is started.
    return start_processes(
        cluster=session.cluster,
        state_dir=session.directory(),
        secret_file=session.secret_path(),
        workers=workers[0],
        standby=workers[1],
        settings=settings,
        host=place.host,
        port=place.port,
        web_port=web_port,
        timeout=START_SECONDS,
    )


@contextlib.contextmanager
def _supplied(
    master: str | None,
    spark_python: str | None,
    workers: int,
    session: Session,
    processes: LocalProcesses,
    settings: ClusterSettings,
) -> Iterator[WorkerSupplier | None]:
    """With a master of Spark: workers on its executors for the length of the block."""
    if master is None:
        yield None
        return
    from minishuffle.spark.cluster import WorkerSupplier
    from minishuffle.spark.session import spark_session, stop_spark

    spark = spark_session(f"minishuffle cluster {session.cluster}", master=master, spark_python=spark_python)
    try:
        flags = settings_flags(settings)
        supplier = WorkerSupplier(
            spark,
            workers,
            session.cluster,
            processes,
            session.secret(),
            flags=flags,
            tls=Credentials.of(settings),
        )
        try:
            supplier.start(SPARK_START_SECONDS)
            yield supplier
        finally:
            supplier.stop()
    finally:
        stop_spark(spark)


def _refuse_beside_others(session: Session) -> None:
    """Raises UsageError: processes of this cluster run, and what they need on the disk is gone."""
    if (others := session.running_without()) is not None:
        raise others


def _refuse_second(session: Session) -> None:
    record = session.record()
    if record is None:
        _refuse_beside_others(session)
        return
    coordinator, left = record["processes"]["coordinator"], alive(record)
    process = f"pid {coordinator['pid']}" if "coordinator" in left else ""
    if not process and LAUNCHER in left:  # It starts a coordinator again, or is about to end.
        process = f"{LAUNCHER}, pid {left[LAUNCHER]}"
    if left and not process and _accepts(address := session.address()):  # "coordinator start" took it back.
        process = doctor.port_holder(address.port)
    if process:
        raise ResourceExhausted(
            f"cluster {session.cluster!r} is already up at {session.address()} ({process}); "
            f"'minishuffle{session.flags()} cluster down' stops it, --cluster NAME starts another"
        )
    if left:
        command = f"'minishuffle{session.flags()}"
        raise ResourceExhausted(
            f"cluster {session.cluster!r} has lost its coordinator, and {', '.join(sorted(left))} run on: "
            f"{command} coordinator start' takes them back, {command} cluster down' stops them"
        )
    session.record_path().unlink()


def _write_record(session: Session, processes: LocalProcesses, host: str, *, detached: bool = False) -> None:
    """Say where the cluster is and which processes it has, for other commands."""
    entries: dict[str, dict[str, Any]] = {}
    for child in processes.children:
        with contextlib.suppress(psutil.NoSuchProcess):  # It has ended.
            name = "coordinator" if child is processes.coordinator else child.name
            entries[name] = {"pid": child.pid, "started": psutil.Process(child.pid).create_time()}
    record = {
        "cluster": session.cluster,
        "coordinator": str(processes.address),
        "web": str(Address(host, processes.web_port)),
        "processes": entries,
        "launcher": None if detached else {"pid": os.getpid(), "started": psutil.Process().create_time()},
    }
    path = session.record_path()
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=2) + "\n")
    new.replace(path)


def _tell(
    session: Session, processes: LocalProcesses, settings: ClusterSettings, workers: int, standby: int
) -> None:
    directory = session.directory()
    where = session.flags()
    scheme = "http" if settings.tls_files is None else "https"
    web = f"{scheme}://{Address(processes.address.host, processes.web_port)}"
    spare = f", {standby} more on standby" if standby else ""
    failure = f"worker kill {workers}" if processes.workers else "cluster status"  # Spark's may be elsewhere
    lines = [
        f"cluster {session.cluster!r} is up: {workers} workers x {settings.slots} slots{spare}",
        f"  coordinator  {processes.address} (pid {processes.coordinator.pid})",
        f"  web page     {web}/",
        f"  metrics      {web}/metrics, targets at {web}/sd/prometheus",
        f"  state, logs  {directory}",
        "next:",
        f"  minishuffle{where} submit keyby",
        f"  {prometheus_command(directory / 'prometheus.yml')}",
        f"  minishuffle{where} {failure}",
        f"'minishuffle{where} cluster down' stops it.",
    ]
    echo("\n".join(lines))


def _watch(
    session: Session,
    processes: LocalProcesses,
    supplier: WorkerSupplier | None,
    supervisor: Supervisor,
    host: str,
) -> None:
    """Return when the coordinator has ended in order; show processes that end, and those that take their
    places.

    Raises:
        PeerLost: the coordinator is not started again.
    """
    gone: set[int] = set()
    recorded = True
    while not supervisor.ended_in_order:
        if supplier is not None:
            supplier.check()
        there = {0: processes.coordinator, **processes.workers}
        for number, child in there.items():
            code = child.process.poll()
            if code is not None and (code or not number) and child.pid not in gone:
                gone.add(child.pid)
                how = how_it_ended(code) if code else "handed over"
                echo(f"{_name(number)} (pid {child.pid}) {how}; see {child.log}", err=True)
        if _replace(processes, supervisor) or not recorded:
            recorded = _record_again(session, processes, host, warns=recorded)
        time.sleep(POLL_SECONDS)


def _name(number: int) -> str:
    return f"worker {number}" if number else "the coordinator"


def _replace(processes: LocalProcesses, supervisor: Supervisor) -> bool:
    """Start processes for lost ones; whether there were any."""
    new: dict[int, Child] = {}
    try:
        new = supervisor.check()
    except ShuffleError:
        if supervisor.failure is not None:
            raise
        # The coordinator does not answer, and is asked again.
    for number, child in new.items():
        echo(f"{_name(number)} is started again (pid {child.pid})", err=True)
    return bool(new)


def _record_again(session: Session, processes: LocalProcesses, host: str, *, warns: bool) -> bool:
    """Record the processes for ``cluster down``; whether that could be written. The cluster runs on."""
    try:
        _write_record(session, processes, host)
    except OSError as error:
        if warns:
            what = f"{session.record_path()} cannot be written ({error.strerror})"
            echo(f"{what}: 'cluster down' may miss what was started again", err=True)
        return False
    return True


def _stop(client: Client, processes: LocalProcesses) -> None:
    grace = STOP_SECONDS
    processes.kill_hung()
    if is_stopped(processes.coordinator.pid):  # It would answer nobody, and never end by itself.
        processes.coordinator.send_signal(signal.SIGKILL)
        stop_children(processes.children, ENDING_SECONDS)
        return
    try:
        client.stop_cluster()  # Also of one that somebody else has started in place of the first.
    except ShuffleError as error:
        if processes.coordinator.process.poll() is None:
            grace = 2.0
            echo(f"the coordinator does not answer ({error}): stopping by process id", err=True)
    finally:
        stop_children(processes.children, grace)


@cluster.command()
@json_option
@late_global_options
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show workers with their slots and connections, and jobs."""
    session = session_of(context)
    with session.client() as client:
        state = client.status()
    use = snapshot_use(session, {job.job for job in state.jobs if job.state in JOB_LIVE})
    if as_json:
        print_json({**tables.status_map(state), "snapshots": use})
        return
    tables.show_status(state, session.flags())
    if use:
        size, ended = tables.byte_text(use["bytes"]), tables.byte_text(use["ended_bytes"])
        echo(
            f"\nsnapshots in {use['directory']}: {use['count']:,} with {size}; of jobs that do not run: "
            f"{use['ended_count']:,} with {ended}"
        )


@cluster.command("events")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def cluster_events(context: click.Context, as_json: bool) -> None:
    """Print the last events that are of no job, oldest first: which workers reach each other."""
    with session_of(context).client() as client:
        for event in client.status().events:
            if as_json:
                print_json(event.model_dump())
            else:
                echo(tables.event_line(event))


@cluster.command()
@click.option("--read", is_flag=True, help="Print the one that only reads: for Prometheus, say.")
@late_global_options
@click.pass_context
def token(context: click.Context, read: bool) -> None:
    """Print what the web page and the REST interface ask for before they change anything."""
    secret = session_of(context).secret()
    echo(read_token(secret) if read else web_token(secret))


@cluster.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="ADDRESS",
    help="A name or address by which it is reached, of several if need be. Default: those of this machine.",
)
@click.option(
    "--authority",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Where the CA is (ca.pem, ca-key.pem), or a new one is to be kept. Default: DIRECTORY.",
)
def certificate(directory: Path, hosts: tuple[str, ...], authority: Path | None) -> None:
    """Make a certificate for a process: certificate.pem, key.pem and ca.pem in DIRECTORY."""
    files = Authority.kept(authority or directory).issue(directory, hosts or here())
    echo("\n".join(f"tls_{name} = {json.dumps(path)}" for name, path in files._asdict().items()))


@cluster.command()
@late_global_options
@click.pass_context
def down(context: click.Context) -> None:
    """Cancel all jobs and stop every process of the cluster."""
    session = session_of(context)
    record, address = session.record(), session.address()
    asked, found = _order(session, record)
    if (there := found or record) is not None:
        coordinator = alive(there).get("coordinator")
        answers_no_more = (
            not asked and found is None and coordinator is not None and not is_stopped(coordinator)
        )
        _end_recorded(session, there, STOP_SECONDS if asked else ENDING_SECONDS if answers_no_more else 0.0)
        if (last := session.record()) is not None and not alive(last):  # Else it is a new cluster's.
            session.record_path().unlink(missing_ok=True)
    if not asked and found is None and _accepts(address):  # "coordinator start", which is not on record.
        raise PeerLost(
            f"what 'cluster up' started of cluster {session.cluster!r} has ended, but at {address} listens, "
            f"and does not answer, {doctor.port_holder(address.port)}: end that, too"
        )
    echo(f"cluster {session.cluster!r} is down")
    if (directory := session.directory()).is_dir():
        echo(
            f"{directory} stays, with the history of its jobs (from which their numbers go on), logs and the "
            "secret: delete it if you need none of these"
        )


def _order(session: Session, record: dict[str, Any] | None) -> tuple[bool, dict[str, Any] | None]:
    """Have the coordinator end the cluster. Gives whether it was asked, or else the processes that were found
    by their command lines, if they are not on record or nothing on the disk leads to their coordinator.

    Raises:
        ShuffleError: it cannot be asked, and there are no processes to end.
    """
    directory, missing = session.directory(), session.missing()
    if missing and ((found := own_processes(directory)) is not None or record is not None):
        _say_found(missing, found)
        return False, found
    coordinator = alive(record).get("coordinator") if record is not None else None
    if coordinator is not None and is_stopped(coordinator):
        echo(f"the coordinator (pid {coordinator}) is stopped and cannot end the cluster", err=True)
        return False, None
    try:
        with session.client() as client:
            client.stop_cluster()
        return True, None
    except (PeerLost, AuthenticationError) as error:
        if record is not None and isinstance(error, PeerLost):
            return False, None
        found = own_processes(directory) if session.coordinator is None else None
        if found is None:
            raise
        _say_found(str(error), found)
        return False, found


def _say_found(why: str, record: dict[str, Any] | None) -> None:
    names = ", ".join(f"{name} (pid {pid})" for name, pid in alive(record or {"processes": {}}).items())
    echo(f"{why}; ending {names or 'no process'}", err=True)


def _accepts(address: Address) -> bool:
    """Whether a process listens there, be it a stopped one."""
    try:
        with socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _end_recorded(session: Session, record: dict[str, Any], grace_seconds: float) -> None:
    """Wait for the recorded processes to end, then end those that do not.

    First the command that looks after them: it would start others in place of those that are killed.
    """
    left = _wait(record, grace_seconds, note_seconds=NOTE_SECONDS)
    if LAUNCHER in left:
        echo(f"ending {LAUNCHER} (pid {left[LAUNCHER]}), which looks after the others", err=True)
        _end({"processes": {}, "launcher": record["launcher"]}, LAUNCHER_SECONDS)
        record = session.record() or record  # It may have started others meanwhile.
        _wait(record, ENDING_SECONDS)  # They end with it, also if it was killed.
    _end(record, 5.0)


def _wait(record: dict[str, Any], seconds: float, *, note_seconds: float | None = None) -> dict[str, int]:
    """Wait for the recorded processes to end, and say so after a while; gives those that have not."""
    now = time.monotonic()
    deadline, note_at = now + seconds, None if note_seconds is None else now + note_seconds
    while (left := alive(record)) and (now := time.monotonic()) < deadline:
        if note_at is not None and now >= note_at:
            names = ", ".join(f"{name} (pid {pid})" for name, pid in left.items())
            echo(f"waiting for {names} to end", err=True)
            note_at = None
        time.sleep(POLL_SECONDS)
    return left


def _end(record: dict[str, Any], term_seconds: float) -> None:
    """SIGTERM to the recorded processes, and SIGKILL to those that have not ended after so long.

    Raises:
        ShuffleError: one does not end even so.
    """
    for number, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, 5.0)):
        for pid in alive(record).values():
            with contextlib.suppress(ProcessLookupError):  # It ended just now, as it should.
                os.kill(pid, number)
        left = _wait(record, seconds)
        if not left:
            return
    for name, pid in left.items():
        raise ShuffleError(f"{name} (pid {pid}) does not end; look at it with 'ps -fp {pid}'")

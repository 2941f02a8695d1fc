"""``minishuffle doctor``: what this machine has and lacks."""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import psutil

from minishuffle.cli.session import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_WEB_PORT,
    json_option,
    late_global_options,
    print_json,
    session_of,
)
from minishuffle.errors import (
    ResourceExhausted,
    ShuffleError,
    UnknownName,
    UsageError,
    text_of,
)
from minishuffle.launch import checked_settings
from minishuffle.spark.session import INSTALL, checked_java
from minishuffle.transport.addresses import port_holder
from minishuffle.wire.advertised import is_loopback, is_wildcard

__all__ = [
    "Check",
    "checks",
    "doctor",
    "port_holder",
    "require_free_port",
    "require_free_ports",
    "require_local",
]


# --- machine --------------------------------------------------------------------------------------
#
# What the command line asks this machine: who holds a port, whether an address is its own.


def require_free_port(host: str, port: int, flag: str) -> None:
    """Check that ``port`` can be listened on; 0 always can.

    Raises:
        ResourceExhausted: it is taken; names the holder and the flag that chooses another.
        UsageError: ``host`` is not an address of this machine.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As asyncio's servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ResourceExhausted(
                    f"port {port} is taken by {port_holder(port)}; stop it or choose another with {flag}"
                ) from None
            raise UsageError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); see --host"
            ) from None


def require_free_ports(host: str, port: int, web_port: int) -> None:
    """The same of both ports of a coordinator.

    Raises:
        ResourceExhausted: one is taken.
        UsageError: they are one port, or ``host`` is not an address of this machine.
    """
    if port == web_port != 0:
        raise UsageError(f"--port and --web-port are both {port}: choose another port for one of them")
    require_free_port(host, port, "--port")
    require_free_port(host, web_port, "--web-port")


def require_local(host: str, what: str) -> None:
    """Raises UnknownName when ``host`` is not this machine."""
    own = {socket.gethostname()}
    for addresses in psutil.net_if_addrs().values():
        own.update(address.address for address in addresses)
    if host not in own and not is_loopback(host) and not (host and is_wildcard(host)):
        raise UnknownName(f"{what} runs on {host}, not here: type the command there")


# --- doctor ---------------------------------------------------------------------------------------

OLDEST_PYTHON = (3, 11)
MEMORY_BYTES = 1 << 30
OPEN_FILES = 1024
SNAPSHOT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """``needed`` tells what stops minishuffle from what only takes something away."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    needed: bool = True


def checks(snapshot_dir: str, snapshot_memory: int) -> list[Check]:
    """Look at everything, and whether snapshots can be written there; leaves nothing behind.
    ``snapshot_memory``: bytes for snapshots in each worker."""
    return [
        _python(),
        _package("uvloop"),
        _package("pyarrow"),
        _memory(snapshot_memory),
        _open_files(),
        _snapshots(snapshot_dir),
        _loopback(),
        _port(DEFAULT_PORT, "--port"),
        _port(DEFAULT_WEB_PORT, "--web-port"),
        _prometheus(),
        _java(),
        _spark(),
    ]


def _python() -> Check:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    ok = sys.version_info >= OLDEST_PYTHON
    return Check("Python", ok, platform.python_version(), f"install Python {oldest} or newer")


def _package(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "missing", f"pip install {name}")


def _memory(snapshots: int) -> Check:
    from minishuffle.cli import tables  # It needs rich, and each worker imports this module.

    free = psutil.virtual_memory().available
    fix = "stop something, or give workers less with --network-memory-bytes"
    found = (
        f"{tables.byte_text(free)} free; if jobs have a guarantee, a worker holds up to "
        f"{tables.byte_text(snapshots)} of snapshots in it (snapshot_memory_bytes)"
    )
    return Check("memory", free >= MEMORY_BYTES, found, fix)


def _open_files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", soft >= OPEN_FILES, f"limit {soft}", f"ulimit -n {OPEN_FILES}", needed=False)


def _snapshots(where: str) -> Check:
    """A directory that is not there yet is made by the first snapshot, in one that is."""
    from minishuffle.cli import tables
    from minishuffle.snapshots.catalog import probe
    from minishuffle.snapshots.storage import folder_at

    about = Check(
        "snapshot_dir", False, "", "name another with snapshot_dir; only for savepoints", needed=False
    )
    place = Path(where)
    while "://" not in where and not place.exists():
        place = place.parent
    begun = time.monotonic()
    try:
        probe(folder_at(where if "://" in where else place), f".doctor-{secrets.token_hex(4)}")
    except ShuffleError as error:
        return replace(about, found=text_of(error))
    found = f"{where}: written and read in {1000 * (time.monotonic() - begun):.0f} ms"
    if "://" in where:
        return replace(about, ok=True, found=found)
    free = shutil.disk_usage(place).free
    found = f"{found}, {tables.byte_text(free)} free"
    return replace(about, ok=free >= SNAPSHOT_BYTES, found=found, fix="make room; only for savepoints")


def _loopback() -> Check:
    try:
        with (
            socket.create_server((DEFAULT_HOST, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2.0),
        ):
            pass
    except OSError as error:
        return Check("loopback", False, text_of(error), "bring the interface up: ip link set lo up")
    return Check("loopback", True, f"{DEFAULT_HOST} answers")


def _port(port: int, flag: str) -> Check:
    try:
        require_free_port(DEFAULT_HOST, port, flag)
    except ShuffleError:
        holder = port_holder(port)
        return Check(f"port {port}", False, f"held by {holder}", f"cluster up {flag} N", needed=False)
    return Check(f"port {port}", True, "free")


def _prometheus() -> Check:
    found = shutil.which("prometheus")
    fix = "apt-get install prometheus (or your system's package); only for graphs over time"
    return Check("Prometheus", found is not None, found or "not on PATH", fix, needed=False)


def _java() -> Check:
    fix = f"{INSTALL}; only for what runs on Spark"
    try:
        java = checked_java()
    except UsageError as error:
        return Check("Java", False, str(error), fix, needed=False)
    return Check("Java", True, f"{java.version} ({java.path})", needed=False)


def _spark() -> Check:
    try:
        found = f"{version('pyspark')}, pandas {version('pandas')}"
    except PackageNotFoundError as error:
        fix = "pip install 'minishuffle[spark]'; only for what runs on Spark"
        return Check("Spark", False, f"{error.name} is missing", fix, needed=False)
    if not version("pandas").startswith("2."):
        fix = "pip install 'pandas<3', which is what PySpark supports"
        return Check("Spark", False, found, fix, needed=False)
    return Check("Spark", True, found, needed=False)


@click.command()
@json_option
@late_global_options
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Look for what minishuffle needs: what is missing, and how to get it."""
    from minishuffle.worker.tasks.snapshotholder import snapshot_memory  # It needs numpy and pyarrow.

    memory = snapshot_memory(checked_settings(None).snapshot_memory_bytes)
    found = checks(session_of(context).snapshot_dir(), memory)
    healthy = all(check.ok or not check.needed for check in found)
    if as_json:
        print_json({"ok": healthy, "cpus": os.cpu_count(), "checks": [asdict(check) for check in found]})
    else:
        from minishuffle.console import console, new_table  # It loads rich, and workers come by here.

        table = new_table(["check", "verdict", "found", "how to get it"])
        for check in found:
            verdict = "ok" if check.ok else "missing" if check.needed else "optional"
            table.add_row(check.name, verdict, check.found, "" if check.ok else check.fix)
        console().print(table)
    context.exit(0 if healthy else 1)

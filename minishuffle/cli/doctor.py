"""``minishuffle doctor``: what this machine has and lacks."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click
import psutil

from minishuffle.cli import machine, tables
from minishuffle.cli.session import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_WEB_PORT,
    json_option,
    late_global_options,
    print_json,
)
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.spark.java import INSTALL, checked_java

__all__ = ["Check", "checks", "doctor"]

OLDEST_PYTHON = (3, 11)
MEMORY_BYTES = 1 << 30
OPEN_FILES = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """``needed`` tells what stops minishuffle from what only takes something away."""

    name: str
    ok: bool
    found: str
    mend: str = ""
    needed: bool = True


def checks() -> list[Check]:
    """Look at everything; changes nothing."""
    return [
        _python(),
        _package("uvloop"),
        _package("pyarrow"),
        _memory(),
        _open_files(),
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


def _memory() -> Check:
    free = psutil.virtual_memory().available
    mend = "stop something, or give workers less with --network-memory-bytes"
    return Check("memory", free >= MEMORY_BYTES, f"{tables.byte_text(free)} free", mend)


def _open_files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", soft >= OPEN_FILES, f"limit {soft}", f"ulimit -n {OPEN_FILES}", needed=False)


def _loopback() -> Check:
    try:
        with (
            socket.create_server((DEFAULT_HOST, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2.0),
        ):
            pass
    except OSError as error:
        return Check("loopback", False, str(error), "bring the interface up: ip link set lo up")
    return Check("loopback", True, f"{DEFAULT_HOST} answers")


def _port(port: int, flag: str) -> Check:
    try:
        machine.require_free_port(DEFAULT_HOST, port, flag)
    except ShuffleError:
        holder = machine.port_holder(port)
        return Check(f"port {port}", False, f"held by {holder}", f"cluster up {flag} N", needed=False)
    return Check(f"port {port}", True, "free")


def _prometheus() -> Check:
    found = shutil.which("prometheus")
    mend = "apt-get install prometheus (or your system's package); only for graphs over time"
    return Check("Prometheus", found is not None, found or "not on PATH", mend, needed=False)


def _java() -> Check:
    mend = f"{INSTALL}; only for what runs on Spark"
    try:
        java = checked_java()
    except UsageError as error:
        return Check("Java", False, str(error), mend, needed=False)
    return Check("Java", True, f"{java.version} ({java.path})", needed=False)


def _spark() -> Check:
    try:
        found = f"{version('pyspark')}, pandas {version('pandas')}"
    except PackageNotFoundError as error:
        mend = "pip install 'minishuffle[spark]'; only for what runs on Spark"
        return Check("Spark", False, f"{error.name} is missing", mend, needed=False)
    if not version("pandas").startswith("2."):
        mend = "pip install 'pandas<3', which is what PySpark supports"
        return Check("Spark", False, found, mend, needed=False)
    return Check("Spark", True, found, needed=False)


@click.command()
@json_option
@late_global_options
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Look for what minishuffle needs: what is missing, and how to get it."""
    found = checks()
    healthy = all(check.ok or not check.needed for check in found)
    if as_json:
        print_json({"ok": healthy, "cpus": os.cpu_count(), "checks": [asdict(check) for check in found]})
    else:
        table = tables.new_table(["check", "verdict", "found", "how to get it"])
        for check in found:
            verdict = "ok" if check.ok else "missing" if check.needed else "optional"
            table.add_row(check.name, verdict, check.found, "" if check.ok else check.mend)
        tables.console().print(table)
    context.exit(0 if healthy else 1)

"""What the command line asks this machine: who holds a port, whether a process is ours."""

from __future__ import annotations

import errno
import os
import socket

import psutil

from minishuffle.errors import ResourceExhausted, UnknownName, UsageError
from minishuffle.transport.addresses import port_holder

__all__ = ["is_minishuffle", "port_holder", "require_free_port", "require_free_ports", "require_local"]

START_TIME_TOLERANCE_SECONDS = 2.0


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


def is_minishuffle(pid: int, started: float | None = None) -> bool:
    """Whether process ``pid`` runs and is one of ours.

    ``started`` (seconds since the epoch) guards against a process id that was given again.
    """
    try:
        process = psutil.Process(pid)
        names = {os.path.basename(word) for word in process.cmdline()[:3]}
        if process.status() == psutil.STATUS_ZOMBIE or not names & {"minishuffle", "minishuffle.cli"}:
            return False
        return started is None or abs(process.create_time() - started) < START_TIME_TOLERANCE_SECONDS
    except psutil.NoSuchProcess:
        return False


def require_local(host: str, what: str) -> None:
    """Raises UnknownName when ``host`` is not this machine."""
    own = {"localhost", "0.0.0.0", "::", socket.gethostname()}
    for addresses in psutil.net_if_addrs().values():
        own.update(address.address for address in addresses)
    if host not in own:
        raise UnknownName(f"{what} runs on {host}, not here: type the command there")

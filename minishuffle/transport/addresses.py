"""Why an address cannot be listened on or reached, in words that help."""

from __future__ import annotations

import errno
import os
from typing import Final

from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.wire.handshake import HandshakeRefused

__all__ = [
    "cannot_listen",
    "host_port",
    "no_coordinator",
    "no_handshake",
    "port_holder",
    "refused_at",
    "unreachable",
]

_FIXES: Final = {
    "secret": "; give the cluster's own secret with --secret-file",
    "cluster": "; name the cluster with --cluster, or another coordinator with --coordinator",
}


def cannot_listen(host: str, port: int, error: OSError, flag: str = "--port") -> UsageError:
    """The error to raise when listening on ``host:port`` failed with ``error``; suggests the fix.

    ``flag`` is the option that chooses the port.
    """
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"port {port} on {host} is taken by {port_holder(port)}; stop that or choose another port with "
            f"{flag}"
        )
    fix = f" or another port with {flag}" if port else ""
    return UsageError(
        f"cannot listen on {Address(host, port)}: {_reason(error)}; choose another address with --host{fix}"
    )


def port_holder(port: int) -> str:
    """Who listens on a TCP port: ``'command' (pid 123)``, or why that is not known."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return "another process (run as root to see which)"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:80] or process.name()
            except psutil.Error:
                break
            return f"'{command}' (pid {connection.pid})"
    return "a process that cannot be seen from here (of another user, or about to end)"


def refused_at(address: Address, refusal: HandshakeRefused) -> HandshakeRefused:
    """The same refusal, with the address and a fix."""
    return HandshakeRefused(refusal.reason, f"{address}: {refusal}{_FIXES.get(refusal.reason, '')}")


def unreachable(address: Address, timeout: float, error: Exception) -> str:
    """Why connecting failed; ``timeout`` in seconds."""
    if isinstance(error, TimeoutError):  # an OSError, too
        return f"no answer from {address} within {timeout:g} s"
    return f"cannot connect to {address}: {_reason(error)}"


def no_coordinator(address: Address, timeout: float, error: Exception) -> PeerLost:
    """The error to raise when nobody accepts a connection at the coordinator's address."""
    return PeerLost(
        f"{unreachable(address, timeout, error)}; is the coordinator running there? 'minishuffle cluster up' "
        "starts a cluster, 'minishuffle coordinator start' goes on with one that lost its coordinator, and "
        "--coordinator HOST:PORT names another"
    )


def no_handshake(address: Address, timeout: float, error: Exception) -> PeerLost:
    """The error to raise when the peer there accepts a connection and does not complete the handshake."""
    timed_out = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
    how = (
        f"did not answer within {timeout:g} s" if timed_out else "closed it before the handshake was complete"
    )
    return PeerLost(
        f"{address} accepted the connection and {how}: it has too many connections at the moment, or is no "
        "coordinator; try again, and see its log"
    )


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0
    if not number and str(error).startswith("could not bind on any address"):
        number = errno.EADDRNOTAVAIL  # asyncio drops it, from Python 3.13 on
    # Negative numbers are the resolver's; its own text is the right one then.
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)


def host_port(name: object) -> str:
    """A socket's name as ``HOST:PORT``."""
    return str(Address(str(name[0]), int(name[1]))) if isinstance(name, tuple) else str(name)

"""Ports for processes that are told theirs."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_ports"]

_PRIVILEGED = 1024


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, below those that the system gives to who asks for any.

    Tests beside this one ask it for hundreds: one of these might be had by another before it is used.
    """
    begin = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_PRIVILEGED, begin), begin - _PRIVILEGED):
        try:
            with socket.create_server(("127.0.0.1", port)):
                found.append(port)
        except OSError:  # Taken.
            continue
        if len(found) == count:
            break
    return found

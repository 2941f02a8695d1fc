"""This host as others see it: its identity, and its address on the way to another one."""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import Final

from minishuffle.transport.forks import close_in_forks

__all__ = ["address_toward", "host_identity"]

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
NETWORK: Final = "/proc/self/ns/net"
ANY_PORT: Final = 9
"""Nothing is sent there."""


def host_identity() -> str:
    """The same for all processes that share this one's loopback addresses: boot id and network namespace."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{os.stat(NETWORK).st_ino}"
    except OSError:  # It is not Linux.
        return platform.node()


async def address_toward(host: str) -> str:
    """The address of the interface by which this host reaches another; empty if there is no way. A UDP socket
    that is connected knows it, and has sent nothing."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(host, ANY_PORT)
        )
    except (OSError, UnicodeError):
        return ""
    try:
        close_in_forks(transport.get_extra_info("socket"))
        address: str = transport.get_extra_info("sockname")[0]
        return address
    finally:
        transport.abort()

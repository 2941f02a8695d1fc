"""The advertised addresses of workers, and the pairs of workers that cannot link because of them. Pure.

A worker listens on one address and advertises one. The latter is by default the former, or the address that
the coordinator sees if the worker listens on all. At a loopback address, each host reaches only itself. So it
is usable only if both ends have the same host identity: boot id and network namespace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from minishuffle.wire.registration import WorkerDescription

__all__ = [
    "advertised_host",
    "host_problem",
    "is_loopback",
    "is_wildcard",
    "linkable_groups",
    "parse_host",
    "unlinkable",
]

LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
)
"""As distributions write them into /etc/hosts."""
SHORT_PART: Final = re.compile(r"0x[0-9a-f]+|[0-9]+", re.ASCII | re.IGNORECASE)
"""A number of an address as inet_aton(3) reads it."""


def parse_host(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a text stands for, as the kernel dials and listens on it; None for a name.

    An IPv4 address inside an IPv6 one (``::ffff:127.0.0.1``) is that address. ``0``, ``127.1`` and
    ``0x7f000001`` are addresses too: the C library reads one to four numbers, and the last one fills all
    remaining bytes.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return _short_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _short_address(host: str) -> IPv4Address | None:
    parts = host.split(".")
    if len(parts) > 4 or not all(map(SHORT_PART.fullmatch, parts)):
        return None
    try:
        numbers = [_number(part) for part in parts]
    except ValueError:  # An octal number with an 8.
        return None
    *bytes_, rest = numbers
    if any(each > 255 for each in bytes_) or rest >= 1 << 8 * (5 - len(numbers)):
        return None
    return IPv4Address(sum(each << 8 * (3 - number) for number, each in enumerate(bytes_)) + rest)


def _number(part: str) -> int:
    if part.lower().startswith("0x"):
        return int(part, 16)
    return int(part, 8) if part.startswith("0") else int(part)


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, at which a host reaches only itself."""
    address = parse_host(host)
    if address is not None:
        return address.is_loopback
    name = host.lower().removesuffix(".")
    return name in LOOPBACK_NAMES or name.endswith(".localhost")


def is_wildcard(host: str) -> bool:
    """Whether a socket bound to this address listens on all addresses of the host."""
    address = parse_host(host)
    return not host if address is None else address.is_unspecified


def host_problem(host: str) -> str:
    """Why no process can connect to this address, as the end of a sentence; empty: one can."""
    address = parse_host(host)
    if is_wildcard(host):
        return "stands for all addresses of a host, and leads to none"
    if address is not None and (address.is_multicast or str(address) == "255.255.255.255"):
        return "is that of a group, and of no host"
    return ""


def advertised_host(about: WorkerDescription) -> str:
    """The address for others: the worker's setting, else the address it listens on, else the one the
    coordinator sees."""
    if about.advertise:
        return about.advertise
    if not is_wildcard(about.host):
        return about.host
    seen = parse_host(about.seen)
    return about.seen if seen is None else str(seen)


def unlinkable(one: WorkerDescription, other: WorkerDescription) -> bool:
    """Whether two workers are on different hosts, and one of them has a loopback address."""
    return one.identity != other.identity and (is_loopback(one.host) or is_loopback(other.host))


def linkable_groups(workers: Sequence[WorkerDescription]) -> list[set[int]]:
    """The largest sets of workers, by position, in which any two can link."""
    hosts = {each.identity for each in workers}
    confined = {each.identity for each in workers if is_loopback(each.host)}
    if len(hosts) < 2 or not confined:
        return [set(range(len(workers)))]
    groups = [{number for number, each in enumerate(workers) if each.identity == host} for host in confined]
    reached = {number for number, each in enumerate(workers) if not is_loopback(each.host)}
    return [*groups, *([reached] if reached and not any(reached <= group for group in groups) else [])]

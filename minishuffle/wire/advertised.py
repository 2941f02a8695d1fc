"""Which address of a worker others use, and between which workers no link can be made because of it. Pure.

A worker listens on one address and advertises one; the second is by default the first, or the one that the
coordinator sees if the worker listens on all. A loopback address leads to whoever uses it, so that it serves
only as long as both ends have one host identity: boot id and network namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from minishuffle.wire.messages import Register

__all__ = ["advertised_host", "host_problem", "is_loopback", "is_wildcard", "linkable_groups", "unlinkable"]


def _parsed(host: str) -> IPv4Address | IPv6Address | None:
    """None for a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_loopback(host: str) -> bool:
    """Whether that address leads to whoever uses it."""
    address = _parsed(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether who listens there listens on all addresses of the host."""
    address = _parsed(host)
    return not host if address is None else address.is_unspecified


def host_problem(host: str) -> str:
    """Why nobody can connect to that address, as the end of a sentence; empty: one may."""
    address = _parsed(host)
    if is_wildcard(host):
        return "stands for all addresses of a host, and leads to none"
    if address is not None and (address.is_multicast or str(address) == "255.255.255.255"):
        return "is that of a group, and of no host"
    return ""


def advertised_host(about: Register) -> str:
    """What others use: the worker's setting, else where it listens, else what the coordinator sees."""
    if about.advertise:
        return about.advertise
    if not is_wildcard(about.host):
        return about.host
    seen = _parsed(about.seen)
    return about.seen if seen is None else str(seen)


def unlinkable(one: Register, other: Register) -> bool:
    """Whether two workers are on two hosts, and one of them has a loopback address."""
    return one.identity != other.identity and (is_loopback(one.host) or is_loopback(other.host))


def linkable_groups(workers: Sequence[Register]) -> list[set[int]]:
    """The largest sets of these, by position, of which any two can link."""
    hosts = {each.identity for each in workers}
    confined = {each.identity for each in workers if is_loopback(each.host)}
    if len(hosts) < 2 or not confined:
        return [set(range(len(workers)))]
    groups = [{number for number, each in enumerate(workers) if each.identity == host} for host in confined]
    reached = {number for number, each in enumerate(workers) if not is_loopback(each.host)}
    return [*groups, *([reached] if reached and not any(reached <= group for group in groups) else [])]

"""Which addresses are advertised, refused, and kept for one host."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.wire.advertised import (
    advertised_host,
    host_problem,
    is_loopback,
    is_wildcard,
    linkable_groups,
    unlinkable,
)
from minishuffle.wire.registration import Register


def about(host: str, **fields: Any) -> Register:
    fixed = {"data_port": 1, "metrics_port": 2, "pid": 3, "slots": 1, "python": "3.13", "segments": 1}
    return Register.model_validate({"host": host, "segment_bytes": 32768, **fixed, **fields})


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard", "problem"),
    [
        ("127.0.0.1", True, False, ""),
        ("127.9.9.9", True, False, ""),
        ("::1", True, False, ""),
        ("::ffff:127.0.0.1", True, False, ""),
        ("localhost", True, False, ""),
        ("LocalHost", True, False, ""),
        ("127.1", True, False, ""),
        ("0x7f.0.1", True, False, ""),
        ("0177.1", True, False, ""),
        ("2130706433", True, False, ""),
        ("localhost.", True, False, ""),
        ("localhost.localdomain", True, False, ""),
        ("ip6-localhost", True, False, ""),
        ("web.localhost", True, False, ""),
        ("localhost.example", False, False, ""),
        ("127.1.example", False, False, ""),
        ("128.1", False, False, ""),
        ("127.0.0.1.1", False, False, ""),
        ("127.256.1", False, False, ""),
        ("127.16777216", False, False, ""),
        ("0128.1", False, False, ""),
        ("0x", False, False, ""),
        ("0.0.0.0", False, True, "stands for all"),
        ("0", False, True, "stands for all"),
        ("0.0", False, True, "stands for all"),
        ("0x0", False, True, "stands for all"),
        ("0000", False, True, "stands for all"),
        ("::0", False, True, "stands for all"),
        ("224.1", False, False, "group"),
        ("4294967295", False, False, "group"),
        ("::", False, True, "stands for all"),
        ("::ffff:0.0.0.0", False, True, "stands for all"),
        ("", False, True, "stands for all"),
        ("224.0.0.1", False, False, "group"),
        ("ff02::1", False, False, "group"),
        ("255.255.255.255", False, False, "group"),
        ("10.0.0.2", False, False, ""),
        ("fe80::1%eth0", False, False, ""),
        ("node-2.example", False, False, ""),
    ],
)
def test_what_an_address_is_good_for(host: str, loopback: bool, wildcard: bool, problem: str) -> None:
    assert (is_loopback(host), is_wildcard(host)) == (loopback, wildcard)
    assert bool(problem) == bool(host_problem(host)) and problem in host_problem(host)


@pytest.mark.parametrize(
    ("host", "advertise", "seen", "advertised"),
    [
        ("10.0.0.2", "", "10.0.9.9", "10.0.0.2"),
        ("127.0.0.1", "", "10.0.0.2", "127.0.0.1"),
        ("0.0.0.0", "", "10.0.0.2", "10.0.0.2"),
        ("::", "", "::ffff:10.0.0.2", "10.0.0.2"),
        ("::", "", "fd00::2", "fd00::2"),
        ("0.0.0.0", "", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "node-2", "10.0.0.2", "node-2"),
        ("127.0.0.1", "192.0.2.1", "127.0.0.1", "192.0.2.1"),
    ],
)
def test_what_is_advertised(host: str, advertise: str, seen: str, advertised: str) -> None:
    assert advertised_host(about(host, advertise=advertise, seen=seen)) == advertised


def test_workers_on_two_hosts_need_addresses_that_lead_there() -> None:
    near, beside = about("127.0.0.1", identity="a"), about("127.0.0.1", identity="a")
    far, open_ = about("10.0.0.2", identity="b"), about("10.0.0.1", identity="a")
    assert not unlinkable(near, beside) and not unlinkable(near, open_) and not unlinkable(open_, far)
    assert unlinkable(near, far) and unlinkable(far, near)
    assert unlinkable(near, about("127.0.0.1", identity="b"))


@pytest.mark.parametrize(
    ("workers", "groups"),
    [
        ([], [set()]),
        (["127.0.0.1 a", "127.0.0.1 a"], [{0, 1}]),
        (["10.0.0.1 a", "10.0.0.2 b"], [{0, 1}]),
        (["127.0.0.1 a", "10.0.0.1 a", "10.0.0.2 b"], [{0, 1}, {1, 2}]),
        (["127.0.0.1 a", "10.0.0.2 b"], [{0}, {1}]),
        (["127.0.0.1 a", "127.0.0.1 b", "127.0.0.1 b"], [{0}, {1, 2}]),
        (["10.0.0.1 a", "127.0.0.1 a", "127.0.0.1 b"], [{0, 1}, {2}]),
    ],
)
def test_the_largest_sets_that_can_link(workers: list[str], groups: list[set[int]]) -> None:
    known = [about(host, identity=identity) for host, identity in map(str.split, workers)]
    assert sorted(linkable_groups(known), key=sorted) == groups

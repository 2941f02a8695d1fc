"""Diagnoses of jobs between two hosts whose cable is long, or narrow.

Only root can make hosts: collected as root, and where CI says that it is true. ``MINISHUFFLE_SOAK=1`` tries
five lengths and widths, ``MINISHUFFLE_SEED=n`` being the first of their seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.api.stream import Stream
from minishuffle.bench.hosts import HostCluster, Hosts
from minishuffle.cli.main import cli
from support.sickjobs import Large
from support.slowlinks import SlowLink

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(180)]

ROW_BYTES = 2_000
SECONDS_MAX = 60.0
SEED = int(os.environ.get("MINISHUFFLE_SEED", "1"))
SEEDS = range(SEED, SEED + 5) if os.environ.get("MINISHUFFLE_SOAK") == "1" else [SEED]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


@contextmanager
def slow_link(hosts: Hosts, number: int) -> Iterator[SlowLink]:
    """Between that host and all others."""
    plug, bridge = hosts._plug(number), f"ms{os.getpid():x}br"
    near, far = f"ms{os.getpid():x}near", f"ms{os.getpid():x}far"
    with ExitStack() as stack:
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        stack.callback(ip, "link", "delete", near)
        ip("link", "set", plug, "nomaster")
        ip("link", "set", far, "master", bridge, "up")
        ip("link", "set", near, "up")
        yield stack.enter_context(SlowLink(plug, near))


def diagnosed(flags: list[str], job: str) -> dict[str, Any]:
    ran = CliRunner().invoke(cli, [*flags, "diagnose", job, "--seconds", "2", "--json"])
    assert ran.exit_code == 0, ran.output
    answer: dict[str, Any] = json.loads(ran.stdout)
    print(answer["rule"], answer["evidence"])
    return answer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_and_a_narrow_cable_are_each_named(
    watch: Any, wait_until: Callable[..., Any], seed: int
) -> None:
    random = Random(f"cables {seed}")
    with (
        HostCluster(workers=2, slots=1, segment_bytes=8192) as cluster,
        slow_link(cluster.hosts, 2) as link,
    ):
        flags = watch(cluster).flags
        delay = link.delay = random.uniform(0.02, 0.05)
        stream = Stream.source(Large(ROW_BYTES)).partition(lambda row, consumers: consumers - 1)
        job = cluster.submit(stream.to_count(), parallelism=2)
        remote = next(task for task in job.info().tasks if task.operator == 0 and task.worker == 1)

        def named(rule: str) -> dict[str, Any]:
            answer: dict[str, Any] = wait_until(
                lambda: found if (found := diagnosed(flags, job.id))["rule"] == rule else None,
                rule,
                SECONDS_MAX,
            )
            return answer

        found = named("credit round trip too long")
        assert found["task"] == f"{remote.name}[{remote.index}]"
        assert 2 * delay <= found["evidence"]["round_trip_seconds"] < 4 * delay

        link.delay, link.bytes_per_second = 0.0, random.randrange(500_000, 1_500_000)
        found = named("network")
        assert (found["task"], found["evidence"]["to_workers"]) == (f"{remote.name}[{remote.index}]", [2])
        link.bytes_per_second = None
        job.cancel()
        job.wait_until_over(SECONDS_MAX)

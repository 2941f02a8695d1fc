"""Workers on hosts of their own, which are network namespaces: links that are cut and come back.

Only root can make these: collected as root, and where CI says that it is true.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.bench.hosts import HostCluster, Hosts
from minishuffle.bench.numbered import KEYED, LogReader, NumberedOutput, numbered_job
from minishuffle.cli.main import cli
from minishuffle.client import JobHandle
from minishuffle.config import ClusterSettings

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(180)]

SECONDS_MAX = 60.0
RATE = 200.0
MAKERS = 6
MADE_AT_ONCE = """
import multiprocessing
from minishuffle.bench.hosts import Hosts

def make(number):
    begin.wait()
    with Hosts(1) as hosts:
        addresses[number].value = hosts.address(0).encode()
        made.wait()

fork = multiprocessing.get_context("fork")
begin, made = fork.Barrier({makers}), fork.Barrier({makers})
addresses = [fork.Array("c", 15) for _ in range({makers})]
makers = [fork.Process(target=make, args=(number,)) for number in range({makers})]
for maker in makers:
    maker.start()
for maker in makers:
    maker.join()
print(*(address.value.decode() for address in addresses))
raise SystemExit(any(maker.exitcode for maker in makers))
"""
"""Processes that make a host each; forked from one that has imported what they need."""
Until = Callable[..., Any]


@pytest.fixture(autouse=True)
def _suspicion_as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of other things are more patient."""
    monkeypatch.setenv(
        "MINISHUFFLE_SUSPECT_AFTER", str(ClusterSettings.model_fields["suspect_after"].default)
    )


def events(handle: JobHandle) -> set[str]:
    """What the job's events say."""
    return {event.text for event in handle.events()}


def passed_on(handle: JobHandle) -> dict[int, int]:
    """Records that each keyed subtask that runs has written."""
    tasks = [task for task in handle.info().tasks if task.name == KEYED]
    return {task.index: task.counters.records_out for task in tasks if task.state == "running"}


def goes_on(handle: JobHandle, wait_until: Until, *subtasks: int) -> None:
    before = passed_on(handle)
    wait_until(
        lambda: all(passed_on(handle).get(each, 0) > before.get(each, 0) + 40 for each in subtasks),
        f"more records of {subtasks}",
        SECONDS_MAX,
    )


def attempts(handle: JobHandle) -> dict[tuple[str, int], tuple[int, int]]:
    return {(task.name, task.index): (task.attempt, task.worker) for task in handle.info().tasks}


def said(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout


def route(hosts: Hosts, what: str, one: int, other: int) -> None:
    """Have nothing arrive that one of two hosts sends to the other, or have it arrive again."""
    for here, there in ((one, other), (other, one)):
        command = [*hosts.command(here), "ip", "route", what, "blackhole", hosts.address(there)]
        subprocess.run(command, check=True, timeout=10)


def test_links_flap_and_a_host_is_lost_and_comes_back_too_late(
    tmp_path: Path, wait_until: Until, is_running: Callable[[int], bool]
) -> None:
    """Source and collector are on worker 1. Its link to worker 3 is cut for a while; then host 3 is off the
    network for so long that its subtask has moved when it is back. The verdict is about the host: a process
    of it would have a minute. Nobody here ends the worker that was lost."""
    with HostCluster(workers=3, slots=2, heartbeat_timeout=60.0, restart_workers=False) as cluster:
        hosts = cluster.hosts
        assert {worker.host for worker in cluster.status().workers} == {hosts.address(n) for n in (1, 2, 3)}
        handle = cluster.submit(numbered_job(RATE, str(tmp_path)), name="hosts", parallelism=3)
        goes_on(handle, wait_until, 0, 1, 2)
        before = attempts(handle)
        (remote,) = (index for (name, index), (_, at) in before.items() if (name, at) == (KEYED, 3))
        others = sorted({0, 1, 2} - {remote})

        route(hosts, "add", 1, 3)
        silent = {f"worker {one} gets no answer from worker {other}" for one, other in ((1, 3), (3, 1))}
        wait_until(lambda: silent <= events(handle), "the two suspect each other")
        goes_on(handle, wait_until, *others)
        route(hosts, "delete", 1, 3)
        there = {f"worker {one} gets answers again from worker {other}" for one, other in ((1, 3), (3, 1))}
        wait_until(lambda: there <= events(handle), "the two trust each other again")
        goes_on(handle, wait_until, 0, 1, 2)
        assert attempts(handle) == before

        zombie = cluster.workers[3]
        hosts.cut(3)
        wait_until(lambda: attempts(handle) != before, "the verdict")
        assert any("its host did not answer" in text for text in events(handle))
        goes_on(handle, wait_until, 0, 1, 2)
        after = attempts(handle)
        (moved,) = (key for key in before if before[key] != after[key])
        assert (moved, after[moved][0]) == ((KEYED, remote), 2)
        assert is_running(zombie), "it does not know"
        hosts.restore(3)
        wait_until(lambda: not is_running(zombie), "the end of the worker that came back", SECONDS_MAX)
        goes_on(handle, wait_until, 0, 1, 2)
        assert attempts(handle) == after

        (tmp_path / "stop").touch()
        info = handle.wait_until_over(SECONDS_MAX)
    assert info.state == "finished_with_loss"
    output = NumberedOutput(LogReader(str(tmp_path / "log")).read_on(), 0, RATE)
    made = sum(task.counters.records_out for task in info.tasks if task.name == "Numbered")
    missing, dropped = output.missing(made), sum(info.rows_dropped.values())
    assert output.duplicated == 0, "what the worker sent late was taken"
    assert info.rows_dropped["suspected"] > 0
    assert dropped <= missing <= dropped + info.rows_in_flight


def test_two_workers_that_cannot_reach_each_other_are_named_and_one_gives_its_subtasks_away(
    tmp_path: Path, wait_until: Until
) -> None:
    """Both reach the coordinator and worker 2. 'make soak-reach' has the rest of what follows."""
    with HostCluster(workers=3, slots=3, link_timeout=3.0) as cluster:
        hosts = cluster.hosts
        wait_until(lambda: [each.reachable for each in cluster.status().workers] == [2, 2, 2], "the probes")
        handle = cluster.submit(numbered_job(RATE, str(tmp_path)), name="hosts", parallelism=3)
        goes_on(handle, wait_until, 0, 1, 2)
        before = attempts(handle)
        route(hosts, "add", 1, 3)
        wait_until(lambda: attempts(handle) != before, "the move", SECONDS_MAX)
        named = [event for event in handle.events() if event.kind in ("link broken", "worker excluded")]
        assert [event.kind for event in named] == ["link broken", "worker excluded"]
        for event in named:
            assert all(f"worker {n} ({hosts.address(n)}:" in event.text for n in (1, 3)), event.text
        goes_on(handle, wait_until, 0, 1, 2)
        after = attempts(handle)
        (link,) = handle.info().links_broken
        assert link.workers == [1, 3] and link.excluded in link.workers
        moved = {key for key in before if before[key] != after[key]}
        assert moved == {key for key, (_, at) in before.items() if at == link.excluded}
        assert [each.state for each in cluster.status().workers] == ["alive"] * 3
        (tmp_path / "stop").touch()
        assert handle.wait_until_over(SECONDS_MAX).state.startswith("finished")


def test_a_host_that_is_lost_is_missed_alone() -> None:
    options = ["--failure", "host", "--kills", "1", "--rate", "500", "--json"]
    result = CliRunner().invoke(cli, ["bench", "recovery", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["failure"], found["others_restarted"], found["again"]) == ("host", 0, 0)
    assert found["dropped"] <= found["lost"] <= found["dropped"] + found["in_flight"]


def test_hosts_leave_nothing_behind_and_those_of_a_dead_process_go_with_the_next() -> None:
    def there() -> str:
        listed = [["ip", "netns", "list"], ["ip", "-o", "link", "show"]]
        return "".join(map(said, listed))

    dead = subprocess.Popen(["true"])
    dead.wait()
    left = Hosts(1)
    left._pid = dead.pid
    left.__enter__()
    assert f"minishuffle-{dead.pid}-0" in there()
    with pytest.raises(KeyError), Hosts(2) as hosts:
        assert f"minishuffle-{dead.pid}-0" not in there()
        assert "dev eth0" in said([*hosts.command(0), "ip", "route", "get", hosts.address(1)])
        raise KeyError
    assert hosts._name(0) not in there() and hosts._plug(0) not in there()


def test_hosts_that_are_made_at_once_have_networks_of_their_own() -> None:
    """Two processes that took the same one reached each other's hosts."""
    words = [sys.executable, "-c", MADE_AT_ONCE.format(makers=MAKERS)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert ran.returncode == 0, ran.stderr
    addresses = ran.stdout.split()
    assert len(set(addresses)) == len(addresses) == MAKERS, addresses

"""Whole clusters in simulated time, by seed: every row is accounted for, whatever happens.

``MINISHUFFLE_SEED=n`` runs that seed alone; ``MINISHUFFLE_SOAK=1`` runs many more of them. The runs and their
ends are summed up at the end of the tests (see ``conftest``).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from minishuffle.plan.graph import Edge
from minishuffle.plan.stages import slots_needed
from support.simulated_faults import (
    APART,
    CLOCKS_SET,
    DRAINING,
    DURING_RECOVERY,
    FORGETFUL,
    GUARDED,
    HEADLESS,
    PAUSING,
    SAVING,
    Fault,
)
from support.simulated_jobs import Strategy
from support.simulated_loop import Host, World
from support.simulated_network import Network
from support.simulated_runs import Run, Scenario
from support.simulated_writes import WriteLog
from support.soak import SOAK

pytestmark = pytest.mark.slow

BATCH: Final = 5
Play: TypeAlias = "Callable[[range, Sequence[Scenario]], None]"
FIRST: Final = 0 if SOAK else 4
"""Seed 2 takes as long as ten of those that follow, whatever happens in it, and seed 3 as long as five: the
soak plays them."""
FEW: Final = 2
MANY: Final = 10_000 if SOAK else 30
FAULTLESS = Scenario(bounded_share=0.9)
ENDING = Scenario(faults=True, bounded_share=0.8)
RECOVERING = Scenario(faults=True, bounded_share=0.6, strategy="individual")
SIDES = Scenario(faults=True, bounded_share=0.5, strategy="individual", side=True)
BLOCKING = [
    Scenario(faults=True, bounded_share=0.8, strategy=strategy, blocking=True, side=side)
    for strategy in ("individual", "individual", "region", "full")
    for side in (False, False, True)
]
TOGETHER = [Scenario(faults=True, bounded_share=0.6, strategy=strategy) for strategy in ("region", "full")]
STRATEGIES: tuple[Strategy, ...] = ("individual", "individual", "region", "full")
SHAKEN = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=DURING_RECOVERY)
    for strategy in STRATEGIES
]
LED_ANEW = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=HEADLESS) for strategy in STRATEGIES
]

SET_CLOCKS = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=CLOCKS_SET) for strategy in STRATEGIES
]

LEFT = [
    Scenario(faults=True, bounded_share=0.5, strategy=strategy, kinds=DRAINING) for strategy in STRATEGIES
]
PAUSED = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=PAUSING) for strategy in STRATEGIES
]
SAVED = [Scenario(faults=True, bounded_share=0.4, strategy=strategy, kinds=SAVING) for strategy in STRATEGIES]
CUT_APART = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=APART) for strategy in STRATEGIES
]
FORGOTTEN = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=FORGETFUL) for strategy in STRATEGIES
]
GUARANTEED = Scenario(faults=True, bounded_share=0.5, strategy="individual", kinds=GUARDED, guaranteed=True)


def name(batch: range) -> str:
    return f"seeds {batch.start} to {batch.stop - 1}"


def batches(parts: int) -> list[Any]:
    """The seeds of each test, so many of 15 parts, in batches, of which the first is the smallest."""
    starts = range(BATCH, parts * MANY // 15, BATCH)
    found = [range(FEW), range(FEW, BATCH), *(range(each, each + BATCH) for each in starts)]
    found = [range(FIRST + each.start, FIRST + each.stop) for each in found]
    if (only := os.environ.get("MINISHUFFLE_SEED")) is not None:
        found = [range(int(only), int(only) + 1)]
    return [pytest.param(each, id=name(each)) for each in found]


class Outcome(NamedTuple):
    end: str
    rows_skipped: int
    handed_over: int
    drained: int
    """Attempts that took the place of those whose slots moved."""
    paused: int = 0
    restored: int = 0
    """Attempts that have gone on with the state of those that moved."""
    saved: int = 0
    """Savepoints that are complete."""
    begun_from: int = 0
    """Attempts that have begun from a local snapshot."""
    compared: int = 0
    """Channels of which the snapshots of both ends were compared."""


@cache
def outcome(seed: int, scenario: Scenario) -> Outcome:
    """Plays a run, each once in a process."""
    run = Run(seed, scenario)
    run.play()
    counts = run.drained, run.paused, run.restored, run.saved, run.begun_from, run.compared
    return Outcome(run.end, run.rows_skipped, run.handed_over, *counts)


@pytest.fixture
def play(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Play:
    """Runs a batch of seeds, and notes how the runs ended."""

    def play(batch: range, scenarios: Sequence[Scenario]) -> None:
        ends = Counter[str]()
        for seed in batch:
            ends[outcome(seed, scenarios[seed % len(scenarios)]).end] += 1
        record_property("simulated", [request.function.__name__, batch.start, batch.stop - 1, dict(ends)])

    return play


@pytest.mark.parametrize("batch", batches(1))
def test_every_row_arrives_once(batch: range, play: Play) -> None:
    play(batch, [FAULTLESS])


@pytest.mark.parametrize("batch", batches(1))
def test_a_job_that_does_not_restart_ends_whatever_happens(batch: range, play: Play) -> None:
    play(batch, [ENDING])


@pytest.mark.parametrize("batch", batches(5))
def test_a_job_recovers_and_each_row_is_in_one_place(batch: range, play: Play) -> None:
    play(batch, [RECOVERING])


@pytest.mark.parametrize("batch", batches(1))
def test_regions_recover_and_each_row_is_in_one_place(batch: range, play: Play) -> None:
    play(batch, TOGETHER)


@pytest.mark.parametrize("batch", batches(2))
def test_a_failure_during_a_recovery_ends_in_a_running_job_or_at_a_limit(batch: range, play: Play) -> None:
    play(batch, SHAKEN)


@pytest.mark.parametrize("batch", batches(2))
def test_the_next_coordinator_goes_on_where_the_last_one_was_lost(batch: range, play: Play) -> None:
    play(batch, LED_ANEW)


@pytest.mark.parametrize("batch", batches(1)[: None if SOAK else 1])
def test_a_job_goes_on_when_the_system_clock_is_set(batch: range, play: Play) -> None:
    play(batch, SET_CLOCKS)


@pytest.mark.parametrize("batch", batches(1)[: None if SOAK else 1])
def test_a_job_goes_on_without_a_worker_that_another_cannot_reach(batch: range, play: Play) -> None:
    play(batch, CUT_APART)


@pytest.mark.parametrize("batch", batches(1))
def test_what_a_full_disk_did_not_take_is_reported_to_the_next_coordinator(batch: range, play: Play) -> None:
    play(batch, FORGOTTEN)


@pytest.mark.parametrize("batch", batches(2))
def test_workers_leave_and_each_row_is_in_one_place(batch: range, play: Play) -> None:
    play(batch, LEFT)


@pytest.mark.parametrize("batch", batches(1)[: None if SOAK else 1])
def test_a_paused_job_takes_no_row_and_goes_on_whatever_happens_meanwhile(batch: range, play: Play) -> None:
    play(batch, PAUSED)


@pytest.mark.parametrize("batch", batches(1) if SOAK or "MINISHUFFLE_SEED" in os.environ else [range(6, 8)])
def test_a_savepoint_that_is_complete_is_whole_and_the_job_goes_on(batch: range, play: Play) -> None:
    play(batch, SAVED)
    runs = [outcome(seed, SAVED[seed % len(SAVED)]) for seed in batch]
    assert any(run.saved for run in runs) or "MINISHUFFLE_SEED" in os.environ


@pytest.mark.parametrize("batch", batches(15)[: None if SOAK else 2])
def test_a_job_with_a_guarantee_loses_nothing(batch: range, play: Play) -> None:
    play(batch, [GUARANTEED])


@pytest.mark.parametrize("batch", batches(3)[: None if SOAK else 2])
def test_each_attempt_of_a_join_gets_all_of_its_side(batch: range, play: Play) -> None:
    play(batch, [SIDES])


@pytest.mark.parametrize(
    "batch", batches(2) if SOAK or "MINISHUFFLE_SEED" in os.environ else [range(14, 16), range(27, 28)]
)
def test_what_blocking_exchanges_join_has_each_row_once_in_the_end(batch: range, play: Play) -> None:
    """Of the three that always run, a worker is killed in the first, whose stages run one by one, a link
    breaks in the second, all of which is deployed at once, and both happen to the third, whose consumers wait
    for rows."""
    play(batch, BLOCKING)


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [(FAULTLESS, 4), (ENDING, 4), (RECOVERING, 4), (GUARANTEED, 99_004)],
    ids=["faultless", "ending", "recovering", "guaranteed"],
)
def test_a_seed_decides_everything(scenario: Scenario, seed: int) -> None:
    first, second = Run(seed, scenario), Run(seed, scenario)
    first.play()
    second.play()
    assert first.steps == second.steps and first.trace == second.trace


def test_the_seeds_reach_every_end() -> None:
    """Were one never reached, the runs above would prove less than they seem to."""
    missing = {"finished", "finished_with_loss", "canceled", "failed"}
    for seed in range(FIRST, 80):
        missing.discard(outcome(seed, RECOVERING).end)
        if not missing:
            return
    assert not missing


def test_rows_that_a_producer_skips_reach_nobody_and_there_are_some() -> None:
    """Every run compares its log of what producers skipped and wrote with what came (``WriteLog.check``); so
    it does for what consumers on the same worker get as it is."""
    skipped = handed_over = 0
    for seed in range(FIRST, 80):
        run = outcome(seed, RECOVERING)
        skipped += run.rows_skipped
        handed_over += run.handed_over
        if skipped and handed_over:
            return
    assert skipped and handed_over


def test_jobs_come_to_their_pauses() -> None:
    assert any(outcome(seed, PAUSED[seed % len(PAUSED)]).paused for seed in range(FIRST, 20))


def test_tasks_begin_from_snapshots_that_are_compared() -> None:
    runs = (outcome(seed, GUARANTEED) for seed in range(FIRST, 80))
    assert any(run.begun_from and run.compared for run in runs)


@pytest.mark.parametrize(("replaces", "end"), [(True, "finished"), (False, "failed")])
def test_a_job_with_a_guarantee_needs_another_worker_for_one_that_is_lost(replaces: bool, end: str) -> None:
    """No slot is to spare."""
    run = Run(7, GUARANTEED)
    run.slots = [1] * slots_needed(run.plan.graph)
    run.faults, run.replaces = [Fault(0.02, "kill")], replaces
    run.play()
    assert run.end == end


def test_in_a_few_runs_with_a_guarantee_no_other_worker_comes() -> None:
    never = sum(not Run(seed, GUARANTEED).replaces for seed in range(100))
    assert 0 < never < 15


def test_slots_of_workers_that_leave_move_with_their_state() -> None:
    missing = {"drained", "restored"}
    for seed in range(FIRST, 20):
        run = outcome(seed, LEFT[seed % len(LEFT)])
        missing -= {name for name in missing if getattr(run, name)}
        if not missing:
            return
    assert not missing


@pytest.mark.parametrize(
    ("written", "skipped", "problem"),
    [
        ({4}, {5}, ""),
        ({4, 5}, {5}, "1 rows for .* were skipped and written"),
        (set(), {4}, r"which \(0, 0, 1\) had skipped"),
        ({5}, set(), r"which \(0, 0, 1\) never wrote"),
    ],
)
def test_the_log_of_what_was_skipped_can_fail_a_run(
    written: set[int], skipped: set[int], problem: str
) -> None:
    """Row 4 of attempt 1 of subtask 0[0] came to 1[2]."""
    sender, log = (0, 0, 1), WriteLog()
    log.written[0, 2] = {(sender, number) for number in written}
    log.skipped[0, 2] = {(sender, number) for number in skipped}
    with pytest.raises(AssertionError, match=problem) if problem else nullcontext():
        log.check([Edge(source=0, target=1, partitioner="hash")], {(1, 2, 7): {sender: [4]}})


def test_what_has_not_begun_ends_with_its_process() -> None:
    begun = []

    async def begin() -> None:
        begun.append(True)

    world = World(0)
    host = Host(world, Network(world), "process")
    host.stop()
    host.run(begin(), "main")
    host.kill()  # With a warning, which is an error, if nothing had ended it.
    assert not begun and not asyncio.all_tasks(host.loop)

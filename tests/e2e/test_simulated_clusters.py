"""Whole clusters in simulated time, by seed: every row is accounted for, whatever happens.

``MINISHUFFLE_SEED=n`` runs that seed alone; ``MINISHUFFLE_SOAK=1`` runs many more of them.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from support.simulated_faults import DURING_RECOVERY
from support.simulated_jobs import Strategy
from support.simulated_runs import Run, Scenario

BATCH: Final = 10
MANY: Final = 10_000 if os.environ.get("MINISHUFFLE_SOAK") == "1" else 150
FAULTLESS = Scenario(bounded_share=0.9)
ENDING = Scenario(faults=True, bounded_share=0.8)
RECOVERING = Scenario(faults=True, bounded_share=0.6, strategy="individual")
SIDES = Scenario(faults=True, bounded_share=0.5, strategy="individual", side=True)
TOGETHER = [Scenario(faults=True, bounded_share=0.6, strategy=strategy) for strategy in ("region", "full")]
STRATEGIES: tuple[Strategy, ...] = ("individual", "individual", "region", "full")
SHAKEN = [
    Scenario(faults=True, bounded_share=0.6, strategy=strategy, kinds=DURING_RECOVERY)
    for strategy in STRATEGIES
]


def batches(share: float) -> list[range]:
    """The seeds of each test; a batch of them costs less than a test of each."""
    if (only := os.environ.get("MINISHUFFLE_SEED")) is not None:
        return [range(int(only), int(only) + 1)]
    return [range(first, first + BATCH) for first in range(0, int(share * MANY), BATCH)]


def name(batch: range) -> str:
    return f"seeds {batch.start} to {batch.stop - 1}"


@pytest.mark.parametrize("batch", batches(0.2), ids=name)
def test_every_row_arrives_once(batch: range) -> None:
    for seed in batch:
        Run(seed, FAULTLESS).play()


@pytest.mark.parametrize("batch", batches(0.2), ids=name)
def test_a_job_that_does_not_restart_ends_whatever_happens(batch: range) -> None:
    for seed in batch:
        Run(seed, ENDING).play()


@pytest.mark.parametrize("batch", batches(0.6), ids=name)
def test_a_job_recovers_and_each_row_is_in_one_place(batch: range) -> None:
    for seed in batch:
        Run(seed, RECOVERING).play()


@pytest.mark.parametrize("batch", batches(0.1), ids=name)
def test_regions_recover_and_each_row_is_in_one_place(batch: range) -> None:
    for seed in batch:
        Run(seed, TOGETHER[seed % 2]).play()


@pytest.mark.parametrize("batch", batches(0.2), ids=name)
def test_a_failure_during_a_recovery_ends_in_a_running_job_or_at_a_limit(batch: range) -> None:
    for seed in batch:
        Run(seed, SHAKEN[seed % len(SHAKEN)]).play()


@pytest.mark.parametrize("batch", batches(0.3), ids=name)
def test_each_attempt_of_a_join_gets_all_of_its_side(batch: range) -> None:
    for seed in batch:
        Run(seed, SIDES).play()


@pytest.mark.parametrize(
    "scenario", [FAULTLESS, ENDING, RECOVERING], ids=["faultless", "ending", "recovering"]
)
def test_a_seed_decides_everything(scenario: Scenario) -> None:
    first, second = Run(4, scenario), Run(4, scenario)
    first.play()
    second.play()
    assert first.steps == second.steps and first.trace == second.trace


def test_the_seeds_reach_every_end() -> None:
    """Were one never reached, the runs above would prove less than they seem to."""
    missing = {"finished", "finished_with_loss", "canceled", "failed"}
    for seed in range(80):
        run = Run(seed, RECOVERING)
        run.play()
        missing.discard(run.end)
        if not missing:
            return
    assert not missing

"""Timelines of recoveries: milestones from what workers report in any number of parts."""

from __future__ import annotations

import pytest

from minishuffle.coordinator.jobs.recoveries import Milestone, Recoveries
from minishuffle.wire.messages import RecoveryStep, Step

KEY = (1, 0)


def step(kind: Step, channels: int = 1, age: float = 0.0) -> RecoveryStep:
    return RecoveryStep(operator=1, index=0, attempt=2, step=kind, channels=channels, age=age)


def test_a_side_is_reattached_with_its_last_channel() -> None:
    recoveries = Recoveries()
    recoveries.moved(KEY, "failed", 10.0)
    recoveries.deployed(KEY, 10.5, inputs=3, outputs=2)
    assert recoveries.reached(KEY, step("inputs", 2), 11.0) is None
    found = recoveries.reached(KEY, step("inputs", 1, age=0.25), 11.5)
    assert found == Milestone("inputs reattached", 11.25, "reads from all 3 producers")
    assert recoveries.since(KEY, 11.25) == 1.25
    assert recoveries.reached(KEY, step("first record"), 12.0) == Milestone(
        "first record", 12.0, "has passed on its first batch"
    )
    found = recoveries.reached(KEY, step("outputs", 2), 12.0)
    assert found == Milestone("outputs reattached", 12.0, "is read by all 2 consumers")
    for kind in ("inputs", "outputs", "first record"):
        assert recoveries.reached(KEY, step(kind), 13.0) is None, "a link that breaks later is no recovery"


def test_a_source_has_no_inputs_and_a_sink_no_outputs() -> None:
    recoveries = Recoveries()
    recoveries.moved(KEY, "failed", 10.0)
    recoveries.deployed(KEY, 10.5, inputs=0, outputs=0)
    assert recoveries.reached(KEY, step("inputs"), 11.0) is None
    assert recoveries.reached(KEY, step("first record"), 11.0) is not None


def test_a_task_with_a_snapshot_reads_it_is_sent_what_is_retained_and_catches_up() -> None:
    recoveries = Recoveries(guaranteed=True)
    recoveries.moved(KEY, "lost", 10.0)
    recoveries.deployed(KEY, 10.5, inputs=2, outputs=0, snapshots=True)
    found = recoveries.reached(KEY, step("snapshot read"), 11.0)
    assert found == Milestone("snapshot read", 11.0, "has the state of its snapshot")
    assert recoveries.reached(KEY, step("inputs", 2), 11.5) is not None
    assert recoveries.reached(KEY, step("replayed"), 12.0) is None
    found = recoveries.reached(KEY, step("replayed"), 13.0)
    assert found == Milestone("replayed", 13.0, "was sent what all 2 producers retained for it")
    found = recoveries.reached(KEY, step("caught up"), 14.0)
    assert found == Milestone("caught up", 14.0, "has nothing left to do, for the first time")
    assert recoveries.reached(KEY, step("first record"), 15.0) is not None
    taken = {phase: histogram.total for phase, histogram in recoveries.seconds.items()}
    assert taken == {
        **{"reschedule": 0.5, "reattach": 1.5, "first_record": 5.0},
        **{"snapshot_read": 1.0, "replayed": 3.0, "caught_up": 4.0},
    }
    assert recoveries.reached(KEY, step("caught up"), 16.0) is None


def test_a_failure_meanwhile_begins_anew() -> None:
    recoveries = Recoveries()
    recoveries.moved(KEY, "failed", 10.0)
    recoveries.deployed(KEY, 10.5, inputs=2, outputs=0)
    assert recoveries.reached(KEY, step("inputs"), 11.0) is None
    recoveries.moved(KEY, "lost", 20.0)
    assert recoveries.since(KEY, 20.0) == 0.0
    assert recoveries.reached(KEY, step("inputs"), 20.5) is None, "not deployed again yet"
    recoveries.deployed(KEY, 20.5, inputs=2, outputs=0)
    assert recoveries.reached(KEY, step("inputs"), 21.0) is None
    assert recoveries.reached(KEY, step("inputs"), 21.5) is not None
    assert recoveries.since(KEY, 21.5) == 1.5


def test_what_happens_to_a_subtask_that_does_not_recover_has_no_time() -> None:
    recoveries = Recoveries()
    assert recoveries.since(KEY, 10.0) == 0.0
    assert recoveries.reached(KEY, step("first record"), 10.0) is None
    recoveries.moved(KEY, "failed", 10.0)
    recoveries.moved(KEY, "finished", 10.5)
    assert recoveries.since(KEY, 11.0) == 0.0
    recoveries.moved(KEY, "restarting", 12.0)
    recoveries.moved(KEY, "waiting for a slot", 13.0)
    assert recoveries.since(KEY, 13.5) == 1.5, "it restarts for want of what it has written"


def test_each_phase_is_timed_from_the_detection() -> None:
    recoveries = Recoveries()
    recoveries.moved(KEY, "lost", 10.0)
    recoveries.deployed(KEY, 10.5, inputs=1, outputs=1)
    recoveries.reached(KEY, step("inputs"), 11.0)
    assert recoveries.seconds["reattach"].count == 0, "its consumers are missing"
    recoveries.reached(KEY, step("outputs", age=0.25), 12.25)
    recoveries.reached(KEY, step("first record"), 13.0)
    taken = {phase: (histogram.count, histogram.total) for phase, histogram in recoveries.seconds.items()}
    assert taken == {"reschedule": (1, 0.5), "reattach": (1, 2.0), "first_record": (1, 3.0)}


def test_a_recovery_that_waits_for_the_end_of_a_pause_is_not_timed_to_its_first_record() -> None:
    recoveries = Recoveries()
    for detected_at in (10.0, 80.0):
        recoveries.moved(KEY, "lost", detected_at)
        recoveries.deployed(KEY, detected_at + 0.5, inputs=1, outputs=0)
        recoveries.reached(KEY, step("inputs"), detected_at + 1.0)
        if detected_at == 10.0:
            recoveries.resumed()
        found = recoveries.reached(KEY, step("first record"), detected_at + 60.0)
        assert found is not None and found.kind == "first record"
    taken = {phase: (histogram.count, histogram.total) for phase, histogram in recoveries.seconds.items()}
    assert taken == {"reschedule": (2, 1.0), "reattach": (2, 2.0), "first_record": (1, 60.0)}


def test_a_recovery_that_is_recalled_goes_on_from_its_detection() -> None:
    before, after = Recoveries(), Recoveries()
    before.moved(KEY, "lost", 10.0)
    before.moved((2, 0), "finished", 10.0)
    for key in (KEY, (2, 0), (3, 0)):
        after.recall(key, before.record(key))
    assert after.since(KEY, 12.0) == 2.0
    assert (after.record((2, 0)), after.record((3, 0))) == (None, None)
    after.deployed(KEY, 12.0, inputs=1, outputs=0)
    assert after.reached(KEY, step("inputs"), 13.0) is not None


@pytest.mark.parametrize(
    ("end", "dies"), [("failed", True), ("lost", True), ("abandoned", True), ("canceled", False)]
)
def test_recoveries_that_never_reach_their_first_record_are_counted(end: str, dies: bool) -> None:
    recoveries = Recoveries()
    recoveries.moved(KEY, "lost", 10.0)
    assert (recoveries.unfinished, recoveries.died_in(KEY)) == (0, None), "it was no recovery"
    recoveries.moved(KEY, "lost", 10.1)
    assert recoveries.unfinished == 0, "it was not deployed"
    steps: tuple[Step, ...] = ("inputs", "outputs", "first record")
    for number, died_in in enumerate(steps):
        recoveries.deployed(KEY, 10.5, inputs=1, outputs=1)
        for each in steps[:number]:
            recoveries.reached(KEY, step(each), 11.0)
        recoveries.moved(KEY, end, 12.0)
        assert recoveries.died_in(KEY) == (died_in if dies else None)
    assert recoveries.unfinished == (3 if dies else 0)
    recoveries.deployed(KEY, 13.0, inputs=1, outputs=0)
    recoveries.reached(KEY, step("first record"), 14.0)
    recoveries.moved(KEY, end, 15.0)
    assert (recoveries.unfinished, recoveries.died_in(KEY)) == (3 if dies else 0, None)

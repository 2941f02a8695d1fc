"""The slots of a job: whose they are, and what is left of them when a worker is lost."""

from __future__ import annotations

from minishuffle.coordinator.scheduling.slots import NOWHERE, Slots

LOST = "worker was lost: it was silent for 3 s"


def test_slots_of_a_lost_worker_are_held_by_nobody_until_they_move() -> None:
    slots = Slots((1, 2, 1), {1: 10, 2: 5})
    assert slots.held() == {1: 2, 2: 1}
    slots.block(1, 0)
    slots.block(2, 1)
    slots.worker_lost(1, LOST)
    slots.validate()
    assert (slots.held(), slots.vacant, slots.segments) == ({2: 1}, {0, 2}, {2: 5})
    assert slots.blocked == {(2, 1)}, "no thread runs there any more"
    assert slots.placement == (1, 2, 1), "where they were"
    slots.move(2, 3, 7)
    slots.validate()
    assert (slots.held(), slots.vacant, slots.placement) == ({2: 1, 3: 1}, {0}, (1, 2, 3))
    assert slots.segments == {2: 5, 3: 7}


def test_a_worker_that_takes_a_slot_over_may_be_lost_in_turn() -> None:
    slots = Slots((1, 2), {1: 10, 2: 5})
    slots.worker_lost(1, LOST)
    slots.move(0, 2, 15)
    slots.worker_lost(2, LOST)
    slots.validate()
    assert (slots.held(), slots.vacant, slots.segments) == ({}, {0, 1}, {})


def test_a_slot_is_wanting_for_the_loss_and_for_what_others_lack() -> None:
    slots = Slots((1, 2), {1: 10, 2: 5})
    assert slots.why_wanting(1) == "worker 1 was lost", "as an earlier coordinator knew it"
    slots.worker_lost(1, LOST)
    slots.shortage = "no other worker is there"
    assert slots.why_wanting(1) == f"{LOST}; no other worker is there"


def test_a_slot_moves_when_nothing_runs_where_it_was() -> None:
    slots = Slots((1, 2, 1), {1: 10, 2: 5})
    slots.move(2, 3, 4)
    slots.validate()
    assert (slots.held(), slots.on([1]), slots.coming(3)) == ({1: 2, 2: 1, 3: 1}, [0], [2])
    slots.arrive(2)
    slots.validate()
    assert (slots.placement, slots.held(), slots.segments) == (
        (1, 2, 3),
        {1: 1, 2: 1, 3: 1},
        {1: 10, 2: 5, 3: 4},
    )
    slots.move(0, 2, 8)
    slots.arrive(0)
    slots.validate()
    assert (slots.placement, slots.held(), slots.left) == ((2, 2, 3), {2: 2, 3: 1}, {1})
    assert slots.workers() == {1, 2, 3}, "the first may keep what tasks that have finished wrote"
    slots.worker_lost(1, LOST)
    slots.validate()
    assert (slots.workers(), slots.vacant) == ({2, 3}, set())


def test_a_slot_that_moves_is_not_lost_with_the_worker_that_it_leaves() -> None:
    slots = Slots((1, 1), {1: 10})
    slots.move(0, 2, 5)
    slots.worker_lost(1, LOST)
    slots.validate()
    assert (slots.placement[0], slots.vacant, slots.segments) == (2, {1}, {2: 5})


def test_a_slot_stays_if_the_worker_that_it_moves_to_is_lost() -> None:
    slots = Slots((1,), {1: 10})
    slots.move(0, 2, 5)
    slots.worker_lost(2, LOST)
    slots.validate()
    assert (slots.placement, slots.vacant, slots.moving, slots.segments) == ((1,), set(), {}, {1: 10})


def test_slots_that_are_evicted_are_nobodys() -> None:
    slots = Slots((1, 2, 3), {1: 10, 2: 5, 3: 4})
    slots.move(1, 1, 12)
    slots.evict(1, [0])
    slots.validate()
    slots.arrive(0)
    slots.validate()
    assert (slots.vacant, slots.held(), slots.left) == ({0}, {2: 1, 3: 1}, {1})
    assert slots.why_wanting(1) == "worker 1 is to leave"
    slots.arrive(1)
    slots.validate()
    assert (slots.vacant, slots.segments) == ({0, 1}, {3: 4})


def test_no_slot_comes_to_a_worker_that_is_evicted() -> None:
    slots = Slots((1,), {1: 10})
    slots.move(0, 2, 5)
    slots.evict(2, [])
    slots.validate()
    assert (slots.moving, slots.segments) == ({0: NOWHERE}, {1: 10})

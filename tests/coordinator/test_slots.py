"""The slots of a job: whose they are, and what is left of them when a worker is lost."""

from __future__ import annotations

from minishuffle.coordinator.slots import Slots

LOST = "worker was lost: it was silent for 3 s"


def test_slots_of_a_lost_worker_are_held_by_nobody_until_they_move() -> None:
    slots = Slots((1, 2, 1), {1: 10, 2: 5})
    assert slots.held() == {1: 2, 2: 1}
    slots.worker_lost(1, LOST)
    slots.validate()
    assert (slots.held(), slots.lost, slots.segments) == ({2: 1}, {0, 2}, {2: 5})
    assert slots.placement == (1, 2, 1), "where they were"
    slots.move(2, 3, 7)
    slots.validate()
    assert (slots.held(), slots.lost, slots.placement) == ({2: 1, 3: 1}, {0}, (1, 2, 3))
    assert slots.segments == {2: 5, 3: 7}


def test_a_worker_that_takes_a_slot_over_may_be_lost_in_turn() -> None:
    slots = Slots((1, 2), {1: 10, 2: 5})
    slots.worker_lost(1, LOST)
    slots.move(0, 2, 15)
    slots.worker_lost(2, LOST)
    slots.validate()
    assert (slots.held(), slots.lost, slots.segments) == ({}, {0, 1}, {})


def test_a_slot_is_wanting_for_the_loss_and_for_what_others_lack() -> None:
    slots = Slots((1, 2), {1: 10, 2: 5})
    assert slots.why_wanting(1) == "worker 1 was lost", "as an earlier coordinator knew it"
    slots.worker_lost(1, LOST)
    slots.shortage = "no other worker is there"
    assert slots.why_wanting(1) == f"{LOST}; no other worker is there"

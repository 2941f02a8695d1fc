"""Which slots the threads of abandoned tasks still hold."""

from __future__ import annotations

from functools import partial

from minishuffle.worker.tasks.threadwatchdog import StuckThreads
from support.attempts import attempt


def test_a_slot_is_held_until_the_last_thread_in_it_has_ended() -> None:
    alive = [True, True, True]
    stuck = StuckThreads()
    keys = [attempt(0, 1), attempt(1, 1), attempt(0, 0, job="j2")]
    for number, key in enumerate(keys):
        stuck.add(key, key.subtask.index, partial(alive.__getitem__, number))
    assert stuck.slots() == {"j1": [1], "j2": [0]} and len(stuck) == 3
    for ended, left in ((0, {"j1": [1], "j2": [0]}), (1, {"j2": [0]}), (2, {})):
        alive[ended] = False
        assert stuck.slots() == left and len(stuck) == 2 - ended

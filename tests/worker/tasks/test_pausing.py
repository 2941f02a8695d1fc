"""Where an attempt is to stop, and its clock."""

from __future__ import annotations

from minishuffle.wire.messages import WriteState
from minishuffle.worker.tasks.pausing import TaskPause


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_barrier_is_due_until_it_is_over_and_words_that_come_late_change_nothing() -> None:
    pause = TaskPause(Clock())
    assert (pause.due, pause.ended, pause.starts_paused) == (0, 0, False)
    pause.want(1, paused=True)
    assert (pause.due, pause.ended) == (1, 0)
    pause.want(1, paused=False)
    assert (pause.due, pause.ended) == (0, 1)
    pause.want(1, paused=True)
    assert pause.due == 0
    pause.want(3, paused=True)
    assert (pause.due, pause.ended) == (3, 2), "another one tells that those before are over"


def test_an_attempt_that_follows_into_a_pause_begins_behind_its_barrier() -> None:
    assert TaskPause(Clock(), barrier=4, paused=True).due == 4
    after = TaskPause(Clock(), barrier=4)
    assert (after.due, after.ended) == (0, 4)


def test_the_clock_stands_still_with_the_task() -> None:
    clock = Clock()
    pause = TaskPause(clock)
    for barrier in (1, 2):
        clock.time += 1
        pause.stop(barrier)
        assert pause.at == barrier
        clock.time += 10
        pause.go_on()
        assert pause.at == 0
    assert (pause.now(), pause.stood_seconds()) == (102.0, 20.0)


def asked(savepoint: int, barrier: int) -> WriteState:
    return WriteState(term=1, job="j1", savepoint=savepoint, barrier=barrier, folder="/s", goes_on=True)


def test_for_a_durable_snapshot_the_task_comes_to_a_barrier_and_goes_on() -> None:
    pause = TaskPause(Clock())
    assert pause.save(asked(1, barrier=4))
    assert (pause.barrier, pause.due, pause.ended) == (4, 0, 0)
    assert not pause.save(asked(1, barrier=4)), "it was asked before"
    taken = pause.take_cut()
    assert taken is not None and taken.savepoint == 1
    assert (pause.barrier, pause.take_cut()) == (0, None)


def test_the_end_of_its_barrier_or_another_barrier_takes_a_durable_snapshot_back() -> None:
    for barrier, paused in ((4, False), (5, True)):
        pause = TaskPause(Clock())
        pause.want(3, paused=False)
        assert pause.save(asked(1, barrier=4))
        pause.want(3, paused=False)
        assert pause.barrier == 4
        pause.want(barrier, paused=paused)
        assert (pause.barrier, pause.take_cut()) == (barrier if paused else 0, None)
        assert not pause.save(asked(2, barrier=4)), "that barrier has ended"

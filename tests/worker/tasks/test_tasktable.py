"""The attempts of a worker, from deployment to release."""

from __future__ import annotations

from minishuffle.errors import PartitionLost
from minishuffle.ids import AttemptId
from minishuffle.wire.messages import TaskSpec
from minishuffle.worker.tasks.tasktable import TaskTable
from support.attempts import attempt

FIRST, SECOND, OTHER = attempt(0), attempt(0, number=2), attempt(1)


def spec_of(key: AttemptId) -> TaskSpec:
    fields = {"operator": key.subtask.operator, "index": key.subtask.index, "attempt": key.attempt}
    return TaskSpec(name="count", parallelism=1, inputs=[], outputs=[], **fields)


def table(*keys: AttemptId) -> TaskTable:
    """With these attempts; all but OTHER wait for their consumers."""
    tasks = TaskTable()
    for key in keys:
        assert tasks.add(key, spec_of(key), waits=key != OTHER)
    return tasks


def test_no_attempt_is_deployed_behind_a_later_one_until_its_job_has_ended() -> None:
    tasks = table(SECOND)
    assert not tasks.add(FIRST, spec_of(FIRST), waits=True)
    tasks.end(SECOND)
    tasks.remove(SECOND)
    assert (tasks.held(), tasks.jobs()) == ([], ["j1"])
    assert not tasks.add(SECOND, spec_of(SECOND), waits=True)
    tasks.prepare("j0", {1: b"count"})
    assert tasks.jobs() == ["j0", "j1"]
    tasks.forget("j1")
    tasks.forget("j0")
    assert (tasks.jobs(), tasks.prepared("j0")) == ([], {})
    assert tasks.add(SECOND, spec_of(SECOND), waits=True)


def test_what_is_cancelled_is_overdue_unless_it_ends() -> None:
    tasks = table(FIRST, OTHER)
    assert tasks.cancel(FIRST, by=3.0) and tasks.cancel(OTHER, by=4.0)
    assert not tasks.cancel(FIRST, by=9.0)
    assert (tasks.next_deadline(), tasks.overdue(2.9), tasks.overdue(3.0)) == (3.0, [], [FIRST])
    tasks.validate()
    tasks.end(FIRST)
    assert (tasks.runs(FIRST), tasks.runs(OTHER), tasks.next_deadline()) == (False, True, 4.0)
    assert not tasks.cancel(FIRST, by=9.0)
    tasks.validate()


def test_all_wait_for_their_consumers_when_those_that_do_not_have_ended() -> None:
    tasks = table(FIRST, OTHER)
    assert not tasks.all_wait()
    tasks.end(OTHER)
    assert tasks.all_wait()


def test_a_lost_partition_is_reported_once_and_when_its_task_has_finished() -> None:
    tasks = table(FIRST, OTHER)
    tasks.lose(FIRST, PartitionLost("its file is gone"))
    assert tasks.take_lost(FIRST) is None
    tasks.end(FIRST, finished=True)
    lost = tasks.take_lost(FIRST)
    assert lost is not None and (lost.task, lost.text) == ("count", "its file is gone")
    tasks.end(FIRST)
    assert tasks.take_lost(FIRST) is None
    tasks.lose(FIRST, PartitionLost("again"))
    assert tasks.take_lost(FIRST) is not None, "it is still one that has finished"

"""Jobs whose stages are deployed one by one: who waits for what, with which slots, and what a death costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import PeerLost, ResourceExhausted
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import DeployTasks, ReleaseJob, Shutdown, TasksRestarted
from minishuffle.wire.requests import (
    CancelJob,
    DrainWorker,
    GetEvents,
    JobInfo,
    PauseJob,
    ResumeJob,
    SubmitJob,
)

if TYPE_CHECKING:
    from conftest import FakeCluster

READ, COUNT = 0, 1
WAITS = ("waiting", 0, 0)
"""State, attempt and worker of a subtask that was not deployed."""


def staged(*widths: int, edges: tuple[str, ...] = ("0=1",), **settings: Any) -> JobGraph:
    """Edges as ``0=1``, blocking, and ``0-1``, pipelined; those whose ends are there."""
    edges = tuple(edge for edge in edges if int(edge[2]) < len(widths))
    fed = {int(edge[2]) for edge in edges}
    return JobGraph(
        vertices=[
            Vertex(
                name=f"v{number}",
                parallelism=width,
                operators=[f"v{number}"],
                is_source=number not in fed,
                program=b"p",
            )
            for number, width in enumerate(widths)
        ],
        edges=[
            Edge(
                source=int(edge[0]),
                target=int(edge[2]),
                partitioner="hash",
                kind="blocking" if edge[1] == "=" else "pipelined_bounded",
            )
            for edge in edges
        ],
        settings=JobSettings(schedule="stages", **settings),
    )


def where(info: JobInfo) -> dict[tuple[int, int], tuple[str, int, int]]:
    """By subtask: state, attempt, worker."""
    return {(task.operator, task.index): (task.state, task.attempt, task.worker) for task in info.tasks}


def stages(info: JobInfo) -> list[tuple[str, int]]:
    return [(stage.state, stage.version) for stage in info.stages]


def waits(info: JobInfo) -> list[str]:
    return [wait.text for wait in info.deploy_waits]


def events(cluster: FakeCluster, *kinds: str) -> list[str]:
    return [each.text for each in cluster.request(GetEvents(job="j1")).events if each.kind in kinds]


def end(cluster: FakeCluster, operator: int, state: str = "finished", job: str = "j1") -> None:
    """What is deployed of a vertex runs, and ends."""
    for worker in list(cluster.workers.values()):
        for key, task in list(worker.tasks.items()):
            if key[:2] == (job, operator):
                cluster.report(worker, key, "running", attempt=task.attempt)
                if state != "running":
                    cluster.report(worker, key, state, attempt=task.attempt)


def test_a_job_of_two_stages_runs_where_the_slots_suffice_for_one(cluster: FakeCluster) -> None:
    worker = cluster.add()
    cluster.submit(staged(2, 2))
    info = cluster.show("j1")
    assert where(info) == {
        (READ, 0): ("created", 1, 1),
        (READ, 1): ("created", 1, 1),
        (COUNT, 0): WAITS,
        (COUNT, 1): WAITS,
    }
    assert (info.state, stages(info)) == ("created", [("deployed", 1), ("waiting", 1)])
    assert info.task_states == {"created": 2, "waiting": 2}
    cluster.report(worker, ("j1", READ, 0), "running")
    cluster.report(worker, ("j1", READ, 1), "running")
    cluster.report(worker, ("j1", READ, 0), "finished")
    assert waits(cluster.show("j1")) == [
        "stage 2 of 2 (v1) waits for v0 => v1 (1 of 2 partitions are complete)"
    ]
    assert cluster.show("j1").state == "running" and cluster.free_slots() == [0]
    cluster.report(worker, ("j1", READ, 1), "finished")
    info = cluster.show("j1")
    assert stages(info) == [("complete", 1), ("deployed", 1)] and waits(info) == []
    assert [where(info)[COUNT, index] for index in (0, 1)] == [("created", 1, 1)] * 2
    deployed = worker.got(DeployTasks)[-1]
    assert [(task.operator, task.index, task.attempt) for task in deployed.tasks] == [
        (COUNT, 0, 1),
        (COUNT, 1, 1),
    ]
    assert list(deployed.channels(deployed.tasks[0].inputs[0])) == [(0, 1, 1), (1, 1, 1)]
    end(cluster, COUNT)
    info = cluster.show("j1")
    assert (info.state, info.restarts, cluster.free_slots()) == ("finished", {}, [2])
    assert events(cluster, "stage deployed", "exchange complete", "slots given back") == [
        "stage 1 of 2 (v0) in 2 slots of workers 1",
        "v0 => v1: all 2 partitions can be read",
        "2, in which nothing is to run for now",
        "stage 2 of 2 (v1) in 2 slots of workers 1",
    ]


def test_what_is_stored_is_read_where_it_is_and_stays_there(cluster: FakeCluster) -> None:
    """The stage that reads goes elsewhere: there are more free slots."""
    one = cluster.add(slots=1)
    cluster.submit(staged(1, 1))
    two = cluster.add(slots=2)
    end(cluster, READ)
    assert where(cluster.show("j1"))[COUNT, 0] == ("created", 1, 2)
    (deployed,) = two.got(DeployTasks)
    assert list(deployed.channels(deployed.tasks[0].inputs[0])) == [(0, 1, 1)]
    assert {address.worker for address in deployed.workers} == {1, 2}
    (restarted,) = one.got(TasksRestarted)
    assert [address.worker for address in restarted.workers] == [2], "it is to let the consumer in"
    assert cluster.free_slots() == [1, 1] and not one.got(ReleaseJob)
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished" and len(one.got(ReleaseJob)) == 1


def test_a_stage_that_finds_too_few_slots_waits_whole_and_as_long_as_it_takes(cluster: FakeCluster) -> None:
    cluster.add()
    cluster.submit(staged(1, 2))
    cluster.submit(staged(1))
    assert cluster.free_slots() == [0]
    end(cluster, 0)
    text = "stage 2 of 2 (v1) waits for 2 free slots: 1 of 2 are free"
    assert waits(cluster.show("j1")) == [text] == events(cluster, "stage waiting")
    assert cluster.free_slots() == [1], "no half of it was deployed"
    cluster.advance(3 * cluster.settings.slot_timeout)
    assert (cluster.show("j1").state, cluster.show("j1").slot_waits) == ("running", [])
    assert cluster.refusal(SubmitJob(name="x", python="3.11", graph=staged(2).to_bytes())) == (
        ResourceExhausted.code,
        "job needs 2 slots (greatest parallelism), 1 are free of 2: start more workers (--workers/--slots) "
        "or lower --parallelism",
    )
    end(cluster, 0, job="j2")
    assert [where(cluster.show("j1"))[1, index] for index in (0, 1)] == [("created", 1, 1)] * 2
    assert waits(cluster.show("j1")) == []


def test_what_another_job_gives_back_is_taken_at_once(cluster: FakeCluster) -> None:
    cluster.add(slots=3)
    cluster.submit(staged(1, 2))
    cluster.submit(staged(2, 1))
    end(cluster, 0, job="j1")
    assert cluster.show("j1").deploy_waits and cluster.free_slots() == [1]
    end(cluster, 0, job="j2")
    assert stages(cluster.show("j1")) == stages(cluster.show("j2")) == [("complete", 1), ("deployed", 1)]


def test_a_stage_that_does_not_fit_holds_back_those_behind_it(cluster: FakeCluster) -> None:
    """A small one would take the slots from the wide one for ever."""
    cluster.add(slots=3)
    cluster.submit(staged(1, 3, 1, 2, edges=("0=1", "2=3")))
    assert where(cluster.show("j1"))[2, 0] == ("created", 1, 1), "stages that run at one time share slots"
    cluster.submit(staged(1))
    end(cluster, 2, "running")
    end(cluster, 0)
    assert stages(cluster.show("j1")) == [
        ("complete", 1),
        ("waiting", 1),
        ("deployed", 1),
        ("waiting", 1),
    ]
    end(cluster, 2)
    assert [wait.operators for wait in cluster.show("j1").deploy_waits] == [[1], [3]]
    assert "waits for slots, behind stages before it" in waits(cluster.show("j1"))[1]
    end(cluster, 0, job="j2")
    assert stages(cluster.show("j1")) == [("complete", 1), ("deployed", 1)] * 2


@pytest.mark.parametrize("standby", [False, True])
def test_a_stage_of_which_a_partition_is_lost_while_nothing_runs_runs_again_at_once(
    cluster: FakeCluster, standby: bool
) -> None:
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(staged(1, 2))
    cluster.submit(staged(1))
    if standby:
        cluster.add(slots=1, standby=True)
    end(cluster, READ)
    assert cluster.show("j1").task_states == {"finished": 1, "waiting": 2}
    cluster.lose(one)
    if not standby:
        assert where(cluster.show("j1"))[READ, 0] == ("waiting for a slot", 1, 1)
        cluster.add(slots=1)
    info = cluster.show("j1")
    assert where(info)[READ, 0] == ("created", 2, 3) and stages(info) == [("deployed", 2), ("waiting", 1)]
    assert events(cluster, "stage restarting") == ["stage 1 of 2 (v0) runs again, version 2"]
    assert all(" is lost: worker 1 " in text for text in events(cluster, "task lost"))
    end(cluster, 0, job="j2")
    end(cluster, READ)
    assert stages(cluster.show("j1")) == [("complete", 2), ("deployed", 1)]
    (*_, deployed) = two.got(DeployTasks)
    assert list(deployed.channels(deployed.tasks[0].inputs[0])) == [(0, 2, 3)], "it reads the next version"
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished"


def test_what_runs_again_goes_into_the_slots_of_who_waits_for_it(cluster: FakeCluster) -> None:
    one = cluster.add(slots=1)
    cluster.submit(staged(1, 1))
    cluster.add(slots=2)
    end(cluster, READ)
    cluster.lose(one)
    assert where(cluster.show("j1")) == {(READ, 0): ("created", 2, 2), (COUNT, 0): ("created", 1, 2)}
    assert cluster.free_slots()[-1] == 1, "it has no slot of its own"


def test_what_lost_partitions_take_along_leaves_those_out_that_wait(cluster: FakeCluster) -> None:
    """Another division of the rows: whoever has read the last one runs again."""
    one = cluster.add(slots=1)
    graph = staged(1, 1, 2, edges=("0=1", "1=2"))
    edges = [edge.model_copy(update={"partitioner": "rebalance"}) for edge in graph.edges]
    cluster.add(slots=1)
    cluster.submit(graph.model_copy(update={"edges": edges}))
    cluster.submit(staged(1))
    end(cluster, 0)
    end(cluster, 1)
    cluster.lose(one)
    assert {key: each for key, each in where(cluster.show("j1")).items() if key[0] == 2} == {
        (2, 0): WAITS,
        (2, 1): WAITS,
    }


def test_without_restarts_a_lost_partition_ends_the_job(cluster: FakeCluster) -> None:
    one = cluster.add()
    cluster.submit(staged(1, 2, restart_strategy="none"))
    cluster.submit(staged(1))
    end(cluster, READ)
    assert cluster.show("j1").deploy_waits
    cluster.lose(one)
    info = cluster.show("j1")
    assert info.state == "failed" and info.causes[0].code == PeerLost.code
    assert "v0[0] ran there" in info.causes[0].text
    assert info.task_states == {"lost": 1, "canceled": 2}


def test_a_coordinator_that_comes_back_between_two_stages_goes_on_there(cluster: FakeCluster) -> None:
    worker = cluster.add()
    cluster.submit(staged(1, 2))
    cluster.submit(staged(1))
    end(cluster, READ)
    before = cluster.show("j1")
    assert before.deploy_waits
    cluster.check_journal()
    cluster.lose_coordinator()
    cluster.come_back(worker)
    after = cluster.show("j1")
    assert (where(after), stages(after)) == (where(before), stages(before))
    assert waits(after) == waits(before) and not worker.got(ReleaseJob)
    end(cluster, 0, job="j2")
    assert [where(cluster.show("j1"))[COUNT, index] for index in (0, 1)] == [("created", 1, 1)] * 2
    cluster.lose_coordinator()
    cluster.come_back(worker)
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished" and cluster.show("j1").restarts == {}


def test_a_stage_that_its_worker_never_heard_of_is_deployed_by_the_next_coordinator(
    cluster: FakeCluster,
) -> None:
    worker = cluster.add()
    cluster.submit(staged(2, 2))
    end(cluster, READ)
    for index in (0, 1):
        del worker.tasks["j1", COUNT, index]
    cluster.lose_coordinator()
    cluster.come_back(worker)
    assert [where(cluster.show("j1"))[COUNT, index] for index in (0, 1)] == [("created", 2, 1)] * 2
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished"


def test_what_waits_is_cancelled_with_its_job(cluster: FakeCluster) -> None:
    cluster.add()
    cluster.submit(staged(2, 2))
    end(cluster, READ, "running")
    cluster.request(CancelJob(job="j1"))
    assert cluster.show("j1").task_states == {"running": 2, "canceled": 2}
    end(cluster, READ, "canceled")
    info = cluster.show("j1")
    assert (info.state, info.deploy_waits, cluster.free_slots()) == ("canceled", [], [2])
    assert info.rows_dropped == {} and info.rows_in_flight == 0


def test_no_stage_is_deployed_while_the_job_is_paused(cluster: FakeCluster) -> None:
    cluster.add()
    cluster.submit(staged(1, 2))
    cluster.submit(staged(1))
    end(cluster, READ)
    cluster.request(PauseJob(job="j1"))
    assert cluster.show("j1").state == "paused", "nothing runs that could go on"
    end(cluster, 0, job="j2")
    assert where(cluster.show("j1"))[COUNT, 0] == WAITS
    cluster.request(ResumeJob(job="j1"))
    assert where(cluster.show("j1"))[COUNT, 0] == ("created", 1, 1)


def test_a_pause_waits_for_nothing_that_was_not_deployed(cluster: FakeCluster) -> None:
    cluster.add()
    cluster.submit(staged(2, 2))
    end(cluster, READ, "running")
    cluster.request(PauseJob(job="j1"))
    cluster.stand_all("j1")
    assert cluster.show("j1").state == "paused"
    assert "what v0 stores for its consumers" in cluster.show("j1").pause_left
    cluster.request(ResumeJob(job="j1"))
    end(cluster, READ)
    assert where(cluster.show("j1"))[COUNT, 0] == ("created", 1, 1)


def test_what_a_worker_that_is_to_leave_has_stored_is_made_again_elsewhere(cluster: FakeCluster) -> None:
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(staged(1, 2))
    cluster.submit(staged(1))
    end(cluster, READ)
    cluster.request(DrainWorker(worker=one.worker))
    info = cluster.show("j1")
    assert where(info)[READ, 0] == ("finished", 1, 1) and not one.got(Shutdown), "there is no other slot"
    cluster.add(slots=1)
    info = cluster.show("j1")
    assert where(info)[READ, 0] == ("created", 2, 3) and info.restarts == {"drained": 1}
    assert one.got(ReleaseJob) and len(one.got(Shutdown)) == 1
    end(cluster, READ)
    end(cluster, 0, job="j2")
    assert [where(cluster.show("j1"))[COUNT, index][0] for index in (0, 1)] == ["created"] * 2
    assert two.tasks.keys() & {("j1", COUNT, 0), ("j1", COUNT, 1)}


def test_partitions_of_a_stage_are_made_again_where_its_consumers_run(cluster: FakeCluster) -> None:
    one = cluster.add(slots=1)
    cluster.submit(staged(1, 1))
    cluster.add(slots=2)
    end(cluster, READ)
    end(cluster, COUNT, "running")
    cluster.request(DrainWorker(worker=one.worker))
    assert where(cluster.show("j1")) == {(READ, 0): ("created", 2, 2), (COUNT, 0): ("running", 1, 2)}
    assert len(one.got(Shutdown)) == 1


def test_what_an_external_client_wrote_is_not_made_again_and_keeps_its_worker(cluster: FakeCluster) -> None:
    one = cluster.add(slots=1)
    graph = staged(1, 1)
    source = graph.vertices[READ].model_copy(update={"stream": "rows"})
    cluster.submit(graph.model_copy(update={"vertices": [source, graph.vertices[COUNT]]}))
    cluster.add(slots=2)
    end(cluster, READ)
    end(cluster, COUNT, "running")
    cluster.request(DrainWorker(worker=one.worker))
    assert where(cluster.show("j1")) == {(READ, 0): ("finished", 1, 1), (COUNT, 0): ("running", 1, 2)}
    assert not one.got(Shutdown)
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished" and len(one.got(Shutdown)) == 1


def test_a_slot_that_moves_takes_a_stage_when_it_is_there(cluster: FakeCluster) -> None:
    one = cluster.add(slots=1)
    cluster.submit(staged(1, 1, 1, edges=("0=1",)))
    end(cluster, READ, "running")
    end(cluster, 2, "running")
    cluster.add(slots=1)
    cluster.request(DrainWorker(worker=one.worker))
    for key in (("j1", 0, 0), ("j1", 2, 0)):
        cluster.report(one, key, "canceled" if key[1] == 2 else "finished")
    info = cluster.show("j1")
    assert where(info)[2, 0] == ("created", 2, 2)
    assert where(info)[COUNT, 0][2] in (0, 2), "never where the slot leaves from"
    end(cluster, 0)
    end(cluster, 2)
    end(cluster, COUNT)
    assert cluster.show("j1").state == "finished"


def test_the_widest_stage_has_to_fit(cluster: FakeCluster) -> None:
    cluster.add()
    message = SubmitJob(name="wide", python="3.11", graph=staged(1, 3).to_bytes())
    assert cluster.refusal(message) == (
        ResourceExhausted.code,
        "job needs 3 slots (greatest parallelism in one stage), 2 are free of 2: start more workers "
        "(--workers/--slots) or lower --parallelism",
    )
    cluster.add(segments=3)
    code, text = cluster.refusal(message)
    assert code == ResourceExhausted.code and "network buffers on worker 2" in text


def test_stages_go_where_workers_reach_each_other(cluster: FakeCluster) -> None:
    """Also those that have nothing any more but what was stored."""
    cluster.add(slots=1, host="127.0.0.1", identity="apart")
    others = [cluster.add(slots=1, host=f"10.0.0.{n}", identity=f"host {n}") for n in (2, 3)]
    cluster.submit(staged(1, 2))
    assert where(cluster.show("j1"))[READ, 0] == ("created", 1, 2)
    for _ in range(2):
        cluster.submit(staged(1))
    end(cluster, READ)
    end(cluster, 0, job="j2")
    assert cluster.free_slots() == [1, 1, 0] and stages(cluster.show("j1"))[1] == ("waiting", 1)
    assert "worker 1 cannot reach the others" in waits(cluster.show("j1"))[0]
    end(cluster, 0, job="j3")
    assert {key[1] for worker in others for key in worker.tasks if key[0] == "j1"} == {READ, COUNT}
    assert stages(cluster.show("j1"))[1] == ("deployed", 1)


def test_without_a_blocking_exchange_all_is_deployed_at_once(cluster: FakeCluster) -> None:
    cluster.add()
    cluster.submit(staged(2, 2, edges=("0-1",)))
    info = cluster.show("j1")
    assert info.task_states == {"created": 4} and info.stages == [] == info.deploy_waits


# --- stages that start when one of their inputs is there ---------------------------------------------


EARLY = ("0=3", "1=2", "2=3")
"""What 3 reads of 2 is complete long after what it reads of 0."""


def test_with_any_a_stage_goes_when_one_of_its_inputs_is_complete(cluster: FakeCluster) -> None:
    worker = cluster.add(slots=1)
    cluster.submit(staged(1, 1, 1, 1, edges=EARLY, start_when="any"))
    end(cluster, 1, "running")
    assert where(cluster.show("j1"))[3, 0] == WAITS
    end(cluster, 0)
    info = cluster.show("j1")
    assert where(info)[3, 0] == ("created", 1, 1) and where(info)[2, 0] == WAITS
    (task,) = worker.got(DeployTasks)[-1].tasks
    assert {gate.operator: gate.later for gate in task.inputs} == {0: [], 2: [0]}
    end(cluster, 3, "running")
    end(cluster, 1)
    assert where(cluster.show("j1"))[2, 0] == ("created", 1, 1)
    (*_, restarted) = worker.got(TasksRestarted)
    assert [(each.operator, each.attempt, each.worker) for each in restarted.tasks] == [(2, 1, 1)]
    end(cluster, 2)
    end(cluster, 3)
    assert cluster.show("j1").state == "finished" and cluster.free_slots() == [1]


def test_slots_are_kept_for_what_an_early_stage_waits_for(cluster: FakeCluster) -> None:
    cluster.add(slots=4)
    cluster.submit(staged(1, 1, 3, 2, edges=EARLY, start_when="any"))
    end(cluster, 1, "running")
    assert cluster.free_slots() == [3]
    end(cluster, 0)
    assert where(cluster.show("j1"))[3, 0] == ("created", 1, 1) and cluster.free_slots() == [1]
    end(cluster, 1)
    assert where(cluster.show("j1"))[2, 2] == ("created", 1, 1)
    end(cluster, 2)
    assert cluster.free_slots() == [2], "its inputs are complete"


def test_slots_that_are_kept_and_lost_are_taken_again(cluster: FakeCluster) -> None:
    cluster.add(slots=2)
    two = cluster.add(slots=1)
    cluster.submit(staged(1, 1, 3, 1, edges=EARLY, start_when="any"))
    end(cluster, 1, "running")
    end(cluster, 0)
    assert where(cluster.show("j1"))[3, 0] == ("created", 1, 1) and cluster.free_slots() == [0, 0]
    cluster.lose(two)
    cluster.add(slots=1)
    assert cluster.free_slots()[-1] == 0, "no other job gets it"
    end(cluster, 1)
    assert where(cluster.show("j1"))[2, 1] == ("created", 1, 3)


def test_without_slots_for_what_it_waits_for_a_stage_waits_as_with_all(cluster: FakeCluster) -> None:
    cluster.add(slots=3)
    cluster.submit(staged(1, 1, 3, 2, edges=EARLY, start_when="any"))
    cluster.submit(staged(1))
    end(cluster, 1, "running")
    end(cluster, 0)
    assert where(cluster.show("j1"))[3, 0] == WAITS
    assert "v2 => v3 (0 of 3 partitions are complete)" in waits(cluster.show("j1"))[1]
    end(cluster, 1)
    assert where(cluster.show("j1"))[2, 0] == WAITS
    end(cluster, 0, job="j2")
    assert stages(cluster.show("j1"))[2:] == [("deployed", 1), ("deployed", 1)]


def test_the_next_coordinator_says_where_producers_are_that_were_deployed_later(cluster: FakeCluster) -> None:
    worker = cluster.add(slots=1)
    cluster.submit(staged(1, 1, 1, 1, edges=EARLY, start_when="any"))
    end(cluster, 0)
    end(cluster, 3, "running")
    end(cluster, 1)
    worker.inbox.clear()
    cluster.lose_coordinator()
    cluster.come_back(worker)
    told = [(each.operator, each.attempt) for message in worker.got(TasksRestarted) for each in message.tasks]
    assert (2, 1) in told, "it may have died before it had said so"

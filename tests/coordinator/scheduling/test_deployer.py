"""What workers are sent when a job starts and when tasks of it restart."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.instructions import CoordinatorStep, SendToWorker
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.journal.writeahead import WriteAhead
from minishuffle.coordinator.scheduling.deployer import Deployer
from minishuffle.coordinator.scheduling.isolation import Isolation
from minishuffle.coordinator.scheduling.standby import Preparations
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import WorkerRegistry
from minishuffle.errors import PeerLost
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    DeployTasks,
    ErrorInfo,
    PrepareJob,
    TasksRestarted,
)
from minishuffle.wire.registration import Register

MakeGraph = Callable[..., JobGraph]


class Workers:
    """Those of a job, and what they are sent."""

    def __init__(self, *standby: bool) -> None:
        self.ahead = WriteAhead()
        self.registry = WorkerRegistry(ClusterSettings(), "3.11", "0.1.0")
        self.sent: list[tuple[int, ControlMessage]] = []
        for link, spare in enumerate(standby, 1):
            about = Register(
                host="10.0.0.1",
                data_port=link,
                metrics_port=9,
                pid=link,
                slots=1,
                python="3.11",
                segments=2048,
                segment_bytes=32768,
                standby=spare,
            )
            self.registry.register(link, about, 0.0)
        self.deployer = Deployer(
            1, 5.0, self.registry, Preparations(1), self.send, self.ahead, Isolation(5.0)
        )

    def send(self, worker: int, message: ControlMessage) -> bool:
        self.sent.append((worker, message))
        return True

    def take_sent(self) -> list[tuple[int, ControlMessage]]:
        sent, self.sent = self.sent, []
        return sent

    def lose(self, number: int, job: Job) -> None:
        worker = self.registry.get_alive(number)
        assert worker is not None
        self.registry.end(worker, "lost", 1.0)
        job.worker_lost(number, ErrorInfo(code=PeerLost.code, text="lost"), 1.0)


def make_job(graph: JobGraph) -> Job:
    return Job("j1", "words", graph, (1, 2), {1: 0, 2: 0}, at=0.0, random=Random(0).random)


def test_a_job_goes_to_its_workers_and_standby_workers_are_prepared_for_it(make_graph: MakeGraph) -> None:
    workers = Workers(False, False, True)
    workers.deployer.deploy(make_job(make_graph()), Holdings(), 0.0)
    kinds = [(number, type(message)) for number, message in workers.take_sent()]
    assert kinds == [(1, DeployTasks), (2, DeployTasks), (3, PrepareJob)]


def test_what_was_lost_goes_to_a_standby_worker_without_programs_and_its_peers_hear(
    make_graph: MakeGraph,
) -> None:
    workers = Workers(False, False, True)
    job = make_job(make_graph(restart_strategy="individual"))
    workers.deployer.deploy(job, Holdings(), 0.0)
    workers.take_sent()
    workers.lose(2, job)
    called = set[int]()
    ready = workers.deployer.restart(job, Holdings([job]), 1.0, called)
    assert (sorted(task.key for task in ready), called) == ([(0, 1), (1, 1)], {3})
    sent = workers.take_sent()
    kinds = [(number, type(message)) for number, message in sent]
    assert kinds[0] == (3, DeployTasks) and (1, TasksRestarted) in kinds
    (deploy,) = (message for _, message in sent if isinstance(message, DeployTasks))
    assert deploy.programs == {} and [task.attempt for task in deploy.tasks] == [2, 2]
    assert workers.deployer.restart(job, Holdings([job]), 1.0, called) == [], "nothing is due any more"


def test_what_finds_no_slot_waits_for_one(make_graph: MakeGraph) -> None:
    workers = Workers(False, False)
    job = make_job(make_graph(restart_strategy="individual"))
    workers.deployer.deploy(job, Holdings(), 0.0)
    workers.lose(2, job)
    assert workers.deployer.restart(job, Holdings([job]), 1.0, set()) == []
    assert job.waits_for_slot and job.next_time() == 6.0


def test_a_job_that_ends_does_not_wait_for_attempts_whose_deployment_is_held_back(
    make_graph: MakeGraph,
) -> None:
    workers = Workers(False, False)
    job = make_job(make_graph())
    workers.deployer.deploy(job, Holdings(), 0.0)
    first, second = (SendToWorker(number, number, message) for number, message in workers.take_sent())
    workers.ahead.failed([CoordinatorStep(messages=[second])], "the disk is full")
    job.cancel(1.0, "cancelled by a client")
    for _ in range(2):
        workers.deployer.stop(job, 1.0)
        assert {task.key for task in job.subtasks.values() if task.state == "canceled"} == {(0, 1), (1, 1)}
    assert workers.take_sent() == [(1, CancelTasks(term=1, job="j1"))]
    assert workers.ahead.written() == []
    workers.ahead.failed([CoordinatorStep(messages=[first])], "the disk is full")
    workers.deployer.stop(job, 1.0)
    assert job.state == "canceled" and workers.take_sent() == []

"""Seeded runs of whole clusters through faults: invariants after every step, and every job ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.jobs.lifecycle import JOB_ENDED
from minishuffle.errors import PeerLost, TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings
from minishuffle.wire.messages import (
    CancelTasks,
    ErrorInfo,
    HostLook,
    HostLooked,
    Leaving,
    Probe,
    Probed,
    ReleaseJob,
    Shutdown,
    TaskSpec,
    UnlinkedPeer,
)
from minishuffle.wire.registration import Registered
from minishuffle.wire.reports import AttemptReport, Collected, Fact, TaskStateChanged
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    DrainWorker,
    GetStatus,
    JobInfo,
    ListJobs,
    PauseJob,
    ResumeJob,
    SubmitJob,
    UserCall,
    WaitJob,
    WorkerEnded,
)
from support.soak import SOAK

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

STEPS = 600
CHECKED_SHARE = 0.2 if SOAK else 0.05
"""Of the steps, those after which the journal is read again: a quarter of the time if it were every fifth."""
WORKERS_MAX = 6


class Simulation:
    """Random events in any order; workers answer when they are chosen to, or never."""

    def __init__(self, seed: int, cluster: FakeCluster, make_graph: Callable[..., JobGraph]) -> None:
        self.random = random.Random(seed)
        self.draws = random.Random(f"state {seed}")
        """Of what tasks that move keep: each seed's events stay what they were."""
        self.restored = 0
        """Attempts that have begun with the state of an earlier one."""
        self.cluster = cluster
        self.make_graph = make_graph
        self.submitted: list[str] = []
        self.waits: list[int] = []
        self.everyone: list[FakeWorker] = []
        self.over: dict[str, str] = {}
        """State in which a job was first seen to be over."""
        self.paused = 0
        """How often a job was seen to be paused."""
        self.drained = 0
        """Workers that have left as they were told."""
        self.restarted: set[str] = set()
        """Jobs with a task beyond its first attempt when they were."""

    def living(self) -> list[FakeWorker]:
        workers = self.cluster.workers.values()
        return [each for each in workers if each.worker and each.link not in self.cluster.closed]

    def step(self) -> None:
        weights = {
            self.register: 10,
            self.lose: 2,
            self.goodbye: 1,
            self.submit: 10,
            self.cancel: 3,
            self.pause: 4,
            self.resume: 3,
            self.stand: 12,
            self.pass_time: 6,
            self.task_event: 60,
            self.stale: 4,
            self.lose_coordinator: 1,
            self.break_link: 2,
            self.break_return: 2,
            self.cut_pair: 4,
            self.probe: 6,
            self.drain: 2,
            self.obey: 6,
            self.die: 2,
            self.look: 1,
        }
        (action,) = self.random.choices(list(weights), list(weights.values()))
        action()
        self.check_ends()
        if self.random.random() < CHECKED_SHARE:
            self.cluster.check_journal()

    # --- events ----------------------------------------------------------------------------------

    def register(self) -> None:
        if len(self.living()) < WORKERS_MAX:
            requested = self.random.choice([0, 0, self.random.randint(1, 8)])
            slots, segments = self.random.randint(1, 4), self.random.choice([20, 100, 2000])
            standby = self.random.random() < 0.1
            worker = self.cluster.add(
                requested_worker=requested,
                slots=slots,
                segments=segments,
                standby=standby,
                end_is_told=self.random.random() < 0.7,
                identity=self.random.choice(["", "a", "b", "c"]),
            )
            self.everyone.append(worker)
            if not worker.worker:
                del self.cluster.workers[worker.link]

    def lose(self) -> None:
        """Killed (the link closes), or silent from now on."""
        if living := self.living():
            worker = self.cluster.workers.pop(self.random.choice(living).link)
            if self.random.random() < 0.6:
                self.cluster.lose(worker)

    def die(self) -> None:
        """A process ends, perhaps by the doing of some task; its launcher says so sooner, later, or twice."""
        if not (living := self.living()):
            return
        worker = self.random.choice(living)
        calls = [
            UserCall(
                job=job,
                operator=operator,
                index=index,
                attempt=task.attempt,
                position=self.random.choice([0, 0, 7]),
                rows=5,
            )
            for (job, operator, index), task in worker.tasks.items()
            if self.random.random() < 0.7
        ]
        signal = self.random.choice(["SIGSEGV", "SIGSEGV", "SIGKILL"])
        recorded = self.random.random() < 0.8
        end = WorkerEnded(
            worker=worker.worker, epoch=worker.epoch, signal=signal, recorded=recorded, calls=calls
        )
        if self.random.random() < 0.3:
            self.cluster.ask(end)
        self.cluster.workers.pop(worker.link)
        self.cluster.lose(worker)
        if self.random.random() < 0.3:
            self.step()
        if self.random.random() < 0.8:
            self.cluster.ask(end)

    def look(self) -> None:
        """Hosts that are silent are looked at, and answer or do not."""
        self.cluster.advance(0.35, heartbeats=False)
        for _ in range(2):
            answer = self.random.choice([False, False, True, None])
            for look in self.cluster.looks[-3:]:
                self.cluster.do(self.cluster.state.host_looked(look.ticket, answer, self.cluster.now))
            for worker in self.living():
                for each in worker.got(HostLook)[-1:]:
                    looked = HostLooked(term=self.cluster.term, ticket=each.ticket, answer=answer)
                    self.cluster.send(worker, looked)
            self.cluster.advance(0.3, heartbeats=False)

    def break_link(self) -> None:
        """A control link breaks; the worker comes back, is found without coming back, or neither."""
        if living := self.living():
            worker = self.random.choice(living)
            link = worker.link
            self.cluster.break_link(worker)
            if self.random.random() < 0.3:
                self.task_event()
            if self.random.random() < 0.5:
                self.cluster.do(self.cluster.state.process_found(link, self.cluster.now))
            if self.random.random() < 0.8:
                self.cluster.come_back(worker)
            self.cluster.advance(3.5)

    def break_return(self) -> None:
        """A worker comes back with what it has to report, and its link breaks before it hears what is desired
        of it, perhaps more than once, or its coordinator is lost. It says the same until it hears the
        answer. Each fact counts once."""
        if not (living := [each for each in self.living() if each.tasks]):
            return
        worker = self.random.choice(living)
        key = self.random.choice(sorted(worker.tasks))
        attempt = AttemptId.of(*key, worker.tasks[key].attempt)
        facts: list[Fact] = [Collected(attempt=attempt, payload=b"rows", rows=1)]
        if self.random.random() < 0.5:
            state = self.random.choice(["running", "failed"])
            error = {"code": PeerLost.code, "text": "peer"} if state == "failed" else None
            facts.append(
                TaskStateChanged.model_validate({"attempt": attempt, "state": state, "error": error})
            )
        number = self.cluster.state._workers.named(worker.worker).applied + 1
        term = self.cluster.term
        reports = [
            AttemptReport(term=term, number=number + each, facts=[fact]) for each, fact in enumerate(facts)
        ]
        batches = self.batches(key[0])
        self.cluster.break_link(worker)
        while self.random.random() < 0.6:
            self.cluster.come_back(worker, reports, hears=False)
            if self.random.random() < 0.3:
                self.cluster.advance(0.2)
        if self.random.random() < 0.2:
            self.lose_coordinator()
        for _ in range(self.random.choice([1, 1, 2])):
            self.cluster.workers.pop(worker.link, None)
            self.cluster.come_back(worker, reports)
        assert self.batches(key[0]) <= batches + 1, "a fact counts once"

    def batches(self, job: str) -> int:
        """That have come of its rows."""
        return self.cluster.state._jobs[job].history.batches if job in self.cluster.state._jobs else 0

    def cut_pair(self) -> None:
        """Tasks of a worker have waited for a link to another one, for long enough or nearly so."""
        if len(living := self.living()) > 1 and self.submitted:
            one, other = self.random.sample(living, 2)
            jobs = sorted({key[0] for key in one.tasks}) or self.submitted[-1:]
            seconds = self.random.choice([9.0, 11.0, 100.0])
            missing = UnlinkedPeer(
                worker=other.worker, epoch=other.epoch, seconds=seconds, why="cut", jobs=jobs
            )
            self.cluster.now += self.random.choice([0.0, 0.5, 11.0]) if self.random.random() < 0.2 else 0.0
            self.cluster.heartbeat(one, unlinked=[missing])
            self.probe(1.0, "cut")
            self.cluster.heartbeat(one, unlinked=[missing])

    def probe(self, share: float = 0.7, why: str = "") -> None:
        """Workers answer probes, or some of them."""
        there = {worker.worker: worker for worker in self.living()}
        for by in there.values():
            for peer in {peer.worker for message in by.got(Probe)[-3:] for peer in message.peers}:
                if peer in there and self.random.random() < share:
                    epoch = there[peer].epoch
                    probed = Probed(term=self.cluster.term, worker=peer, epoch=epoch, why=why)
                    self.cluster.send(by, probed)

    def goodbye(self) -> None:
        if living := self.living():
            worker = self.random.choice(living)
            self.cluster.send(worker, Shutdown(term=self.cluster.term, reason=""))
            self.cluster.workers.pop(worker.link)
            self.cluster.lose(worker)

    def drain(self) -> None:
        """A worker is to leave: its process was sent SIGTERM, or a client asks for it."""
        if living := self.living():
            worker, seconds = self.random.choice(living), self.random.choice([0.0, 1.0, 8.0])
            if self.random.random() < 0.5:
                self.cluster.send(worker, Leaving(term=self.cluster.term, seconds=seconds))
            else:
                limit = self.random.choice([None, seconds])
                self.cluster.ask(DrainWorker(worker=worker.worker, seconds=limit))

    def obey(self) -> None:
        """Workers that were told to shut down do so, whatever they run."""
        for worker in self.living():
            if worker.got(Shutdown):
                self.drained += 1
                self.cluster.send(worker, Shutdown(term=self.cluster.term, reason=""))
                self.cluster.workers.pop(worker.link)
                self.cluster.lose(worker)

    def lose_coordinator(self) -> None:
        """It is started again from its journal; some workers are lost meanwhile, and some tasks come to an
        end, which is reported later."""
        living = self.living()
        before = self.attempts()
        self.cluster.lose_coordinator()
        self.cluster.check_journal()
        assert self.attempts() == before, "no task is restarted by that"
        for worker in self.random.sample(living, len(living)):
            if self.random.random() < 0.8:
                self.cluster.come_back(worker)
        self.waits = [
            wait
            if self.cluster.reply(wait) is not None
            else self.cluster.ask(WaitJob(job=job, wait_seconds=50.0))
            for wait, job in zip(self.waits, self.submitted, strict=True)
        ]
        self.cluster.advance(3.5)

    def attempts(self) -> dict[tuple[str, int, int], tuple[int, str]]:
        return {
            (job.job, task.operator, task.index): (task.attempt, task.state)
            for job in self.jobs()
            for task in job.tasks
        }

    def submit(self) -> None:
        sources, sinks = self.random.randint(1, 5), self.random.randint(1, 5)
        partitioner = self.random.choice(["hash", "rescale", "broadcast"])
        strategy = self.random.choice(["individual", "individual", "region", "full", "none"])
        settings = {"restart_strategy": strategy, "restart_failures_max": self.random.choice([2, 10])}
        graph = self.make_graph(sources, sinks, partitioner, **settings)
        later = random.Random(f"{len(self.submitted)} {sources} {sinks}")  # draws of its own
        schedules = ["eager", "eager", "first_output"]
        if self.random.random() < 0.3:
            graph = stored(later, graph)
            schedules = ["eager", "stages", "stages", "first_output"]
        schedule = later.choice(schedules)
        start_when = None if schedule == "eager" else later.choice(["all", "any"])
        values = graph.settings.model_dump() | {"schedule": schedule, "start_when": start_when}
        graph = graph.model_copy(update={"settings": JobSettings.model_validate(values)})
        reply = self.cluster.request(SubmitJob(name="s", python="3.11", graph=graph.to_bytes()))
        if isinstance(reply, Accepted):
            self.submitted.append(reply.job)
            self.waits.append(self.cluster.ask(WaitJob(job=reply.job, wait_seconds=50.0)))

    def cancel(self) -> None:
        if self.submitted:
            self.cluster.request(CancelJob(job=self.random.choice(self.submitted)))

    def pause(self) -> None:
        """A client asks for it, and may ask again."""
        if self.submitted:
            self.cluster.request(PauseJob(job=self.random.choice(self.submitted[-3:])))

    def resume(self) -> None:
        if self.submitted:
            self.cluster.request(ResumeJob(job=self.random.choice(self.submitted[-3:])))

    def stand(self) -> None:
        """Tasks stop behind the barrier that their worker has heard of: some, or all of a job."""
        for job in self.submitted[-3:]:
            if self.random.random() < 0.3:
                for worker in self.living():
                    for key in [key for key in worker.tasks if key[0] == job]:
                        self.cluster.report(worker, key, "running", attempt=worker.tasks[key].attempt)
                self.cluster.stand_all(job)
                self.paused += sum(each.state == "paused" for each in self.jobs())
                continue
            for worker in self.living():
                for key in [key for key in worker.tasks if key[0] == job and worker.barrier(job)]:
                    if self.random.random() < 0.5:
                        self.cluster.stand(worker, key)

    def pass_time(self) -> None:
        self.cluster.advance(self.random.choice([0.1, 1.0, 4.0]))

    def task_event(self) -> None:
        """Some task of some worker makes a step, whatever it did before."""
        if not (workers := [worker for worker in self.living() if worker.tasks]):
            return
        worker = self.random.choice(workers)
        key = self.random.choice(sorted(worker.tasks))
        canceled = worker.is_canceled(key, worker.tasks[key].attempt)
        stands = worker.barrier(key[0]) > 0
        event = self.random.choices(
            ["running", "finished", "canceled", "abandoned", "raise", "peer", "rows", "log"],
            [30, 0 if stands else 40, 30 if canceled else 1, 5 if canceled else 0, 6, 2, 5, 5],
        )[0]
        attempt = worker.tasks[key].attempt
        if event == "rows":
            for output in worker.tasks[key].outputs:
                self.cluster.readable(worker, key, output.edge)
            self.cluster.collect(worker, key, b"rows", attempt=attempt)
        elif event == "log":
            self.cluster.log(worker, key[0], "line")
        elif event in ("raise", "peer"):
            code = TaskFailed.code if event == "raise" else PeerLost.code
            error = ErrorInfo(code=code, text=event)
            self.cluster.report(worker, key, "failed", error=error, attempt=attempt)
        else:
            self.report(worker, key, worker.tasks[key], event)

    def report(self, worker: FakeWorker, key: tuple[str, int, int], spec: TaskSpec, state: str) -> None:
        """A task that was cancelled may have moved, with state or without any; one that runs has read what
        is kept for it, if it is still there."""
        kept, fields = self.draws.choice([0, 100]), dict[str, Any]()
        if state == "canceled" and self.draws.random() < 0.7:
            fields = {"moved": True, "state_bytes": kept}
        elif state == "running" and spec.state_attempt:
            keepers = [each for each in self.living() if each.worker == spec.state_worker]
            is_there = any((*key, spec.state_attempt) in each.states for each in keepers)
            self.restored += is_there
            fields = {} if is_there else {"state_lost": "it is gone"}
        self.cluster.report(worker, key, state, attempt=spec.attempt, **fields)

    def stale(self) -> None:
        """A process that is not known any more still talks over its old link."""
        if self.everyone and self.submitted:
            worker = self.random.choice(self.everyone)
            if worker.link not in self.cluster.workers:
                attempt = self.random.choice([0, 1, 2])
                key = (self.random.choice(self.submitted), 0, 0)
                self.cluster.report(worker, key, "finished", attempt=attempt)

    # --- checks ----------------------------------------------------------------------------------

    def jobs(self) -> list[JobInfo]:
        found: list[JobInfo] = self.cluster.request(ListJobs()).jobs
        return found

    def check_ends(self) -> None:
        before = len(self.over)
        for job in self.cluster.request(ListJobs(tasks=False)).jobs:
            if job.state in JOB_ENDED:
                assert self.over.setdefault(job.job, job.state) == job.state, "an end is final"
        for job in self.jobs() if len(self.over) > before else ():
            if job.job in self.over and any(task.attempt > 1 for task in job.tasks):
                self.restarted.add(job.job)

    def heal(self) -> None:
        """No more faults: whoever lives answers, and time passes. What waits for more slots than there are is
        cancelled in the end."""
        for round in range(80):
            for job in self.submitted:
                self.cluster.request(ResumeJob(job=job))
            for each in self.jobs() if round == 60 else ():
                if each.deploy_waits:
                    self.cluster.request(CancelJob(job=each.job))
            for worker in self.living():
                for key, task in list(worker.tasks.items()):
                    state = "canceled" if worker.is_canceled(key, task.attempt) else "finished"
                    self.report(worker, key, task, state)
            self.obey()
            self.cluster.advance(1.0)
            self.check_ends()


def stored(draw: random.Random, graph: JobGraph) -> JobGraph:
    """The same with a blocking edge, or with two more vertices and blocking edges between all."""
    vertices, edges = list(graph.vertices), list(graph.edges)
    if draw.random() < 0.5:
        vertices += [
            vertex.model_copy(update={"parallelism": draw.randint(1, 5)}) for vertex in graph.vertices
        ]
        edges = [Edge(source=a, target=b, partitioner="hash") for a, b in ((0, 1), (2, 3), (1, 3))]
    kinds = ["blocking" if number != 1 else draw.choice(["blocking", "pipelined"]) for number in range(3)]
    edges = [edge.model_copy(update={"kind": kind}) for edge, kind in zip(edges, kinds, strict=False)]
    return graph.model_copy(update={"vertices": vertices, "edges": edges})


ENDS: dict[int, tuple[set[str], set[str]]] = {}
"""By seed, while there are faults: how jobs ended, and how those did that had restarted."""
REASONS: set[str] = set()
"""Of restarts."""
PAUSED: dict[int, int] = {}
"""By seed, how often a job was seen to be paused."""
RESTORED: dict[int, int] = {}
"""By seed, how many attempts have begun with state."""


@pytest.fixture
def play(
    make_cluster: Callable[..., FakeCluster], make_graph: Callable[..., JobGraph]
) -> Callable[[int], Simulation]:
    """Runs a seed as long as there are faults."""

    def played(seed: int) -> Simulation:
        cluster = make_cluster(heartbeat_interval=0.5, heartbeat_timeout=3.0, slot_timeout=3.0)
        run = Simulation(seed, cluster, make_graph)
        for _ in range(STEPS):
            run.step()
        PAUSED[seed] = run.paused
        RESTORED[seed] = run.restored
        ENDS[seed] = set(run.over.values()), {run.over[job] for job in run.restarted}
        REASONS.update(reason for job in run.jobs() for reason in job.restarts)
        return run

    return played


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30 if SOAK else 4))
def test_every_job_ends_once_its_faults_are_over(seed: int, play: Callable[[int], Simulation]) -> None:
    run = play(seed)
    cluster = run.cluster
    run.heal()
    assert len(run.submitted) > 3, f"seed {seed} tests too little"
    assert set(run.over) == set(run.submitted), f"seed {seed}"
    assert all(cluster.reply(wait) is not None for wait in run.waits), f"seed {seed}"
    for worker in run.living():
        assert worker.tasks == {}, f"seed {seed}: worker {worker.worker} was not told to release a job"
        assert not worker.states, f"seed {seed}: worker {worker.worker} keeps state that nobody reads"
        links = itertools.accumulate(isinstance(message, Registered) for message in worker.inbox)
        whole_jobs = [
            (link, message.type, message.job)
            for link, message in zip(links, worker.inbox, strict=True)
            if isinstance(message, ReleaseJob | CancelTasks) and not message.attempts
        ]
        assert len(set(whole_jobs)) == len(whole_jobs), f"seed {seed}: something is said twice over a link"
    status: Any = cluster.request(GetStatus())
    assert cluster.state.snapshot(cluster.now, {}).slots["used"] == 0
    assert all(0 <= worker.slots_free <= worker.slots for worker in status.workers)
    assert not any(worker.draining for worker in status.workers), f"seed {seed}: a worker has not left"
    assert run.drained, f"seed {seed} tests too little"
    for worker in run.living():
        assert not any(map(worker.barrier, run.submitted)), f"seed {seed}: something still stands"


@pytest.mark.slow
def test_the_seeds_reach_every_end(play: Callable[[int], Simulation]) -> None:
    """Were one never reached, the runs above would prove less than they seem to."""
    wanted, reasons = {"finished", "failed", "canceled"}, {"failed", "lost", "drained"}
    for seed in range(12):
        if seed not in ENDS:
            play(seed)
        ends = set().union(*(each[0] for each in ENDS.values()))
        after_restarts = set().union(*(each[1] for each in ENDS.values()))
        done = ends == after_restarts == wanted and reasons <= REASONS
        if done and any(PAUSED.values()) and any(RESTORED.values()):
            return
    raise AssertionError(f"{ends}, after restarts {after_restarts}, for {REASONS}, {PAUSED}, {RESTORED}")

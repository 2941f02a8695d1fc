"""Restarts under faults in any order: what workers say, when they die, how time passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minishuffle.coordinator.jobs.lifecycle import JOB_ENDED
from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import DeployTasks, Dial, ErrorInfo, PrepareJob, Shutdown, TasksRestarted
from minishuffle.wire.requests import (
    Accepted,
    CancelJob,
    GetEvents,
    GetStatus,
    JobInfo,
    ListJobs,
    SubmitJob,
    UserCall,
    WorkerEnded,
)
from support.soak import examples

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

WORKERS_MAX = 5
JOBS_MAX = 3
FAILURES_MAX = 4
STEPS = 50
EARLY_ENDS = ["failed", "canceled", "abandoned"]
Subtask = tuple[str, int, int]


def three_stages(
    counts: tuple[int, int, int],
    partitioners: tuple[Any, Any],
    strategy: Any = "individual",
    groups: str = "aaa",
) -> JobGraph:
    vertices = [
        Vertex(
            name=name,
            parallelism=count,
            operators=[name],
            is_source=name == "read",
            program=name.encode(),
            slot_group=group,
        )
        for name, count, group in zip(("read", "join", "write"), counts, groups, strict=True)
    ]
    edges = [Edge(source=i, target=i + 1, partitioner=each) for i, each in enumerate(partitioners)]
    settings = JobSettings(restart_failures_max=FAILURES_MAX, restart_strategy=strategy)
    return JobGraph(vertices=vertices, edges=edges, settings=settings)


def pick(data: st.DataObject, items: Sequence[Any]) -> Any:
    """One of them, drawn by its number: a worker would be printed with all that it ever received."""
    return items[data.draw(st.integers(0, len(items) - 1))]


class Restarts(RuleBasedStateMachine):
    """What workers received is the model: which attempt runs where, and who was said to restart."""

    def __init__(self, make_cluster: Callable[..., FakeCluster], seen: set[int]) -> None:
        super().__init__()
        self.seen = seen
        """Attempts that any run came to."""
        self.cluster = make_cluster(heartbeat_interval=0.5, heartbeat_timeout=3.0, slot_timeout=20.0)
        self.graphs: dict[str, JobGraph] = {}
        self.cancelled: set[str] = set()
        self.unsendable: set[str] = set()
        self.read = 0
        """How many of the messages to workers were looked at."""
        self.attempts: dict[Subtask, tuple[int, int]] = {}
        """The newest attempt that was deployed, and the link of its worker."""
        self.accepted: dict[tuple[Subtask, int], str] = {}
        """The last state that a live attempt reported."""
        self.ends: dict[str, str] = {}
        self.everyone: dict[int, FakeWorker] = {}
        """By link, the dead too."""
        self.standby: set[int] = set()
        """Links of standby workers that have not taken over a slot."""

    def living(self) -> list[FakeWorker]:
        return [worker for worker in self.cluster.workers.values() if worker.worker]

    def jobs(self) -> list[JobInfo]:
        found: list[JobInfo] = self.cluster.request(ListJobs()).jobs
        return found

    def valid(self) -> set[int]:
        """Links of the workers that the coordinator did not declare lost."""
        epochs = {each.epoch for each in self.cluster.request(GetStatus()).workers if each.state == "alive"}
        return {link for link, worker in self.everyone.items() if worker.epoch in epochs}

    # --- events ----------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Two workers and a job: few runs would come to a restart if these were left to chance."""
        for _ in range(2):
            self.register(slots=2, segments=2000, again=False, standby=False, told=True)
        self.submit((2, 2, 1), ("hash", "hash"), "individual", "aaa")

    @precondition(lambda self: len(self.living()) < WORKERS_MAX)
    @rule(
        slots=st.integers(1, 3),
        segments=st.sampled_from([60, 2000]),
        again=st.booleans(),
        standby=st.sampled_from([False, False, True]),
        told=st.booleans(),
    )
    def register(self, slots: int, segments: int, again: bool, standby: bool, told: bool) -> None:
        """``again``: a process with the id of one that was lost, and a later epoch."""
        gone = {worker.worker for worker in self.everyone.values()} - {
            worker.worker for worker in self.living()
        }
        requested = min(gone, default=0) if again else 0
        worker = self.cluster.add(
            slots=slots, segments=segments, requested_worker=requested, standby=standby, end_is_told=told
        )
        if worker.worker:
            self.everyone[worker.link] = worker
            workers = self.cluster.request(GetStatus()).workers
            if any(each.standby and each.epoch == worker.epoch for each in workers):
                self.standby.add(worker.link)
        else:
            del self.cluster.workers[worker.link]

    @precondition(lambda self: self.living())
    @rule(
        data=st.data(), how=st.sampled_from(["killed", "killed", "silent", "stopped", "crashed", "crashed"])
    )
    def lose(self, data: st.DataObject, how: str) -> None:
        worker = pick(data, self.living())
        if how == "stopped":
            self.cluster.send(worker, Shutdown(term=7, reason=""))
        del self.cluster.workers[worker.link]
        if how == "killed" or (how == "crashed" and data.draw(st.booleans(), "missed before it is told")):
            self.cluster.lose(worker)
        if how == "crashed":
            inside = data.draw(st.sets(st.sampled_from(sorted(worker.tasks)))) if worker.tasks else ()
            self.tell(worker, sorted(inside))

    def tell(self, worker: FakeWorker, inside: Sequence[Subtask]) -> None:
        """Its launcher says that these tasks were inside user code when it ended."""
        calls = [
            UserCall(
                job=job,
                operator=operator,
                index=index,
                attempt=worker.tasks[job, operator, index].attempt,
                position=0,
                rows=1,
            )
            for job, operator, index in inside
        ]
        end = {"worker": worker.worker, "epoch": worker.epoch, "signal": "SIGSEGV", "recorded": True}
        assert self.cluster.request(WorkerEnded(**end, calls=calls)) == Accepted()

    @precondition(lambda self: len(self.graphs) < JOBS_MAX)
    @rule(
        counts=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
        partitioners=st.tuples(*[st.sampled_from(["hash", "rescale", "broadcast"])] * 2),
        strategy=st.sampled_from(["individual", "individual", "region", "full"]),
        groups=st.sampled_from(["aaa", "aaa", "aba", "abc"]),
    )
    def submit(
        self, counts: tuple[int, int, int], partitioners: tuple[Any, Any], strategy: str, groups: str
    ) -> None:
        graph = three_stages(counts, partitioners, strategy, groups)
        reply = self.cluster.request(SubmitJob(name="s", python="3.11", graph=graph.to_bytes()))
        if isinstance(reply, Accepted):
            self.graphs[reply.job] = graph

    @precondition(lambda self: any(worker.tasks for worker in self.living()))
    @rule(data=st.data(), state=st.sampled_from(["running"] * 3 + ["finished"] * 2 + EARLY_ENDS))
    def report(self, data: st.DataObject, state: str) -> None:
        """An attempt that is deployed on a live worker makes a step."""
        worker = pick(data, [worker for worker in self.living() if worker.tasks])
        key = pick(data, sorted(worker.tasks))
        self.say(worker, key, worker.tasks[key].attempt, state)

    def say(self, worker: FakeWorker, key: Subtask, attempt: int, state: str) -> None:
        error = ErrorInfo(code=TaskFailed.code, text=f"{key} raised") if state == "failed" else None
        if self.attempts.get(key) == (attempt, worker.link):
            last = self.accepted.get((key, attempt), "")
            if last in ("", "running"):
                self.accepted[key, attempt] = state
        self.cluster.report(worker, key, state, attempt=attempt, error=error)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), state=st.sampled_from(["running", "finished", *EARLY_ENDS]))
    def fenced(self, data: st.DataObject, state: str) -> None:
        """Whoever is not the current attempt changes nothing, whatever it says."""
        key = pick(data, sorted(self.attempts))
        attempt = data.draw(st.integers(0, self.attempts[key][0] + 1))
        sender = pick(data, list(self.everyone.values()))
        if self.attempts[key] == (attempt, sender.link) and sender.link in self.valid():
            return
        before = self.jobs()
        self.cluster.report(sender, key, state, attempt=attempt)
        assert self.jobs() == before

    @rule(seconds=st.sampled_from([0.01, 0.11, 0.5, 4.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.advance(seconds)

    @precondition(lambda self: self.graphs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = pick(data, sorted(self.graphs))
        self.cancelled.add(job)
        self.cluster.request(CancelJob(job=job))

    @precondition(lambda self: any(worker.got(DeployTasks) for worker in self.living()))
    @rule(data=st.data())
    def unsendable_deployment(self, data: st.DataObject) -> None:
        worker = pick(data, [each for each in self.living() if each.got(DeployTasks)])
        message = worker.got(DeployTasks)[-1]
        if any(info.job == message.job and info.state in JOB_ENDED for info in self.jobs()):
            return
        self.unsendable.add(message.job)
        error = ResourceExhausted("too large")
        self.cluster.do(self.cluster.state.undeployable(worker.worker, message, error, self.cluster.now))

    # --- what holds at every step ----------------------------------------------------------------

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        """Attempts only grow, and none is deployed while an earlier one may still be accepted."""
        valid = self.valid()
        new, self.read = self.cluster.sent[self.read :], len(self.cluster.sent)
        restarted: set[tuple[int, Subtask, int]] = set()
        decisions = self.cluster.sent_by[self.read - len(new) :]
        deployed: list[tuple[Subtask, int, int]] = []
        for decision, (link, message) in zip(decisions, new, strict=True):
            if isinstance(message, DeployTasks):
                for task in message.tasks:
                    key = (message.job, task.operator, task.index)
                    self.check_order(key, task.attempt, valid)
                    self.attempts[key] = (task.attempt, link)
                    self.seen.add(task.attempt)
                    deployed.append((key, task.attempt, decision))
                    assert task.attempt > 1 or link not in self.standby, "a standby worker admits no job"
                self.standby.discard(link)
            elif isinstance(message, TasksRestarted):
                for each in message.tasks:
                    restarted.add((link, (message.job, each.operator, each.index), each.attempt))
        for key, attempt, decision in deployed:
            if attempt > 1 and self.attempts[key][0] == attempt:
                # Those deployed with it or later were sent the attempts of what they read with that.
                later = {other for other, _, at in deployed if at >= decision} - {key}
                beside = {self.attempts[other][1] for other in self.beside(key) if other not in later}
                missing = {link for link in beside & valid if (link, key, attempt) not in restarted}
                assert not missing, f"workers at links {missing} know nothing of attempt {attempt} of {key}"

    def check_order(self, key: Subtask, attempt: int, valid: set[int]) -> None:
        last, link = self.attempts.get(key, (0, 0))
        assert attempt == last + 1, f"{key} went from attempt {last} to {attempt}"
        if link in valid:
            joint = self.graphs[key[0]].settings.restart_strategy != "individual"
            events = self.cluster.request(GetEvents(job=key[0])).events
            joint |= any(event.kind == "restart strategy" for event in events)
            ends = [*EARLY_ENDS, "finished"] if joint else EARLY_ENDS
            assert self.accepted.get((key, last)) in ends, f"{key}: attempt {last} may still be accepted"

    def beside(self, key: Subtask) -> list[Subtask]:
        """Itself, and the live subtasks that it exchanges rows with. A consumer that has finished has read
        all of its rows, and a producer that was released is read by nobody: they want to know nothing."""
        job, operator, index = key
        graph, found = self.graphs[job], [key]
        states = {(job, each.operator, each.index): each.state for each in self.show(job).tasks}
        for edge in graph.inputs_of(operator):
            found += [(job, graph.edges[edge].source, each) for each in graph.producers_of(edge, index)]
        for edge in graph.outputs_of(operator):
            consumers = [(job, graph.edges[edge].target, each) for each in graph.consumers_of(edge, index)]
            found += [each for each in consumers if states[each] != "finished"]
        live = [each for each in found if states[each] in ("created", "running", "finished")]
        return [each for each in live if each in self.everyone[self.attempts[each][1]].tasks]

    @invariant()
    def standby_workers_are_ready_for_every_job(self) -> None:
        """They have the programs of what runs, and of nothing else, and were named everybody."""
        active = {info.job for info in self.jobs() if info.state not in JOB_ENDED}
        running = {info.job for info in self.jobs() if info.state in ("created", "running")}
        addresses = {worker.link: (worker.worker, worker.epoch) for worker in self.living()}
        for worker in self.living():
            assert set(worker.prepared) <= active
            if worker.link in self.standby:
                assert running <= set(worker.prepared)
                named = {(each.worker, each.epoch) for m in worker.got(PrepareJob) for each in m.workers}
                named |= {(m.peer.worker, m.peer.epoch) for m in worker.got(Dial)}
                others = {where for link, where in addresses.items() if link != worker.link}
                assert others <= named or not running

    def show(self, job: str) -> JobInfo:
        return next(info for info in self.jobs() if info.job == job)

    @invariant()
    def jobs_run_wait_or_end_for_a_reason(self) -> None:
        for info in self.jobs():
            states = {task.state for task in info.tasks}
            if info.state in ("created", "running"):
                assert states <= {"created", "running", "finished", "restarting", "waiting for a slot"}
            if info.state == "canceled":
                assert info.job in self.cancelled
            if info.state == "failed":
                limit = [cause for cause in info.causes if cause.code == ResourceExhausted.code]
                assert limit, info.causes
                assert info.job in self.unsendable or any(
                    "restart_failures_max" in cause.text or "slot_timeout" in cause.text for cause in limit
                )
            if info.state in JOB_ENDED:
                assert self.ends.setdefault(info.job, info.state) == info.state, "an end is final"

    # --- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        """No more faults: whoever lives works to its end, and so does every job."""
        for _ in range(40):
            for worker in self.living():
                for key, task in list(worker.tasks.items()):
                    state = "canceled" if worker.is_canceled(key, task.attempt) else "finished"
                    self.say(worker, key, task.attempt, state)
                    self.one_attempt_at_a_time()
            self.cluster.advance(1.0)
            self.one_attempt_at_a_time()
            self.jobs_run_wait_or_end_for_a_reason()
        assert all(info.state in JOB_ENDED for info in self.jobs())
        assert all(worker.tasks == {} for worker in self.living()), "a worker keeps what was not released"
        assert not any(worker.prepared for worker in self.living())
        assert self.cluster.state.snapshot(self.cluster.now, {}).slots["used"] == 0


@pytest.mark.slow
def test_whatever_happens_a_job_runs_waits_or_ends_for_a_limit(
    make_cluster: Callable[..., FakeCluster],
) -> None:
    seen: set[int] = set()
    run_state_machine_as_test(
        lambda: Restarts(make_cluster, seen),
        settings=hypothesis_settings(max_examples=examples(12), stateful_step_count=STEPS, print_blob=True),
    )
    assert seen >= {1, 2}, "nothing was restarted"


def test_no_slot_is_given_in_which_a_job_that_ends_has_an_abandoned_task(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    """It ends by the loss of the worker after which the other one wants a slot."""
    one, two = cluster.add(slots=1), cluster.add(slots=2)
    wants = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    ends = cluster.submit(make_graph())
    cluster.request(CancelJob(job=ends))
    for operator in (0, 1):
        cluster.report(one, (ends, operator, 0), "abandoned")
    cluster.lose(two)
    assert cluster.show(ends).state == "canceled"
    assert {task.state for task in cluster.show(wants).tasks} == {"waiting for a slot"}

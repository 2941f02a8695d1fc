"""One simulated run: a cluster, a job, faults, and what has to hold at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.scheduling.placement import buffers_needed
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.plan.stages import slots_needed
from minishuffle.snapshots.catalog import open_manifest, verify
from minishuffle.snapshots.storage import folder_at
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import (
    JOB_LIVE,
    Accepted,
    CancelJob,
    GetEvents,
    JobEvents,
    JobInfo,
    PauseJob,
    ResumeJob,
    SaveJob,
    ShowJob,
    SubmitJob,
    WaitPause,
    WaitSavepoint,
)
from support.simulated_books import OF_THE_CHAIN, Book
from support.simulated_faults import KINDS, PAUSED_SECONDS, Fault, FaultKind, draw_faults, inject
from support.simulated_jobs import Plan, Strategy, is_side, make_plan
from support.simulated_loop import Host
from support.simulation import SECRET, Cluster, simulated

__all__ = ["Run", "Scenario"]

SEGMENT_BYTES = 512
QUIET_SECONDS = 60.0
"""Within which a job has recovered or ended once no more faults come."""
HELP_SECONDS = 5.0
"""Between two workers that are started for a stage."""
PROGRESS_SECONDS = 2.0
"""Within which a job that runs has more rows everywhere."""
STEPS_MAX = 1_000_000
ANSWER_SECONDS = 10.0
"""Within which a client is answered, also if the coordinator is away for a while."""
WITHOUT_COORDINATOR = (
    "isolate",
    "stop",
    "stop for long",
    "kill return",
    "stop coordinator",
    "kill coordinator",
    "replace coordinator",
    "hand over",
    "full disk",
)
"""Sources that get no answer go on, and emit again what nobody has heard of if they are lost then. So does
one whose control link was cut, until it is back."""
WITNESSED: tuple[FaultKind, ...] = (
    "kill coordinator",
    "hand over",
    "kill",
    "lose",
    "raise",
    "raise again",
    "worker",
)
"""Faults that leave the peers of a worker which is lost where they are: they know where its sources were."""
ALONE: tuple[FaultKind, ...] = (
    *("raise", "raise in open", "raise again", "raise on both sides"),
    *("kill", "kill twice", "cut", "delay", "worker", "kill coordinator", "cancel"),
)
"""Faults by which nobody is taken for lost who lives."""
ENDED = ("finished", "finished_with_loss", "failed", "canceled")
SECONDS_TO_END = 10.0
"""Within which a job that was cancelled has ended, and nothing of it is left."""
BY_A_LIMIT = re.compile(r"failed \d+ times within|network buffers")
"""Causes with which a job may fail that restarts its tasks."""
NO_SLOT = re.compile(r"found no free slot in time")
"""Cause of a job that fails since nobody replaced a worker."""
STATE_LOST = re.compile(r"no worker has their snapshots any more")
"""Cause of a job that fails since a task was lost together with its only holder."""
APART_FOR_GOOD = re.compile(
    r"finds no slot on another worker: .*no connection between worker (\d+)\b.* and worker (?!\1\b)\d+\b"
)
"""Cause of a job that fails since two workers cannot reach each other: it names both."""
LEAVING = ("term", "drain")
"""Faults after which a worker ends in order."""
ENDING = ("kill", "kill twice", "lose", *LEAVING)
"""Faults after which it ends."""
OTHER_WORKER_SHARE = 0.7
"""Of the workers that are lost, those that another one replaces, unless the job is to lose nothing: then all
are, or none in a few runs."""
SLOTS_NEVER_COME_SHARE = 0.05
"""Those few: else the jobs would fail for want of slots before there is anything to compare."""
STANDBY_SHARE = 0.3
"""Of the workers that come later, those that only take the place of others."""
OTHER_WORKER_SECONDS = (0.1, 3.0)
LOOK_SECONDS = 0.1
"""Between two looks for workers that are lost. Whoever comes then comes within the slot timeout."""


@dataclass(frozen=True)
class Scenario:
    """What runs are drawn from."""

    faults: bool = False
    strategy: Strategy = "none"
    bounded_share: float = 1.0
    """Of the jobs, those that come to an end by themselves."""
    kinds: tuple[FaultKind, ...] = KINDS
    """What faults are drawn from."""
    side: bool = False
    """The jobs have a side that is kept, see :func:`make_plan`."""
    blocking: bool = False
    """Some of their exchanges are, likewise."""
    guaranteed: bool = False
    """They may lose nothing, and have two workers at least."""


class Run:
    """What the seed draws."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed = seed
        self.scenario = scenario
        self.steps = 0
        """How much happened."""
        self.trace: list[str] = []
        """What happened last."""
        self.end = ""
        """The state in which the job ended."""
        self.rows_skipped = 0
        """Rows that producers did not write since their consumer had gone."""
        self.handed_over = 0
        """Batches that consumers on the same worker got as they are."""
        self.drained = 0
        """Attempts that took the place of those whose slots moved."""
        self.restored = 0
        """Attempts that have gone on with the state of those that moved."""
        self.paused = 0
        """How often the job was paused."""
        self.saved = 0
        """Savepoints that are complete."""
        self.snapshots = 0
        """Local snapshots that tasks have taken."""
        self.compared = 0
        """Channels whose ends were compared, see :class:`SnapshotLog`."""
        self.begun_from = 0
        """Attempts that have begun from a snapshot."""
        self.excluded: list[int] = []
        """Workers that were excluded from the job, since another could not reach them."""
        self.random = Random(f"plan {seed}")
        self.plan: Plan = make_plan(
            self.random,
            seed,
            scenario.strategy,
            scenario.bounded_share,
            side=scenario.side,
            blocking=scenario.blocking,
            guaranteed=scenario.guaranteed,
        )
        self.slots = self._draw_slots()
        self.segments = self._enough_segments()
        self.faults: list[Fault] = draw_faults(self.random, scenario.kinds) if scenario.faults else []
        self.replaces = scenario.guaranteed and self.random.random() >= SLOTS_NEVER_COME_SHARE
        """Whether another worker comes for each that is lost, in time."""
        self.cluster_settings = ClusterSettings(
            segment_bytes=SEGMENT_BYTES,
            heartbeat_interval=0.2,
            heartbeat_timeout=1.5,
            suspect_after=0.4,
            task_cancel_timeout=1.0,
            partition_request_timeout=2.0,
            reconnect_timeout=2.0,
            slot_timeout=5.0,
            drain_timeout=2.0,
            link_timeout=2.0,
            pause_timeout=2.0,
            savepoint_timeout=4.0,
        )

    def _draw_slots(self) -> list[int]:
        """Of each worker."""
        needed = slots_needed(self.plan.graph)
        count = self.random.randint(1, min(4, needed))
        if self.scenario.guaranteed:
            count = max(count, self.random.randint(2, 4))
        slots = [1] * count
        for _ in range(needed - count + self.random.choice([0, 1, 2, needed])):
            slots[self.random.randrange(count)] += 1
        return slots

    def _enough_segments(self) -> int:
        """Of each worker: enough for the whole job wherever its tasks are, and hardly more."""
        graph = self.plan.graph
        apart = tuple(range(1, graph.slots_needed + 1))
        least = sum(need.segments for need in buffers_needed(graph, apart).values())
        return least + self.random.randint(0, 10)

    def play(self) -> None:
        """Run it.

        Raises:
            AssertionError: something did not hold; says the seed and what happened last.
        """
        with simulated(self.seed, self.cluster_settings) as cluster:
            try:
                Play(self, cluster).run()
                self.steps, self.trace = cluster.world.steps, list(cluster.world.trace)
            except Exception as error:
                trace = "\n".join(cluster.world.trace)
                raise AssertionError(
                    f"seed {self.seed}: {error}\n{trace}\nreplay it with MINISHUFFLE_SEED={self.seed}"
                ) from error


class Play:
    """A run on its cluster."""

    def __init__(self, run: Run, cluster: Cluster) -> None:
        self.cluster = cluster
        self._run = run
        self._plan = run.plan
        self._world = cluster.world
        self._job = ""
        self._canceled = False
        self._resumed = 0
        """How often the user wanted the job to go on."""
        self._helped_at = 0.0
        self._savepoints = 0
        """How many the user has asked for."""
        self._replaced: set[Host] = set()
        """Workers that were lost, for each of which another one comes."""

    def run(self) -> None:
        """From the first worker to the last check."""
        run, cluster = self._run, self.cluster
        for slots in run.slots:
            cluster.add_worker(slots, run.segments)
        self._until(lambda: len(cluster.living) == len(run.slots), 5.0, "the workers register")
        accepted = self._ask(
            SubmitJob(name="simulated", python="3.11", graph=run.plan.graph.to_bytes(), submission="s")
        )
        assert isinstance(accepted, Accepted), accepted
        if run.scenario.guaranteed and self._world.random.random() < STANDBY_SHARE:
            cluster.add_worker(slots_needed(run.plan.graph), run.segments, standby=True)
        self._job = accepted.job
        if run.replaces:
            self._replace_lost()
        for fault in run.faults:
            self._world.at(self._world.now + fault.at, partial(self._inject, fault))
        if not run.plan.bounded:
            self._recover_and_cancel()
        info = self._wait_for_end()
        run.end, run.drained = info.state, info.restarts.get("drained", 0)
        self._check_end(info)
        self._check_excluded()
        if run.scenario.guaranteed:
            self._check_guarantee(info)
        else:
            self._check_what_came()
        run.restored = len(cluster.audit.restored)
        cluster.writes.check(run.plan.graph.edges, cluster.audit.received)
        run.rows_skipped = sum(map(len, cluster.writes.skipped.values()))
        run.handed_over = cluster.writes.handed_over
        assert run.scenario.guaranteed or not cluster.audit.twice, cluster.audit.twice[:5]
        self._check_home()
        if not run.scenario.guaranteed:
            self._check_books()
            if info.state == "finished":
                self._check_rows()
        if info.state in ("finished", "finished_with_loss"):
            self._check_replayed(info)
            missing = self._sides_missing(info)
            assert not missing, missing

    def _check_what_came(self) -> None:
        run, cluster = self._run, self.cluster
        cluster.audit.check_attempts(run.plan.repeated)
        cluster.audit.check_state()
        kinds = {fault.kind for fault in run.faults}
        severed = kinds.intersection(("cut control", "cut return")) and kinds.intersection(ENDING)
        lost = sum(worker.host.lost for worker in cluster.workers)
        witnessed = kinds.issubset(WITNESSED) and lost <= 1 and not cluster.unwitnessed
        if witnessed or (not kinds.intersection(WITHOUT_COORDINATOR) and not severed):
            cluster.audit.check_once(run.plan.graph, run.plan.sources)

    def _inject(self, fault: Fault) -> None:
        cluster, world = self.cluster, self._world
        before = len(cluster.living)
        slots, standby = world.random.randint(1, 4), world.random.random() < STANDBY_SHARE
        start = partial(cluster.add_worker, slots, self._run.segments, standby=standby)
        if fault.kind == "cancel":
            world.note("fault: the user cancels the job")
            cluster.client.ask(CancelJob(job=self._job))
            self._canceled = True
        elif fault.kind == "savepoint":
            self._save()
        elif fault.kind == "pause":
            self._pause(world.random.uniform(*PAUSED_SECONDS))
        elif fault.kind == "worker":
            world.note("fault: a further worker starts")
            start()
        else:
            inject(cluster, self._plan, fault)
        fewer = len(cluster.living) < before or fault.kind in LEAVING
        if fewer and not self._run.scenario.guaranteed and world.random.random() < OTHER_WORKER_SHARE:
            world.at(world.now + world.random.uniform(*OTHER_WORKER_SECONDS), start)

    def _replace_lost(self) -> None:
        """For each worker that is lost, whatever the reason, another one comes with as many slots; and so on
        until the job has ended."""
        run, cluster, world = self._run, self.cluster, self._world
        for worker in cluster.workers:
            host = worker.host
            silent = host.stopped and world.now > host.stopped_at + run.cluster_settings.heartbeat_timeout
            if host not in self._replaced and (host.lost or silent):
                self._replaced.add(host)
                standby = world.random.random() < STANDBY_SHARE
                start = partial(self._start_other, worker.settings.slots, standby=standby)
                world.at(world.now + world.random.uniform(*OTHER_WORKER_SECONDS), start)
        if not run.end:
            world.at(world.now + LOOK_SECONDS, self._replace_lost)

    def _start_other(self, slots: int, *, standby: bool) -> None:
        """Start a worker, once there is a coordinator that answers it: one that has asked a stopped one would
        wait for longer than the slot timeout of these runs."""
        cluster, world = self.cluster, self._world
        if cluster.coordinator_host.dead or cluster.coordinator_host.stopped:
            world.at(world.now + LOOK_SECONDS, partial(self._start_other, slots, standby=standby))
        else:
            cluster.add_worker(slots, self._run.segments, standby=standby)

    def _pause(self, seconds: float) -> None:
        """Pause the job for so long. No row is taken while it is paused, whatever happens."""
        cluster, world, before = self.cluster, self._world, self._resumed
        world.note(f"fault: the user pauses the job for {seconds:.2f} s")
        cluster.client.ask(PauseJob(job=self._job))
        asked = cluster.client.ask(WaitPause(job=self._job, wait_seconds=60.0))
        rows: list[int] = []

        def look() -> None:
            reply = cluster.client.replies.get(asked)
            if self._resumed > before or self._canceled:
                return
            if isinstance(reply, JobInfo) and reply.pause == "paused":
                self._run.paused += not rows
                rows.append(cluster.audit.rows)
                assert rows[-1] == rows[0], f"{rows[-1] - rows[0]} rows were taken while the job was paused"
            world.at(world.now + 0.02, look)

        def resume() -> None:
            self._resumed += 1
            cluster.client.ask(ResumeJob(job=self._job))

        look()
        world.at(world.now + seconds, resume)

    def _save(self) -> None:
        """Take a savepoint. One that is said to be complete is whole."""
        cluster, world = self.cluster, self._world
        self._savepoints += 1
        token = f"t{self._savepoints}"
        world.note(f"fault: the user takes savepoint {token}")
        cluster.client.ask(SaveJob(job=self._job, token=token, directory=cluster.snapshots))
        asked = cluster.client.ask(WaitSavepoint(job=self._job, wait_seconds=60.0))

        def look() -> None:
            reply = cluster.client.replies.get(asked)
            if reply is None:
                world.at(world.now + 0.02, look)
            elif isinstance(reply, JobInfo) and (saved := reply.savepoint).token == token:
                if saved.phase == "none" and not saved.problem:
                    folder = folder_at(saved.path)
                    verify(folder, open_manifest(folder, SECRET))
                    self._run.saved += 1
                world.note(f"savepoint {token}: {saved.phase} {saved.problem or 'is complete'}")

        look()

    def _recover_and_cancel(self) -> None:
        """The job does not end by itself: when the faults are over all of it runs, and is cancelled then.
        Source subtasks without a split finish."""
        last = max((fault.at for fault in self._run.faults), default=0.0)
        self._pass(last + 0.2)
        deadline = self._world.now + QUIET_SECONDS
        while True:
            info = self._show()
            if info.state not in JOB_LIVE:
                return
            self._help_out(info)
            there = all(task.state in ("running", "finished") for task in info.tasks)
            if info.state == "running" and there and self._has_progress() and not self._sides_missing(info):
                break
            assert self._world.now < deadline, f"the job did not recover: {_states(info)}"
            self._pass(0.2)
        self._ask(CancelJob(job=self._job))
        self._canceled = True

    def _help_out(self, info: JobInfo) -> None:
        """Of a stage that waits for slots, which may have been lost, the user hears, and starts a worker."""
        waits = any("free slot" in wait.text for wait in info.deploy_waits)
        if waits and self._world.now > self._helped_at + HELP_SECONDS:
            self._helped_at = self._world.now
            self._world.note("the user starts a worker for a stage that waits")
            self.cluster.add_worker(slots_needed(self._plan.graph), self._run.segments)

    def _has_progress(self) -> bool:
        """Whether every operator receives rows, or sends them if it is a source; a side ends."""
        audit, vertices = self.cluster.audit, self._plan.graph.vertices
        ends = [operator for operator, vertex in enumerate(vertices) if vertex.bounded]
        operators = [operator for operator in range(len(vertices)) if operator not in ends]
        before = [audit.rows_of(operator) for operator in operators]
        return self._world.run_until(
            lambda: all(audit.rows_of(each) > rows for each, rows in zip(operators, before, strict=True)),
            PROGRESS_SECONDS,
            STEPS_MAX,
        )

    def _wait_for_end(self) -> JobInfo:
        """A job may take its time as long as it has progress; one that has none is stuck. An end that the
        journal does not have is none: the user, who was told so, cancels the job again."""
        rows, since = -1, self._world.now
        while (info := self._show()).state not in ENDED or self.cluster.forgetful:
            # What is stored for a blocking exchange comes to nobody before it is complete.
            now = self.cluster.audit.rows + sum(task.counters.records_out for task in info.tasks)
            if now != rows or self.cluster.forgetful:
                rows, since = now, self._world.now
            if self._canceled and info.state in JOB_LIVE:
                self._ask(CancelJob(job=self._job))
            elif self._world.now > since + QUIET_SECONDS / 2:
                self._help_out(info)
            assert self._world.now < since + QUIET_SECONDS, f"the job is stuck: {_states(info)}"
            self._pass(1.0)
        return info

    def _pass(self, seconds: float) -> None:
        self._world.run_until(lambda: False, seconds, STEPS_MAX)

    def _show(self) -> JobInfo:
        info = self._ask(ShowJob(job=self._job))
        assert isinstance(info, JobInfo), info
        return info

    def _ask(self, message: ControlMessage) -> ControlMessage:
        number = self.cluster.client.ask(message)
        replies = self.cluster.client.replies
        self._until(lambda: number in replies, ANSWER_SECONDS, f"{type(message).__name__} is answered")
        return replies[number]

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        assert self._world.run_until(condition, seconds, STEPS_MAX), f"not within {seconds:g} s: {what}"

    # --- what has to hold ------------------------------------------------------------------------

    def _check_end(self, info: JobInfo) -> None:
        causes = [cause.text for cause in info.causes]
        if not self._run.faults:
            expected = {"finished"} if self._plan.bounded else {"canceled"}
            assert info.state in expected, f"the job is {info.state}: {causes}"
        elif self._run.scenario.strategy == "none":
            assert info.state in ("finished", "failed", "canceled"), f"the job is {info.state}"
        elif info.state == "failed":
            ends = [BY_A_LIMIT, *([] if self._run.replaces else [NO_SLOT])]
            ends += [APART_FOR_GOOD] if self.cluster.network.apart else []
            ends += [STATE_LOST] if self._run.scenario.guaranteed else []
            assert any(each.search(cause) for each in ends for cause in causes), (
                f"the job failed for no limit: {causes}"
            )
        else:
            states = {"finished", "finished_with_loss"} if self._plan.bounded else {"canceled"}
            states -= {"finished_with_loss"} if self._run.scenario.guaranteed else set()
            assert info.state in states or (info.state == "canceled" and self._canceled), (
                f"the job is {info.state}: {causes}"
            )

    @property
    def _wrote_off(self) -> bool:
        """The coordinator has gone on without some attempts, by what it knew of them at that moment."""
        return bool(self._run.excluded) or any(worker.host.lost for worker in self.cluster.workers)

    def _check_excluded(self) -> None:
        """Of a job whose only trouble is that two of its workers cannot reach each other, nothing restarts
        but what ran on a worker that was excluded."""
        run, cluster = self._run, self.cluster
        reply = self._ask(GetEvents(job=self._job))
        assert isinstance(reply, JobEvents), reply
        run.excluded = [each.worker for each in reply.events if each.kind == "worker excluded"]
        if run.scenario.strategy != "individual" or {each.kind for each in run.faults} != {"cut for good"}:
            return
        moved = [
            f"{attempt.id} of worker {worker.number}"
            for worker, attempt in cluster.attempts
            for after in [attempt.id.attempt + 1]
            if worker.number not in run.excluded
            and any(each.id == replace(attempt.id, attempt=after) for _, each in cluster.attempts)
        ]
        assert not moved, f"workers {run.excluded} were excluded, and {', '.join(moved)} restarted"

    def _check_guarantee(self, info: JobInfo) -> None:
        """Nothing is lost, and nothing restarted but what failed, was lost or moved, and what had read a
        producer to its end that deals its rows out anew."""
        run, cluster = self._run, self.cluster
        run.snapshots, run.compared = cluster.snapshot_log.taken, cluster.snapshot_log.compared
        run.begun_from = cluster.audit.begun_from
        if info.state == "finished":
            died = any(worker.host.dead for worker in cluster.workers)  # with what it had counted
            once = frozenset() if info.fallbacks else run.plan.graph.same_rows()
            cluster.audit.check_nothing_lost(run.plan, comes_again=died or info.rows_again > 0, once=once)
            if not info.fallbacks:
                again = Counter[int]()
                for task in info.tasks:
                    again[task.operator] += task.counters.rows_again
                cluster.audit.check_counted(run.plan, again)
            books = info.rows_dropped, info.rows_in_flight, info.state_rows_lost
            assert books == ({}, 0, 0), f"the books of a job that loses nothing say {books}"
        if info.fallbacks or not {fault.kind for fault in run.faults}.issubset(ALONE):
            return
        graph = run.plan.graph
        dealt_anew = {
            edge.target
            for number, edge in enumerate(graph.edges)
            if not (edge.source in graph.same_rows() or graph.parts_alike(number))
            if any(task.operator == edge.source and task.attempt > FIRST_ATTEMPT for task in info.tasks)
        }
        others = [
            f"{attempt.id} of worker {worker.number}"
            for worker, attempt in cluster.attempts
            for subtask in [attempt.id.subtask]
            if subtask.operator not in dealt_anew
            if not worker.host.dead and (subtask.operator, subtask.index) not in cluster.audit.done
            if (subtask.operator, subtask.index, attempt.id.attempt) not in cluster.audit.ended
            if any(
                each.id == replace(attempt.id, attempt=attempt.id.attempt + 1) for _, each in cluster.attempts
            )
        ]
        assert not others, f"{', '.join(others)} restarted, which had not failed"

    def _check_rows(self) -> None:
        """Every row of every exchange came once, or once to each where it is sent to all. Where a worker
        died, another attempt may have sent it."""
        audit, graph, repeated = self.cluster.audit, self._plan.graph, self._plan.repeated
        edges = [edge for edge in graph.edges if not is_side(edge) or not self._plan.bounded]
        for edge in edges:
            missing = audit.passed.get(edge.source, set()) - audit.passed.get(edge.target, set())
            assert not missing, f"{len(missing)} rows of operator {edge.source} never came to {edge.target}"
        if self._wrote_off:
            return
        for edge in edges:
            if (edge.source, edge.target) in repeated:
                continue
            for sender, sent in audit.sent.items():
                if sender[0] != edge.source:
                    continue
                came = audit.numbers(sender, edge.target)
                times = graph.vertices[edge.target].parallelism if edge.partitioner == "broadcast" else 1
                missing = sum(times * sent - count for count in [sum(came.values())])
                assert came == dict.fromkeys(range(sent), times), (
                    f"{missing} of {times * sent} rows of {sender} to operator {edge.target} are missing"
                )

    def _check_replayed(self, info: JobInfo) -> None:
        """The last attempts of what replays have had each row once, whatever happened to those before; and
        nothing is lost if all of the job does."""
        audit, plan = self.cluster.audit, self._plan
        replayed = plan.graph.replayed()
        for edge in plan.graph.edges:
            if edge.source not in replayed or edge.target not in replayed or is_side(edge):
                continue
            came: Counter[tuple[int, int]] = Counter()
            for task in info.tasks:
                if task.operator == edge.target:
                    for row, count in audit.got.get((task.operator, task.index, task.attempt), {}).items():
                        came[row[1:]] += count if row[0] == edge.source else 0
            wrong = {row for row in +came | plan.over(edge) if came[row] != plan.over(edge)[row]}
            assert not wrong, (
                f"{len(wrong)} rows of {edge.source} came to the last attempts of {edge.target} too often or "
                f"never: {sorted(wrong)[:5]}"
            )
        if len(replayed) == len(plan.graph.vertices):
            assert info.state == "finished", f"{info.rows_dropped}, {info.rows_in_flight} in flight"

    def _sides_missing(self, info: JobInfo) -> list[str]:
        """Subtasks whose current attempt has not all rows of its sides that are kept."""
        audit, graph = self.cluster.audit, self._plan.graph
        sides = [graph.edges[number] for number in graph.kept_edges()]
        return [
            f"{task.name}[{task.index}]#{task.attempt} has {len(found)} of {len(expected)} rows of a side"
            for edge in filter(is_side, sides)
            for expected in [self._plan.rows_of(edge.source)]
            for task in info.tasks
            if task.operator == edge.target
            for rows in [audit.sides.get((task.operator, task.index, task.attempt), Counter())]
            for found in [{row[:2] for row in rows if row[2] == edge.source}]
            if found != expected
        ]

    def _check_books(self) -> None:
        """Each row is in one place in every worker, and the coordinator's sums are the same."""
        books = [Book.of(attempt) for worker, attempt in self.cluster.attempts if not worker.host.lost]
        specs = [attempt.spec for _, attempt in self.cluster.attempts]
        again = any(spec.version or any(output.closed for output in spec.outputs) for spec in specs)
        for book in books:
            book.check(again)
        self._pass(1.0)  # One that was stopped for long hears that it is lost after its tasks have ended.
        self._world.run_until(self._all_is_reported, SECONDS_TO_END, STEPS_MAX)
        if self._run.scenario.strategy == "none" or any(book.repeats for book in books) or self._wrote_off:
            return  # what they lost is not known, or they lose more after the books are closed
        info = self._show()
        lost = sum(book.sent + sum(book.dropped_out.values()) - book.taken for book in books)
        dropped = sum(rows for reason, rows in info.rows_dropped.items() if reason not in OF_THE_CHAIN)
        assert (lost, 0) == (dropped, info.rows_in_flight), (
            f"{lost} rows of the exchange were lost, the books have {info.rows_dropped} and "
            f"{info.rows_in_flight} in flight"
        )

    def _all_is_reported(self) -> bool:
        """What tasks left in their queues came to the coordinator too, over however thin a link."""
        return not any(len(each.worker.coordinator.reports) for each in self.cluster.living)

    def _check_home(self) -> None:
        """The job has ended: nothing of it is left, but for what abandoned threads may write to."""

        def home() -> bool:
            return all(
                each.segments_out == 0
                and not each.worker._deployment.attempts
                and not each.worker._deployment.holders
                and not each.worker._deployment.services.snapshots.used
                for each in self.cluster.living
            )

        self._world.run_until(home, SECONDS_TO_END, STEPS_MAX)
        for each in self.cluster.living:
            self.cluster.validate(each.host)
            left = ", ".join(map(str, each.worker._deployment.attempts))
            assert not left, f"worker {each.number} has {left} left"
            assert each.segments_out == 0, f"{each.segments_out} segments of worker {each.number} are out"
            services = each.worker._deployment.services
            assert services.budget.used == 0
            used = services.retained.used, services.snapshots.used
            assert used == (0, 0), f"worker {each.number} has {used} bytes retained and of snapshots left"
            assert not each.worker._deployment.holders, f"worker {each.number} holds snapshots yet"
        self.cluster.validate(self.cluster.coordinator_host)


def _states(info: JobInfo) -> str:
    tasks = ", ".join(f"{task.name}[{task.index}]#{task.attempt} {task.state}" for task in info.tasks)
    return f"{info.state}, {tasks}"

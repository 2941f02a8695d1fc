"""The worker's decisions in every order of deployments, restarts, cancels, releases, links, verdicts and
requests, around a shell whose input channels are played."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, JobId, PartitionId, SubtaskId, is_state_edge, state_edge
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    Dial,
    InputSpec,
    OutputSpec,
    PlacedAttempt,
    PrepareJob,
    ReleaseJob,
    TaskAttempt,
    TaskSpec,
    TasksRestarted,
    WorkerAddress,
    WorkerLost,
)
from minishuffle.wire.packed import pack_placement
from minishuffle.wire.reports import Fact, TaskStateChanged
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.instructions import (
    AbandonTask,
    Attach,
    CancelTask,
    ConnectLocal,
    DialPeer,
    FailChannel,
    Fence,
    KeptState,
    LoadPrograms,
    Refuse,
    Release,
    Report,
    RequestPartition,
    StartTask,
    WorkerStep,
    attempt_id,
)
from minishuffle.worker.state import WorkerState
from support.attempts import attempt
from support.soak import examples

SETTINGS = ClusterSettings(task_cancel_timeout=10.0, partition_request_timeout=5.0, reconnect_timeout=4.0)
ME = 2
JOBS = st.sampled_from(["j1", "j1", "j1", "j2"])
INDICES = st.integers(0, 1)
NUMBERS = st.sampled_from([1, 1, 1, 2, 3])
"""Most of the time the first, so that deep states are reached."""
PEERS = st.sampled_from([1, 3])
EPOCHS = st.sampled_from([1, 1, 1, 2, 3])


@dataclass
class Channel:
    """An input channel as the shell has it."""

    reads: tuple[int, int]
    """Attempt and worker that the coordinator named last."""
    generation: int = 0
    """Requested last."""
    link: int | None = None
    """The number of the link that it is attached over; 0: it reads from this worker; None: it is detached."""
    answered: bool = False
    queue: deque[int] = field(default_factory=deque)
    """Generations whose ends the task has yet to read."""
    detached: int = 0
    ended: bool = False


class Orders(RuleBasedStateMachine):
    """Worker 2 of three runs subtasks of operator 0 (two producers) and 1 (two consumers) of two jobs. Tasks
    of j2 fail with their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.state = WorkerState(SETTINGS, ME, epoch=1, term=1, progress=lambda key: (0.0, 0, 0))
        self.now = 0.0
        self.due: float | None = None
        self.live: set[AttemptId] = set()
        """Attempts that run."""
        self.there: set[AttemptId] = set()
        """Attempts that were not released."""
        self.ended: Counter[AttemptId] = Counter()
        self.open: set[tuple[int, int]] = set()
        """Requests of peers that were not answered: link and channel id."""
        self.kept: set[AttemptId] = set()
        """Attempts that have ended and keep their state."""
        self.granted: dict[tuple[AttemptId, int, int], tuple[int, int]] = {}
        """By producer, edge and consumer index: attempt and generation that reads."""
        self.known: dict[SubtaskId, int] = {}
        """The highest attempt that the coordinator has named."""
        self.deployed: dict[SubtaskId, int] = {}
        """The highest attempt that was deployed here."""
        self.links: dict[int, int] = {}
        """By worker: a number that counts up."""
        self.links_made = 0
        self.shell: dict[ChannelKey, Channel] = {}
        self.lost: set[int] = set()
        """Workers whose process of the announced epoch was declared lost."""
        self.dials: set[tuple[int, int]] = set()
        """Under way: worker and epoch."""
        self.announced: dict[int, int] = {}
        self.prepared: dict[str, dict[int, bytes]] = {}
        """By job, the programs that came ahead of need."""
        self.loaded: list[tuple[str, list[bytes]]] = []
        self.channels = 0

    @initialize()
    def announce_all(self) -> None:
        for worker in (1, 3):
            self.announced[worker] = 1
            self.carry_out(self.state.handle(Dial(term=1, peer=self.address(worker)), self.now))
        self.link_up(3)
        for index in (0, 1):
            self.deploy_task("j1", False, index, 1, 3, [])
        self.deploy_task("j1", True, 0, 1, 3, [])

    # --- what the shell does -------------------------------------------------------------------------

    def carry_out(self, step: WorkerStep) -> None:
        self.due = step.timers
        for instruction in step.messages:
            match instruction:
                case StartTask(message, spec):
                    key = attempt_id(message.job, spec)
                    assert key not in self.there
                    assert message.programs == self.prepared.get(message.job, {})
                    self.live.add(key)
                    self.there.add(key)
                case LoadPrograms(job, programs):
                    self.loaded.append((job, programs))
                case CancelTask(key):
                    assert key in self.live
                case AbandonTask(key):
                    self.over(key)
                case Release(attempts):
                    self.there.difference_update(attempts)
                    for key in attempts:
                        self.over(key)
                case Report(fact):
                    self.reported(fact)
                case Attach(link, request, producer):
                    self.answered(link, request.channel)
                    self.reads(producer, request)
                case Refuse(link, channel, _):
                    self.answered(link, channel)
                case ConnectLocal(channel, producer, generation, _):
                    request = self.request_of(channel)
                    assert request.generation == generation
                    self.reads(producer, request)
                    self.attach(channel, request, ME, 0)
                case RequestPartition(worker, channel, request):
                    assert worker not in self.lost
                    self.attach(channel, request, worker, self.links[worker])
                case FailChannel(channel, generation, _):
                    self.fail(channel, generation)
                case Fence(producer, edge, consumer):
                    assert producer in self.there
                    read_by = self.granted[producer, edge, consumer.subtask.index][0]
                    assert read_by < consumer.attempt <= self.known[consumer.subtask]
                case DialPeer(peer):
                    dial = (peer.worker, peer.epoch)
                    assert dial not in self.dials, "a second link would take the place of the first"
                    self.dials.add(dial)

    def attach(self, key: ChannelKey, request: PartitionRequest, worker: int, link: int) -> None:
        """One generation after another, and none before the task has read all of the one before."""
        assert key.attempt in self.live
        channel = self.shell[key]
        assert channel.link is None and not channel.queue and not channel.ended
        assert request.generation > max(channel.generation, channel.detached)
        assert (request.producer_attempt, worker) == channel.reads, "the newest word counts"
        channel.generation, channel.link, channel.answered = request.generation, link, not link

    def fail(self, key: ChannelKey, generation: int) -> None:
        """As ``InputChannel.fail``."""
        assert key.attempt in self.live and not self.shell[key].ended
        channel = self.shell[key]
        if generation > channel.detached:
            assert channel.link is None or channel.generation == generation
            self.detach(key, generation)

    def detach(self, key: ChannelKey, generation: int) -> None:
        channel = self.shell[key]
        was_attached, channel.link = channel.link is not None, None
        if was_attached:
            self.carry_out(self.state.channel_event(key, generation, ChannelEvent.FAIL, self.now))
        channel.detached = generation
        channel.queue.append(generation)

    def over(self, key: AttemptId) -> None:
        """The task is terminal."""
        self.live.discard(key)
        self.shell = {at: channel for at, channel in self.shell.items() if at.attempt != key}

    def request_of(self, channel: ChannelKey) -> PartitionRequest:
        return dict(self.state.channels.inputs.phases())[channel].request

    def reported(self, fact: Fact) -> None:
        if isinstance(fact, TaskStateChanged) and fact.ends:
            self.ended[fact.attempt] += 1
            assert max(self.ended.values()) == 1

    def answered(self, link: int, channel: int) -> None:
        assert (link, channel) in self.open, "answered twice, or over a link that is gone"
        self.open.remove((link, channel))

    def reads(self, producer: AttemptId, request: PartitionRequest) -> None:
        assert producer in self.there
        assert producer.attempt == request.producer_attempt
        reader = request.consumer_attempt, request.generation
        where = producer, request.partition.edge, request.subpartition
        operator = producer.subtask.operator if is_state_edge(request.partition.edge) else 1
        consumer = attempt(operator, request.subpartition, job=request.partition.job).subtask
        assert request.consumer_attempt == self.known.get(consumer, 1), "an attempt that is not the current"
        assert self.granted.get(where, (0, 0)) < reader, "taken over from a reader that is not older"
        self.granted[where] = reader

    def address(self, worker: int, epoch: int | None = None) -> WorkerAddress:
        epoch = epoch or self.announced.get(worker, 1)
        return WorkerAddress(worker=worker, epoch=epoch, host="10.0.0.1", data_port=5000 + worker)

    # --- the coordinator -----------------------------------------------------------------------------

    @rule(job=JOBS, producers=st.booleans(), index=INDICES, number=NUMBERS, seat=PEERS, newer=st.data())
    def deploy(
        self, job: str, producers: bool, index: int, number: int, seat: int, newer: st.DataObject
    ) -> None:
        attempts = [
            TaskAttempt(operator=operator, index=each, attempt=newer.draw(NUMBERS))
            for operator in (0, 1)
            for each in range(2)
            if newer.draw(st.sampled_from([False, False, True]))
        ]
        keeper = newer.draw(st.sampled_from([0, 0, 1, ME, 3]))
        self.deploy_task(job, producers, index, number, seat, attempts, keeper=keeper)

    def deploy_task(
        self,
        job: str,
        producers: bool,
        index: int,
        number: int,
        seat: int,
        attempts: list[TaskAttempt],
        *,
        keeper: int = 0,
    ) -> None:
        """Producer 0 runs here, producer 1 on ``seat``; ``attempts``: of those that are not the first.
        ``keeper`` has the state of the attempt before, if there was one."""
        output = OutputSpec(edge=0, operator=1, first=0, count=2)
        gate = InputSpec(edge=0, input=0, operator=0, first=0, count=2)
        spec = TaskSpec(
            operator=0 if producers else 1,
            name="task",
            index=index,
            parallelism=2,
            attempt=number,
            inputs=[] if producers else [gate],
            outputs=[output] if producers else [],
            state_worker=keeper,
            state_attempt=number - 1 if keeper else 0,
        )
        message = DeployTasks(
            term=1,
            job=job,
            name="job",
            settings={"restart_strategy": "none" if job == "j2" else "individual"},
            programs={},
            tasks=[spec],
            workers=[self.address(worker) for worker in (1, 2, 3)],
            placement={0: pack_placement([ME, seat])},
            attempts=attempts,
        )
        for named in (spec, *attempts):
            key = attempt_id(job, named)
            self.known[key.subtask] = max(key.attempt, self.known.get(key.subtask, 1))
        consumer = attempt_id(job, spec)
        if number > self.deployed.get(consumer.subtask, 0):
            self.deployed[consumer.subtask] = number
            for producer, of_producer, worker in message.channels(gate) if not producers else ():
                self.shell[ChannelKey(consumer, 0, producer)] = Channel((of_producer, worker))
            if spec.state_attempt:
                state = ChannelKey(consumer, state_edge(spec.operator), index)
                self.shell[state] = Channel((spec.state_attempt, keeper))
        for _ in range(2):
            self.carry_out(self.state.handle(message, self.now))

    @rule(
        job=JOBS,
        restarted=st.lists(
            st.tuples(INDICES, INDICES, st.sampled_from([-1, 0, 1, 1, 1]), st.sampled_from([1, ME, 3])),
            min_size=1,
            max_size=3,
            unique_by=lambda each: each[:2],
        ),
    )
    def restart(self, job: str, restarted: list[tuple[int, int, int, int]]) -> None:
        """Operator, index, how much newer than the newest, and the worker; what was said before may come
        again, and changes nothing."""
        tasks = []
        for operator, index, newer, worker in restarted:
            subtask = attempt(operator, index, job=job).subtask
            number = max(1, self.known.get(subtask, 1) + newer)
            self.known[subtask] = max(number, self.known.get(subtask, 1))
            tasks.append(PlacedAttempt(operator=operator, index=index, attempt=number, worker=worker))
            for key, channel in self.shell.items():
                reads = key.attempt.subtask.job == job and (key.edge, operator) == (0, 0)
                reads = reads and key.producer == index
                if reads and (number, worker) != channel.reads and number >= channel.reads[0]:
                    channel.reads = (number, worker)
        message = TasksRestarted(
            term=1, job=job, tasks=tasks, workers=[self.address(worker) for worker in (1, 2, 3)]
        )
        for _ in range(2):
            self.carry_out(self.state.handle(message, self.now))

    @rule(
        job=JOBS,
        operator=INDICES,
        index=INDICES,
        number=st.sampled_from([1, 1, 2, 2, 3, 0]),
        cancel=st.booleans(),
        rarely=st.sampled_from([False, False, True]),
    )
    def cancel_or_release(
        self, job: str, operator: int, index: int, number: int, cancel: bool, rarely: bool
    ) -> None:
        """Of one attempt, or of the whole job (0). An attempt is released once it has ended."""
        if not rarely:
            return
        named = [TaskAttempt(operator=operator, index=index, attempt=number)] if number else []
        if cancel:
            self.carry_out(self.state.handle(CancelTasks(term=1, job=job, attempts=named), self.now))
            return
        message = ReleaseJob(term=1, job=job, attempts=named)
        self.carry_out(self.state.handle(message, self.now))
        if not named:
            assert not any(key.subtask.job == job for key in self.there)
            self.prepared.pop(job, None)
            self.granted = {at: by for at, by in self.granted.items() if at[0].subtask.job != job}
            self.known = {subtask: n for subtask, n in self.known.items() if subtask.job != job}
            self.deployed = {subtask: n for subtask, n in self.deployed.items() if subtask.job != job}
            self.ended = Counter({key: n for key, n in self.ended.items() if key.subtask.job != job})

    @rule(job=JOBS, there=st.booleans())
    def prepare(self, job: str, there: bool) -> None:
        """What a takeover would need; its programs may be too large to be kept."""
        programs = {0: f"{job} reads".encode(), 1: f"{job} writes".encode()} if there else {}
        self.prepared |= {job: programs} if programs else {}
        workers = [self.address(worker) for worker in (1, 3)]
        message = PrepareJob(term=1, job=job, programs=programs, workers=workers)
        self.loaded.clear()
        self.carry_out(self.state.handle(message, self.now))
        assert self.loaded == ([(job, list(programs.values()))] if programs else [])

    @rule(worker=PEERS, epoch=EPOCHS)
    def announce(self, worker: int, epoch: int) -> None:
        """What the coordinator said before may come again, and changes nothing."""
        if epoch > self.announced[worker]:  # the link before is one to a process that is gone
            self.announced[worker] = epoch
            self.lost.discard(worker)
            self.links.pop(worker, None)
            self.forget_requests(worker)
        peer = self.address(worker).model_copy(update={"epoch": epoch})
        self.carry_out(self.state.handle(Dial(term=1, peer=peer), self.now))

    @rule(worker=PEERS, newer=st.sampled_from([-1, 0, 0]))
    def verdict(self, worker: int, newer: int) -> None:
        epoch = self.announced[worker] + newer
        if newer == 0 and worker not in self.lost:
            self.lost.add(worker)
            self.forget_requests(worker)
        message = WorkerLost(term=1, worker=worker, epoch=epoch)
        self.carry_out(self.state.handle(message, self.now))

    # --- tasks and links -----------------------------------------------------------------------------

    @rule(data=st.data(), state=st.sampled_from(["", "", "finished", "failed", "canceled"]))
    def task_ends(self, data: st.DataObject, state: str) -> None:
        if self.live and state:
            key = data.draw(st.sampled_from(sorted(self.live)))
            if state == "finished" and not all(c.ended for at, c in self.shell.items() if at.attempt == key):
                state = "failed"
            self.over(key)
            kept = (
                KeptState(True, data.draw(st.sampled_from([0, 100]))) if state == "canceled" else KeptState()
            )
            if kept.bytes:
                self.kept.add(key)
            for _ in range(2):
                self.carry_out(self.state.task_ended(key, state, None, b"", TaskCounters(), state=kept))

    @rule(data=st.data())
    def task_runs(self, data: st.DataObject) -> None:
        """It has read its state, or reads none."""
        if self.live:
            key = data.draw(st.sampled_from(sorted(self.live)))
            self.shell = {
                at: channel
                for at, channel in self.shell.items()
                if at.attempt != key or not is_state_edge(at.edge)
            }
            self.carry_out(self.state.task_running(key))

    @rule(worker=PEERS)
    def link_up(self, worker: int) -> None:
        """Of the epoch that the coordinator announced; it may replace another."""
        self.dials.discard((worker, self.announced[worker]))
        refusal = self.state.channels.peers.refusal(worker, self.announced[worker])
        assert (refusal is not None) == (worker in self.lost)
        if worker in self.lost:
            return
        before = self.links.get(worker)
        self.forget_requests(worker)
        self.links_made += 1
        self.links[worker] = self.links_made
        self.carry_out(self.state.peer_up(worker, self.now))
        assert not any(channel.link == before is not None for channel in self.shell.values())

    def forget_requests(self, worker: int) -> None:
        self.open = {(link, channel) for link, channel in self.open if link != worker}

    @rule(worker=PEERS)
    def link_down(self, worker: int) -> None:
        if worker in self.links:
            link = self.links.pop(worker)
            self.forget_requests(worker)
            for key, channel in self.shell.items():
                if channel.link == link:
                    self.detach(key, channel.generation)
            self.carry_out(self.state.peer_down(worker, PeerLost("cut"), self.now))

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if self.open:
            link, channel = data.draw(st.sampled_from(sorted(self.open)))
            self.open.remove((link, channel))
            self.carry_out(self.state.partition_cancelled(link, channel))

    @rule(data=st.data(), reason=st.booleans())
    def dial_fails(self, data: st.DataObject, reason: bool) -> None:
        if self.dials:
            worker, epoch = data.draw(st.sampled_from(sorted(self.dials)))
            self.dials.remove((worker, epoch))
            error: ShuffleError = PeerLost("refused") if reason else ShuffleError("no")
            self.carry_out(self.state.dial_failed(self.address(worker, epoch), error, self.now))

    @rule(
        worker=PEERS,
        data=st.data(),
        asked=st.lists(st.tuples(st.sampled_from([0, 0, 1, 2]), NUMBERS, NUMBERS), min_size=1, max_size=6),
    )
    def request(self, worker: int, data: st.DataObject, asked: list[tuple[int, int, int]]) -> None:
        """For a producer that is here, most of the time: consumer, its attempt, generation."""
        if worker not in self.links:
            return
        kept = self.kept & self.there
        producers = [key for key in sorted(self.there) if key.subtask.operator == 0 or key in kept]
        producer = data.draw(st.sampled_from([*producers, attempt(0, 1, 3)]))
        job, index = producer.subtask.job, producer.subtask.index
        edge = state_edge(producer.subtask.operator) if producer in kept else 0
        for consumer, of_consumer, generation in asked:
            self.channels += 1
            request = PartitionRequest(
                PartitionId(JobId(job), edge, index),
                consumer,
                producer.attempt,
                of_consumer,
                generation,
                channel=self.channels,
            )
            self.open.add((worker, self.channels))
            self.carry_out(self.state.partition_requested(worker, request, self.now))

    @rule(data=st.data(), fails=st.booleans())
    def channel_changes(self, data: st.DataObject, fails: bool) -> None:
        """What the shell reports of a channel: its first buffer, its end, its failure."""
        attached = [key for key, channel in self.shell.items() if channel.link is not None]
        if attached:
            key = data.draw(st.sampled_from(attached))
            channel = self.shell[key]
            if fails:
                self.detach(key, channel.generation)
            elif not channel.answered:
                channel.answered = True
                self.carry_out(self.report(key, ChannelEvent.ATTACH))
            else:
                channel.ended, channel.link = True, None
                self.carry_out(self.report(key, ChannelEvent.END))

    def report(self, key: ChannelKey, event: ChannelEvent) -> WorkerStep:
        return self.state.channel_event(key, self.shell[key].generation, event, self.now)

    @rule(data=st.data(), end=st.sampled_from([False, True]))
    def drain(self, data: st.DataObject, end: bool) -> None:
        """The task reads that an attachment is gone, or an end that it had delivered before that. One whose
        job does not restart fails."""
        waiting = [key for key, channel in self.shell.items() if channel.queue]
        if not waiting:
            return
        key = data.draw(st.sampled_from(waiting))
        channel = self.shell[key]
        if end and channel.answered and list(channel.queue) == [channel.generation]:
            channel.queue.clear()
            channel.ended = True
            self.carry_out(self.report(key, ChannelEvent.END))
        elif key.attempt.subtask.job == "j2":
            self.over(key.attempt)
            self.carry_out(self.state.task_ended(key.attempt, "failed", None, b"", TaskCounters()))
        else:
            generation = channel.queue.popleft()
            event = ChannelEvent.DRAIN
            self.carry_out(self.state.channel_event(key, generation, event, self.now))

    # --- time ----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.due) is not None and due <= end:
            assert due >= self.now
            self.now = due
            self.carry_out(self.state.handle_timer(due))
        self.now = end
        drain_by = self.state.channels.inputs.drain_by()
        assert drain_by is None or self.now < drain_by <= self.now + SETTINGS.reconnect_timeout

    @invariant()
    def valid(self) -> None:
        self.state.validate()

    def teardown(self) -> None:
        """Nobody says anything any more: every request is answered, and once the tasks have ended no time is
        waited for."""
        self.pass_time(60.0)
        self.state.validate()
        assert self.open == set()
        for key in sorted(self.live):
            self.over(key)
            self.carry_out(self.state.task_ended(key, "failed", None, b"", TaskCounters()))
        for job in ("j1", "j2"):
            self.carry_out(self.state.handle(ReleaseJob(term=1, job=job), self.now))
        self.pass_time(60.0)
        assert self.due is None


TestOrders = pytest.mark.slow(Orders.TestCase)
TestOrders.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)

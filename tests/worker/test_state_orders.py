"""The worker's decisions in every order of deployments, cancels, releases, links and requests."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, SubtaskId
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    DeployTasks,
    Dial,
    InputSpec,
    OutputSpec,
    ReleaseJob,
    TaskAttempt,
    TaskSpec,
    TaskStateChanged,
    WorkerAddress,
)
from minishuffle.wire.packed import pack_placement
from minishuffle.worker.registry import ChannelEntry, ChannelKey, ChannelPhase
from minishuffle.worker.state import (
    AbandonTask,
    Attach,
    CancelTask,
    ConnectLocal,
    DialPeer,
    FailTask,
    Instruction,
    Refuse,
    Release,
    RequestPartition,
    Send,
    StartTask,
    WorkerState,
    attempt_id,
)
from support.attempts import attempt

SETTINGS = ClusterSettings(task_cancel_timeout=10.0, partition_request_timeout=5.0)
ME = 2
JOBS = st.sampled_from(["j1", "j1", "j1", "j2"])
INDICES = st.integers(0, 1)
NUMBERS = st.sampled_from([1, 1, 1, 2, 3])
"""Most of the time the first, so that deep states are reached."""
PEERS = st.sampled_from([1, 3])
EPOCHS = st.sampled_from([1, 1, 1, 2, 3])


class Orders(RuleBasedStateMachine):
    """Worker 2 of three runs subtasks of operator 0 (two producers) and 1 (two consumers) of two jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.state = WorkerState(SETTINGS, ME, epoch=1, term=1)
        self.now = 0.0
        self.live: set[AttemptId] = set()
        """Attempts that run."""
        self.there: set[AttemptId] = set()
        """Attempts that were not released."""
        self.ended: Counter[tuple[str, int, int, int]] = Counter()
        self.open: set[tuple[int, int]] = set()
        """Requests of peers that were not answered: link and channel id."""
        self.granted: dict[tuple[AttemptId, int], tuple[int, int]] = {}
        """By producer and consumer index: attempt and generation that reads."""
        self.known: dict[SubtaskId, int] = {}
        """The highest attempt that the coordinator has named."""
        self.links: set[int] = set()
        self.dials: set[tuple[int, int]] = set()
        """Under way: worker and epoch."""
        self.announced: dict[int, int] = {}
        self.channels = 0

    @initialize()
    def announce_all(self) -> None:
        for worker in (1, 3):
            self.announced[worker] = 1
            self.carry_out(self.state.handle(Dial(term=1, peer=self.address(worker)), self.now))
        self.link_up(3)

    # --- what the shell does -------------------------------------------------------------------------

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartTask(message, spec):
                    key = attempt_id(message.job, spec)
                    assert key not in self.there
                    self.live.add(key)
                    self.there.add(key)
                case CancelTask(key):
                    assert key in self.live
                case AbandonTask(key):
                    self.live.remove(key)
                case Release(attempts):
                    self.there.difference_update(attempts)
                    self.live.difference_update(attempts)
                case Send(message):
                    self.sent(message)
                case Attach(link, request, producer):
                    self.answered(link, request.channel)
                    self.reads(producer, request)
                case Refuse(link, channel, _):
                    self.answered(link, channel)
                case ConnectLocal(channel, producer, generation):
                    assert channel.attempt in self.live
                    request = self.request_of(channel)
                    assert request.generation == generation
                    self.reads(producer, request)
                case RequestPartition(worker, channel, _):
                    assert channel.attempt in self.live
                    assert worker in self.links
                case FailTask(channel, _):
                    assert channel.attempt in self.live
                case DialPeer(peer):
                    dial = (peer.worker, peer.epoch)
                    assert dial not in self.dials, "a second link would take the place of the first"
                    self.dials.add(dial)

    def request_of(self, channel: ChannelKey) -> PartitionRequest:
        return dict(self.state.inputs.phases())[channel].request

    def sent(self, message: ControlMessage) -> None:
        if isinstance(message, TaskStateChanged) and message.state != "running":
            self.ended[message.job, message.operator, message.index, message.attempt] += 1
            assert max(self.ended.values()) == 1

    def answered(self, link: int, channel: int) -> None:
        assert (link, channel) in self.open, "answered twice, or over a link that is gone"
        self.open.remove((link, channel))

    def reads(self, producer: AttemptId, request: PartitionRequest) -> None:
        assert producer in self.there
        assert producer.attempt == request.producer_attempt
        reader = request.consumer_attempt, request.generation
        where = producer, request.subpartition
        consumer = attempt(1, request.subpartition, job=request.job).subtask
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
        """Producer 0 runs here, producer 1 on ``seat``; the attempts of the producers are ``number`` too."""
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
        )
        attempts = [
            TaskAttempt(operator=operator, index=each, attempt=newer.draw(NUMBERS))
            for operator in (0, 1)
            for each in range(2)
            if newer.draw(st.sampled_from([False, False, True]))
        ]
        message = DeployTasks(
            term=1,
            job=job,
            name="job",
            settings={},
            programs={},
            tasks=[spec],
            workers=[self.address(worker) for worker in (1, 2, 3)],
            placement={0: pack_placement([ME, seat])},
            attempts=attempts,
        )
        for named in (spec, *attempts):
            key = attempt_id(job, named)
            self.known[key.subtask] = max(key.attempt, self.known.get(key.subtask, 1))
        for _ in range(2):
            self.carry_out(self.state.handle(message, self.now))

    @rule(job=JOBS, operator=INDICES, index=INDICES, number=st.integers(0, 3), cancel=st.booleans())
    def cancel_or_release(self, job: str, operator: int, index: int, number: int, cancel: bool) -> None:
        """Of one attempt, or of the whole job (0). An attempt is released once it has ended."""
        named = [TaskAttempt(operator=operator, index=index, attempt=number)] if number else []
        if cancel:
            self.carry_out(self.state.handle(CancelTasks(term=1, job=job, attempts=named), self.now))
            return
        message = ReleaseJob(term=1, job=job, attempts=named)
        self.carry_out(self.state.handle(message, self.now))
        if not named:
            assert not any(key.subtask.job == job for key in self.there)
            self.granted = {at: by for at, by in self.granted.items() if at[0].subtask.job != job}
            self.known = {subtask: n for subtask, n in self.known.items() if subtask.job != job}
            self.ended = Counter({key: n for key, n in self.ended.items() if key[0] != job})

    @rule(worker=PEERS, epoch=EPOCHS)
    def announce(self, worker: int, epoch: int) -> None:
        """What the coordinator said before may come again, and changes nothing."""
        if epoch > self.announced[worker]:  # the link before is one to a process that is gone
            self.announced[worker] = epoch
            self.links.discard(worker)
            self.forget_requests(worker)
        peer = self.address(worker).model_copy(update={"epoch": epoch})
        self.carry_out(self.state.handle(Dial(term=1, peer=peer), self.now))

    # --- tasks and links -----------------------------------------------------------------------------

    @rule(data=st.data(), state=st.sampled_from(["finished", "failed", "canceled"]))
    def task_ends(self, data: st.DataObject, state: str) -> None:
        if self.live:
            key = data.draw(st.sampled_from(sorted(self.live)))
            self.live.discard(key)
            for _ in range(2):
                self.carry_out(self.state.task_ended(key, state, None, b"", TaskCounters()))

    @rule(worker=PEERS)
    def link_up(self, worker: int) -> None:
        """Of the epoch that the coordinator announced; it may replace another."""
        self.dials.discard((worker, self.announced[worker]))
        self.forget_requests(worker)
        self.links.add(worker)
        self.carry_out(self.state.peer_up(worker))

    def forget_requests(self, worker: int) -> None:
        self.open = {(link, channel) for link, channel in self.open if link != worker}

    @rule(worker=PEERS)
    def link_down(self, worker: int) -> None:
        if worker in self.links:
            self.links.remove(worker)
            self.forget_requests(worker)
            self.carry_out(self.state.peer_down(worker))

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if self.open:
            link, channel = data.draw(st.sampled_from(sorted(self.open)))
            self.open.remove((link, channel))
            self.state.partition_cancelled(link, channel)

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
        producers = [key for key in sorted(self.there) if key.subtask.operator == 0]
        producer = data.draw(st.sampled_from([*producers, attempt(0, 1, 3)]))
        job, index = producer.subtask.job, producer.subtask.index
        for consumer, of_consumer, generation in asked:
            self.channels += 1
            request = PartitionRequest(
                self.channels, job, 0, index, consumer, producer.attempt, of_consumer, generation, 0
            )
            self.open.add((worker, self.channels))
            self.carry_out(self.state.partition_requested(worker, request, self.now))

    @rule(data=st.data(), fails=st.booleans())
    def channel_changes(self, data: st.DataObject, fails: bool) -> None:
        """What the shell hears of a channel: its first buffer, its end, its failure."""
        channels = [
            (key, entry)
            for key, entry in self.state.inputs.phases()
            if entry.phase in (ChannelPhase.REQUESTED, ChannelPhase.ATTACHED) and entry.worker != ME
        ]
        if channels:
            key, entry = data.draw(st.sampled_from(channels))
            self.change(key, entry, fails)

    def change(self, key: ChannelKey, entry: ChannelEntry, fails: bool) -> None:
        event = ChannelEvent.ATTACH if entry.phase is ChannelPhase.REQUESTED else ChannelEvent.END
        event = ChannelEvent.FAIL if fails else event
        assert self.state.inputs.move(key, entry.request.generation, event)

    # --- time ----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.state.next_deadline()) is not None and due <= end:
            assert due >= self.now
            self.now = due
            self.carry_out(self.state.handle_timer(due))
        self.now = end

    @invariant()
    def valid(self) -> None:
        self.state.validate()

    def teardown(self) -> None:
        """Nobody says anything any more: every request is answered, and no time is waited for."""
        self.pass_time(60.0)
        self.state.validate()
        assert self.open == set()
        assert self.state.next_deadline() is None


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

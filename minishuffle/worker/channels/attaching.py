"""Which channels of a worker are attached to which partitions, on this worker and on others. Pure.

A channel is requested as soon as its producer can be asked: it is deployed, and there is a link to its
worker. It is requested again a while after it failed, and from the attempt that takes its producer's place.
Requests of peers wait until the partition is there. The phases of a channel stand in
:mod:`~minishuffle.worker.channels.registry`, the links in :mod:`~minishuffle.worker.channels.dialing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from minishuffle import limits
from minishuffle.config import ClusterSettings
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    PeerSuspected,
    ShuffleError,
    Superseded,
    clipped,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import (
    AttemptId,
    OperatorId,
    PartitionId,
    SubtaskId,
    holder_operator,
    is_holder,
    is_snapshot_edge,
    is_state_edge,
    snapshot_edge,
    state_edge,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import (
    AskDial,
    DeployTasks,
    ErrorInfo,
    HolderSpec,
    PeerSuspicion,
    Probed,
    TaskSpec,
    TasksRestarted,
    UnlinkedPeer,
    WorkerAddress,
    WorkerLost,
)
from minishuffle.wire.reports import EndsRead
from minishuffle.worker.channels.dialing import Dialing
from minishuffle.worker.channels.registry import (
    LIVE_PHASES,
    ChannelEntry,
    ChannelKey,
    ChannelPhase,
    InputRegistry,
    PartitionRegistry,
    Progress,
    Upstream,
    Waiting,
)
from minishuffle.worker.instructions import (
    Attach,
    CloseLinks,
    ConnectLocal,
    DialPeer,
    FailChannel,
    Fence,
    Instruction,
    ProbePeer,
    Refuse,
    Report,
    RequestPartition,
    Send,
    attempt_id,
)
from minishuffle.worker.reports.recoverysteps import Reattachments
from minishuffle.worker.tasks.tasktable import TaskTable
from minishuffle.worker.tasks.threadwatchdog import stuck_error

__all__ = ["Attaching"]

NO_WORKER: Final = 0
"""The worker of a producer that is not deployed yet; a channel that needs it sends no request."""
GOOD_LINK_SECONDS_MIN: Final = 1.0
"""Shortest time that a link must have been up before it counts as good."""


class Attaching:
    """The channels of worker ``worker``, and the partitions and links that they need.

    Invariants: an attempt that is terminal has no channel in the registry, unless it has finished and
    listens; no channel waits for a link to a peer that is up or lost.

    Args:
        term: gives the term of the coordinator that the worker obeys.
        tasks: the attempts that are here.
        progress: see :meth:`Attempt.progress`, of an attempt that runs here.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        worker: int,
        term: Callable[[], int],
        tasks: TaskTable,
        progress: Callable[[AttemptId], Progress],
    ) -> None:
        self.inputs, self.partitions = InputRegistry(), PartitionRegistry()
        self.peers = Dialing(worker, max(GOOD_LINK_SECONDS_MIN, 2.0 * settings.suspect_after))
        self.suspicions = 0
        """How often a peer has answered no Ping."""
        self._settings, self._worker, self._term = settings, worker, term
        self._tasks, self._progress = tasks, progress
        self.reattachments = Reattachments()

    # --- what the coordinator says ---------------------------------------------------------------

    def announce(self, address: WorkerAddress, now: float) -> list[Instruction]:
        """The coordinator gives a worker's address. A later epoch is a new process, without any state of the
        process before it."""
        worker = address.worker
        if not self.peers.announce(address):
            return []
        error = PeerLost(f"worker {worker} has epoch {address.epoch} by now")
        return self._abandon_worker(worker, error, now)

    def worker_lost(self, message: WorkerLost, now: float) -> list[Instruction]:
        """Channels that read from the lost worker wait until the coordinator says where they continue."""
        worker, epoch = message.worker, message.epoch
        instructions: list[Instruction] = [CloseLinks(worker, epoch)]
        if self.peers.declare_lost(worker, epoch):
            error = PeerLost(f"worker {worker} was declared lost")
            instructions += self._abandon_worker(worker, error, now)
        return instructions

    def dial(self, address: WorkerAddress, now: float) -> list[Instruction]:
        """A link to a worker is needed."""
        worker = address.worker
        if worker == self._worker:
            return []
        instructions = self.announce(address, now)
        return instructions if self.peers.is_up(worker) else instructions + self._want_link(worker, now)

    def probe(self, peers: Sequence[WorkerAddress]) -> list[Instruction]:
        """Probe peers: linked ones count as reached, the others are dialed."""
        linked = [each for each in peers if self.peers.announced(each.worker) == each.epoch]
        linked = [each for each in linked if self.peers.is_up(each.worker)]
        answers = [Probed(term=self._term(), worker=each.worker, epoch=each.epoch) for each in linked]
        return [*map(Send, answers), *(ProbePeer(each) for each in peers if each not in linked)]

    def learn_named(
        self, workers: Sequence[WorkerAddress], attempts: Iterable[AttemptId], now: float
    ) -> list[Instruction]:
        """The coordinator has named workers and attempts on them."""
        instructions = [each for address in workers for each in self.announce(address, now)]
        return instructions + [each for attempt in attempts for each in self.learn(attempt)]

    def learn(self, attempt: AttemptId) -> list[Instruction]:
        """The coordinator has named an attempt: close the channels that earlier ones have read here."""
        return [Fence(producer, edge, attempt) for producer, edge in self.partitions.learn(attempt)]

    def restarted(self, message: TasksRestarted, now: float) -> list[Instruction]:
        """Attach channels from earlier attempts to the new ones, and close the channels that earlier attempts
        have read here."""
        attempts = [attempt_id(message.job, placed) for placed in message.tasks]
        instructions = self.learn_named(
            message.workers, attempts, now
        )  # First, so as not to attach earlier ones.
        for placed, attempt in zip(message.tasks, attempts, strict=True):
            for channel in self.inputs.readers(attempt.subtask):
                # Snapshots are of one attempt each, whatever version its rows are of.
                version = 0 if is_snapshot_edge(channel.edge) else placed.version
                upstream = Upstream(placed.attempt, placed.worker, version or placed.attempt)
                instructions += self._reattach(channel, upstream, now)
        return [*instructions, *self.serve_waiting(now)]

    # --- the channels of a task ------------------------------------------------------------------

    def add(self, key: AttemptId, spec: TaskSpec) -> list[Instruction]:
        """An attempt is deployed here: its partitions can be requested. A holder hears of each new attempt of
        its task, whether an earlier one has read from it or not."""
        repeats = bool(spec.version) or is_holder(spec.operator)
        instructions: list[Instruction] = []
        if spec.holder:
            holder = holder_operator(spec.operator)
            instructions += self.learn(AttemptId.of(key.subtask.job, holder, spec.index, spec.holder))
        self.partitions.add(key, spec.outputs, repeats=repeats)
        return instructions + self.learn(key)

    def end(self, key: AttemptId, *, listens: bool = False) -> None:
        """The attempt is terminal: it reads nothing any more. If it ``listens``, links to its producers are
        made until they have heard what its last snapshot covers."""
        for channel in () if listens else self.inputs.remove(key):
            self.partitions.take_back(self._worker, channel)

    def connect(self, message: DeployTasks, key: AttemptId, spec: TaskSpec, now: float) -> list[Instruction]:
        """Ask for what a task reads, as soon as its producers can be asked."""
        instructions = self._connect_state(key, spec, now)
        repairs = message.settings.get("restart_strategy") != "none"
        for gate in spec.inputs:
            versions, later = message.versions(gate.operator), set(gate.later)
            for producer, attempt, worker in message.channels(gate):
                partition = PartitionId(key.subtask.job, gate.edge, producer)
                version = versions.get(producer, attempt)
                request = PartitionRequest(partition, spec.index, attempt, spec.attempt, version=version)
                channel = ChannelKey(key, gate.edge, producer)
                subtask = SubtaskId(key.subtask.job, OperatorId(gate.operator), producer)
                is_there = producer not in later
                entry = ChannelEntry(
                    subtask,
                    worker if is_there else NO_WORKER,
                    request,
                    repairs,
                )
                self.inputs.want(channel, entry)
                instructions += self._request(channel, entry, now) if is_there else []
        return instructions

    def _connect_state(self, key: AttemptId, spec: TaskSpec, now: float) -> list[Instruction]:
        """Ask for the state that an earlier attempt of the subtask has kept, if there is any."""
        if not spec.state_attempt:
            return []
        job, edge = key.subtask.job, state_edge(spec.operator)
        partition = PartitionId(job, edge, spec.index)
        request = PartitionRequest(partition, spec.index, spec.state_attempt, spec.attempt)
        # The keeper is no subtask: no later attempt takes the place of the one that has written the state.
        keeper = SubtaskId(job, OperatorId(edge), spec.index)
        channel = ChannelKey(key, edge, spec.index)
        entry = ChannelEntry(keeper, spec.state_worker, request, repairs=True)
        self.inputs.want(channel, entry)
        return self._request(channel, entry, now)

    def connect_holder(self, key: AttemptId, held: HolderSpec, now: float) -> list[Instruction]:
        """Ask for the snapshots of a task, as soon as its worker can be asked."""
        job, edge = key.subtask.job, snapshot_edge(held.operator)
        request = PartitionRequest(
            PartitionId(job, edge, held.index),
            held.index,
            held.task_attempt,
            held.attempt,
            version=held.task_attempt,
        )
        task = SubtaskId(job, OperatorId(held.operator), held.index)
        channel = ChannelKey(key, edge, held.index)
        entry = ChannelEntry(task, held.task_worker, request, repairs=True)
        self.inputs.want(channel, entry)
        return self._request(channel, entry, now)

    def keep_state(self, key: AttemptId) -> None:
        """The attempt has ended, and its state can be requested."""
        self.partitions.add(key, self._tasks.keep_state(key))

    def state_taken(self, key: AttemptId) -> None:
        """The attempt reads no state any more."""
        channel = self.inputs.state_of(key)
        if channel is not None:
            self.partitions.take_back(self._worker, channel)
            self.inputs.remove_one(channel)

    def channel_event(
        self, channel: ChannelKey, generation: int, event: ChannelEvent, now: float
    ) -> list[Instruction]:
        """Something happened to that generation of an input channel."""
        before = self.inputs.get(channel)
        live = before is not None and before.phase in LIVE_PHASES
        entry = self.inputs.move(channel, generation, event)
        if entry is None:
            return []
        match event:
            case ChannelEvent.END if _brings_state(channel) or not self._tasks.runs(channel.attempt):
                return []
            case ChannelEvent.END:
                read = EndsRead(attempt=channel.attempt, edge=channel.edge, producers=[channel.producer])
                return [Report(read)]
            case ChannelEvent.ATTACH:
                self.inputs.answered(channel)
                self._attached(channel, entry, now)
            case ChannelEvent.FAIL if live:
                self._repair_later(channel, entry, now)
            case ChannelEvent.DRAIN if entry.phase is ChannelPhase.WANTED:
                return self._request(channel, entry, now)
            case ChannelEvent.DRAIN if entry.retry_at is not None and now >= entry.retry_at:
                return self._renew(channel, entry.upstream, now)
        return []

    def _attached(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> None:
        if _brings_state(channel) or not self._tasks.runs(channel.attempt):
            return
        producer = AttemptId(entry.producer, entry.request.producer_attempt)
        self.reattachments.attached(channel.attempt, producer, now)

    def _request(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> list[Instruction]:
        """Ask for what a channel wants, as soon as that worker can be asked."""
        worker, request = entry.worker, entry.request
        if worker == self._worker:
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return self.requested(worker, request, channel, now)
        if self.peers.is_lost(worker):
            error = PeerLost(f"worker {worker} was declared lost")
            return [self._fail(channel, _for_good(channel, error), now)]
        if self.peers.is_up(worker):
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return [RequestPartition(worker, channel, request)]
        self.peers.need(worker, now)
        return self._want_link(worker, now)

    def _renew(self, channel: ChannelKey, upstream: Upstream, now: float) -> list[Instruction]:
        """The next generation reads from ``upstream``, now or when the channel is drained."""
        drain_by = now + self._settings.reconnect_timeout
        entry = self.inputs.renew(channel, upstream, drain_by, self._progress(channel.attempt))
        return self._request(channel, entry, now) if entry.phase is ChannelPhase.WANTED else []

    def _reattach(self, channel: ChannelKey, upstream: Upstream, now: float) -> list[Instruction]:
        """The coordinator has named the attempt to read from; an older word changes nothing, nor does any
        once the end was read. What a task goes on from is with the holder that it was deployed with: the next
        one does not have it."""
        entry = self.inputs[channel]
        if entry.phase is ChannelPhase.ENDED or upstream == entry.upstream:
            return []
        if is_holder(entry.producer.operator):
            return []
        if upstream.attempt < entry.upstream.attempt:
            return []
        instructions: list[Instruction] = []
        if entry.phase in (ChannelPhase.REQUESTED, ChannelPhase.ATTACHED):
            text = f"attempt {upstream.attempt} of subtask {entry.producer} takes the place of its attempt "
            error = Superseded(text + str(entry.request.producer_attempt))
            instructions.append(self._fail(channel, error, now))
        return instructions + self._renew(channel, upstream, now)

    def _fail(self, channel: ChannelKey, error: ShuffleError, now: float) -> FailChannel:
        """Nothing more comes of the current generation, which had not failed before."""
        entry = self.inputs[channel]
        generation = entry.request.generation
        self.partitions.take_back(self._worker, channel)
        self.inputs.move(channel, generation, ChannelEvent.FAIL)
        self._repair_later(channel, entry, now)
        return FailChannel(channel, generation, error)

    def _repair_later(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> None:
        """Request the same attempt again in a while, unless it is known that this is of no use."""
        if entry.worker == self._worker or not self.peers.is_lost(entry.worker):
            self.inputs.retry_later(channel, now)

    # --- peers -----------------------------------------------------------------------------------

    def _abandon_worker(self, worker: int, error: PeerLost, now: float) -> list[Instruction]:
        """A process is gone for good: nothing is requested of it again."""
        self.partitions.drop_link(worker)
        instructions: list[Instruction] = []
        for channel in self.inputs.of_worker(worker):
            entry = self.inputs[channel]
            if entry.phase in LIVE_PHASES:
                instructions.append(self._fail(channel, _for_good(channel, error), now))
            elif is_state_edge(channel.edge) and entry.phase is not ChannelPhase.ENDED:
                # Asked for once more, it fails for good.
                instructions += self._renew(channel, entry.upstream, now)
            self.inputs.give_up(channel)
        return instructions

    def _want_link(self, worker: int, now: float) -> list[Instruction]:
        return [self._reach(worker)] if self.peers.want(worker, now) else []

    def _reach(self, worker: int) -> Instruction:
        if self._worker < worker:
            return DialPeer(self.peers.address(worker))
        return Send(AskDial(term=self._term(), worker=self._worker, target=worker))

    def peer_up(self, worker: int, now: float) -> list[Instruction]:
        """A link to that worker, of the epoch that the coordinator announced, replaces any before."""
        instructions = self._link_gone(worker, PeerLost(f"worker {worker} connected anew"), now)
        instructions += self._suspect(worker, False)
        self.peers.link_up(worker, now)
        for channel in self.inputs.wanting(worker):
            instructions += self._request(channel, self.inputs[channel], now)
        return instructions

    def peer_down(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        """The link of that worker that was up last is gone. Until the coordinator's verdict the channels of a
        peer that is suspected are repaired like any others."""
        self.peers.link_down(worker, error, now)
        if self._jobs_reading(worker):
            self.peers.need(worker, now)
        if not isinstance(error, PeerSuspected):
            self._restore(worker, now)
            return self._link_gone(worker, error, now)
        suspicion = self._suspect(worker, True) + self._link_gone(worker, error, now)
        # At once for every channel that needs the link: a process that was stopped finds it in its socket
        # when it goes on.
        return suspicion + self._want_link(worker, now)

    def _restore(self, worker: int, now: float) -> None:
        """Until the verdict, a link that is gone is dialed as long as there are tasks here: if none of them
        reads over it, one may serve."""
        if self._tasks:
            self.peers.restore(worker, now)

    def _suspect(self, worker: int, suspected: bool) -> list[Instruction]:
        """Tell the coordinator what is new."""
        if not self.peers.suspect(worker, suspected):
            return []
        self.suspicions += suspected
        epoch = self.peers.announced(worker)
        return [Send(PeerSuspicion(term=self._term(), worker=worker, epoch=epoch, suspected=suspected))]

    def _link_gone(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        """Requests on the link, in both directions, are dropped: other links do not know their channels."""
        self.partitions.drop_link(worker)
        return [self._fail(channel, error, now) for channel in self.inputs.reading(worker)]

    def _jobs_reading(self, worker: int) -> list[str]:
        """The jobs of tasks here that have something to read from a worker, now or when it can be asked."""
        keys = self.inputs.of_worker(worker)
        unread = (key for key in keys if self.inputs[key].phase is not ChannelPhase.ENDED)
        return sorted({key.attempt.subtask.job for key in unread})

    def unlinked(self, now: float) -> list[UnlinkedPeer]:
        """The peers that channels here need a link to and have none, or none that is known to be good."""
        found = []
        for address, seconds, why in self.peers.unlinked(now):
            jobs = self._jobs_reading(address.worker)
            if not jobs:
                self.peers.spare(address.worker)
                continue
            found.append(
                UnlinkedPeer(
                    worker=address.worker,
                    epoch=address.epoch,
                    seconds=seconds,
                    why=clipped(why, limits.LINK_ERROR_CHARS_MAX),
                    jobs=list(jobs),
                )
            )
        return found

    def dial_failed(self, dialed: WorkerAddress, error: ShuffleError, now: float) -> list[Instruction]:
        """A dial came to nothing: it is tried again, or what needs that peer fails."""
        given_up = self.peers.dial_failed(dialed, error, now)
        return self._give_peer_up(dialed.worker, error, now) if given_up else []

    def _give_peer_up(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        if error.retriable:
            self._restore(worker, now)
        return [self._fail(channel, error, now) for channel in self.inputs.wanting(worker)]

    # --- requests --------------------------------------------------------------------------------

    def requested(
        self, link: int, request: PartitionRequest, channel: ChannelKey | None, now: float
    ) -> list[Instruction]:
        """A partition is wanted: granted now, later, or never. Requests of peers and of this worker's own
        channels stand in one line.

        Args:
            link: the peer's worker id.
            channel: the channel that wants it, if it is one of this worker.
        """
        waiting = Waiting(link, request, channel, now + self._settings.partition_request_timeout)
        try:
            producer = self.partitions.request(waiting)
        except ShuffleError as error:
            return [self._answer(waiting, error, now)]
        return [self._answer(waiting, producer, now)] if producer is not None else []

    def _answer(self, waiting: Waiting, answer: AttemptId | ShuffleError, now: float) -> Instruction:
        """Attach a waiting request to the producer's attempt, or refuse it."""
        request, channel = waiting.request, waiting.channel
        if isinstance(answer, ShuffleError):
            if channel is None:
                return Refuse(waiting.link, request.channel, answer)
            return self._fail(channel, answer, now)
        if channel is None:
            return Attach(waiting.link, request, answer)
        entry = self.inputs.move(channel, request.generation, ChannelEvent.ATTACH)
        assert entry is not None
        self._attached(channel, entry, now)
        return ConnectLocal(channel, answer, request.generation, request.version)

    def serve_waiting(self, now: float) -> list[Instruction]:
        """Answer the requests that waited for what is there by now."""
        return [self._answer(waiting, answer, now) for waiting, answer in self.partitions.take_answers()]

    # --- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`stuck` and :meth:`due` want to be asked; None for not at all."""
        times = [self.peers.next_deadline(), self.inputs.next_deadline()]
        times += [self.reattachments.next_deadline(), self.partitions.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def due(self, now: float) -> list[Instruction]:
        """Refuse what has waited for too long, request what failed a while ago, and try to reach peers."""
        late = self.partitions.take_late(now, self._worker)
        instructions = [self._answer(each, why, now) for each, why in late]
        for channel in self.inputs.take_retries(now):
            instructions += self._renew(channel, self.inputs[channel].upstream, now)
        instructions += map(Send, self.reattachments.take(self._term(), now))
        for worker, error in self.peers.due(now):
            instructions += [self._reach(worker)] if error is None else self._give_peer_up(worker, error, now)
        return instructions

    def stuck(self, now: float) -> Iterator[tuple[AttemptId, ErrorInfo]]:
        """Attempts to give up, each before the next is asked for: they are stuck although the next attempt
        of a producer waits for them.

        Only time in one and the same call of the user's code counts. A task that waits for its consumers does
        what it should: to fence it would lose what it has read, and its next attempt would wait for the same
        consumers. A slow one gets there in the end, and so does a task that waits for another input.
        """
        for channel in self.inputs.undrained(now):
            key, seconds = channel.attempt, self._settings.reconnect_timeout
            if not self._tasks.runs(key):  # another channel of it was looked at before
                continue
            progress, entry = self._progress(key), self.inputs[channel]
            if progress is None or progress != entry.progress:
                self.inputs.postpone(channel, progress, now + seconds)
                continue
            unread = f"what is left of edge {channel.edge} from subtask {entry.producer}"
            waits = f"whose attempt {entry.upstream.attempt} waits"
            yield key, stuck_error(self._tasks[key], seconds, f"{unread}, {waits}")

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.inputs.validate()
        self.peers.validate()
        self.partitions.validate({key: self._tasks[key].outputs for key in self._tasks.held()})
        local = {each.channel for each in self.partitions.waiting() if each.channel is not None}
        for key, entry in self.inputs.phases():
            assert self._tasks.runs(key.attempt) or self._tasks.listens(key.attempt)
            is_local = entry.worker == self._worker
            if entry.phase is ChannelPhase.WANTED:
                assert not is_local
                there = self.peers.is_up(entry.worker) or self.peers.is_lost(entry.worker)
                assert entry.worker == NO_WORKER or not there
            assert (key in local) == (is_local and entry.phase is ChannelPhase.REQUESTED)


def _brings_state(channel: ChannelKey) -> bool:
    """Whether rows over that channel are state or snapshots, and of no edge of the graph."""
    return is_state_edge(channel.edge) or is_snapshot_edge(channel.edge)


def _for_good(channel: ChannelKey, error: PeerLost) -> ShuffleError:
    """The error of a channel whose producer's process is gone: nobody will have the state that it kept."""
    return PartitionLost(str(error)) if is_state_edge(channel.edge) else error

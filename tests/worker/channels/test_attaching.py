"""What a worker decides when channels fail, producers restart, and peers are suspected."""

from __future__ import annotations

import pytest

from minishuffle.errors import PeerLost, PeerSuspected, Superseded
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.wire.messages import (
    PeerSuspicion,
    PlacedAttempt,
    Probe,
    Probed,
    RecoverySteps,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
    WorkerLost,
)
from minishuffle.wire.reports import TaskStateChanged
from minishuffle.worker.channels.registry import ChannelKey, Progress
from minishuffle.worker.instructions import (
    AbandonTask,
    CloseLinks,
    ConnectLocal,
    DialPeer,
    FailChannel,
    Fence,
    Instruction,
    ProbePeer,
    Report,
    RequestPartition,
    Send,
)
from minishuffle.worker.reports.recoverysteps import REPORT_SECONDS
from support.attempts import attempt as attempt_of
from support.workerstates import SOURCE, Machine, address, deploy, request, second, serving, sink, states

# --- channels that fail, and producers that restart -----------------------------------------------------

REMOTE = ChannelKey(attempt_of(1), 0, 1)
"""Of the sink here, whose producer is on worker 3."""
LOCAL = ChannelKey(attempt_of(1), 0, 0)


def restarted(*tasks: tuple[int, int, int, int], epoch: int = 1) -> TasksRestarted:
    """Operator, index, attempt and worker of each."""
    placed = [PlacedAttempt(operator=o, index=i, attempt=n, worker=w) for o, i, n, w in tasks]
    workers = [address(worker, epoch if worker == 3 else 1) for worker in (1, 2, 3)]
    return TasksRestarted(term=1, job="j1", tasks=placed, workers=workers)


def reading(*, now: float = 0.0, strategy: str = "individual", on_unavailable: str = "drop") -> Machine:
    """The sink here reads from the source here and from worker 3."""
    machine = Machine()
    machine.tell(deploy(SOURCE, sink(), strategy=strategy, on_unavailable=on_unavailable), now)
    assert [type(i) for i in machine.up(3, now)] == [RequestPartition]
    machine.happens(REMOTE, ChannelEvent.ATTACH, now)
    return machine


def requests(instructions: list[Instruction]) -> list[tuple[int, int, int]]:
    """Worker, attempt of the producer and generation of each."""
    return [
        (i.worker, i.request.producer_attempt, i.request.generation)
        for i in instructions
        if isinstance(i, RequestPartition)
    ]


def failures(instructions: list[Instruction]) -> list[tuple[ChannelKey, int, str]]:
    return [(i.channel, i.generation, str(i.error)) for i in instructions if isinstance(i, FailChannel)]


def test_a_channel_that_fails_is_requested_again_when_it_is_drained_and_a_while_has_passed() -> None:
    """Case 78, NettyPartitionRequestClientTest."""
    machine = reading()
    assert machine.happens(REMOTE, ChannelEvent.FAIL, 1.0) == []
    assert machine.tick(1.1) == [], "the task has not read what was delivered"
    assert requests(machine.happens(REMOTE, ChannelEvent.DRAIN, 1.2)) == [(3, 1, 2)]
    machine.happens(REMOTE, ChannelEvent.FAIL, 2.0)
    assert machine.happens(REMOTE, ChannelEvent.DRAIN, 2.0) == []
    assert machine.due == pytest.approx(2.2), "it failed before the producer had answered"
    assert requests(machine.tick(2.2)) == [(3, 1, 3)]
    machine.happens(REMOTE, ChannelEvent.ATTACH, 2.3)
    machine.happens(REMOTE, ChannelEvent.FAIL, 3.0)
    assert machine.happens(REMOTE, ChannelEvent.DRAIN, 3.0) == []
    assert requests(machine.tick(3.1)) == [(3, 1, 4)]


def test_a_job_that_does_not_restart_requests_nothing_again() -> None:
    """Case 98, RemoteInputChannelTest."""
    machine = reading(strategy="none")
    machine.happens(REMOTE, ChannelEvent.FAIL, 1.0)
    assert machine.due is None


def test_a_link_that_breaks_is_dialed_anew_and_its_channels_go_on_at_the_next_generation() -> None:
    machine = reading()
    machine.happens(REMOTE, ChannelEvent.FAIL, 1.0)
    assert machine.down(3, 1.0) == []
    assert machine.happens(REMOTE, ChannelEvent.DRAIN, 1.0) == []
    assert machine.tick(1.1) == [DialPeer(address(3))]
    assert machine.dial_failed(3, PeerLost("refused"), 1.1) == []
    assert machine.tick(1.25) == [DialPeer(address(3))]
    assert requests(machine.up(3, 1.3)) == [(3, 1, 2)]


def test_a_peer_that_cannot_be_reached_is_tried_for_ever_until_the_verdict() -> None:
    machine = reading()
    machine.happens(REMOTE, ChannelEvent.FAIL, 0.0)
    machine.down(3, 0.0)
    machine.happens(REMOTE, ChannelEvent.DRAIN, 0.0)
    now, dials = 0.0, 0
    while now < 60.0:
        now = machine.due or pytest.fail("nothing is tried any more")
        for instruction in machine.tick(now):
            if isinstance(instruction, DialPeer):
                dials += 1
                machine.dial_failed(3, PeerLost("refused"), now)
            elif isinstance(instruction, FailChannel):
                machine.happens(instruction.channel, ChannelEvent.DRAIN, now)
    assert 25 <= dials <= 60
    machine.tell(WorkerLost(term=1, worker=3, epoch=1), now)
    assert machine.tick(now + 60.0) == [] and machine.due is None


def test_links_that_channels_need_are_reported_with_their_jobs_since_they_are_missing() -> None:
    """Worker 2 dials worker 3, and has worker 1 asked to dial."""
    machine = Machine(worker=2)
    machine.tell(deploy(sink(), workers=[address(2), address(3)]), 1.0)
    (missing,) = machine.state.channels.unlinked(4.0)
    assert (missing.worker, missing.epoch, missing.seconds, missing.why) == (3, 1, 3.0, "")
    assert missing.jobs == ["j1"]
    machine.dial_failed(3, PeerLost("no route"), 4.0)
    assert [each.why for each in machine.state.channels.unlinked(5.0)] == ["no route"]
    for time in range(5, 60):
        machine.tick(float(time))
    (missing,) = machine.state.channels.unlinked(61.0)
    assert missing.seconds == 60.0, "however often it was tried"
    machine.up(3, 61.0)
    assert [each.seconds for each in machine.state.channels.unlinked(61.5)] == [60.0], "it may pass nothing"
    assert machine.state.channels.unlinked(69.0) == []
    machine.down(3, 70.0)
    (missing,) = machine.state.channels.unlinked(72.0)
    assert (missing.seconds, missing.why) == (2.0, "the link to worker 3 broke")
    machine.tell(ReleaseJob(term=1, job="j1"), 73.0)
    assert machine.state.channels.unlinked(74.0) == []
    machine.tell(deploy(sink(2), workers=[address(2), address(3)]), 80.0)
    assert [each.seconds for each in machine.state.channels.unlinked(81.0)] == [1.0]
    machine.tell(WorkerLost(term=1, worker=3, epoch=1), 82.0)
    assert machine.state.channels.unlinked(90.0) == []


def test_a_probe_of_a_peer_that_is_linked_is_answered_at_once() -> None:
    machine = serving(sink())
    probe = Probe(term=1, peers=[address(3), address(4), address(3, epoch=2)])
    linked, *dialed = machine.tell(probe)
    assert linked == Send(Probed(term=1, worker=3, epoch=1))
    assert dialed == [ProbePeer(address(4)), ProbePeer(address(3, epoch=2))]


def test_a_verdict_fails_what_reads_from_there_and_nothing_is_requested_there_again() -> None:
    machine = reading()
    told = machine.tell(WorkerLost(term=1, worker=3, epoch=1), 1.0)
    assert told == [CloseLinks(3, 1), *told[1:]]
    assert failures(told) == [(REMOTE, 1, "worker 3 was declared lost")]
    machine.down(3, 1.0)
    assert machine.happens(REMOTE, ChannelEvent.DRAIN, 1.0) == []
    assert machine.due is None
    assert machine.state.channels.peers.refusal(3, 1) == "worker 3 was declared lost"
    assert machine.state.channels.peers.refusal(3, 2) is None
    assert machine.tell(WorkerLost(term=1, worker=3, epoch=1), 2.0) == [CloseLinks(3, 1)]


def test_a_restarted_producer_is_read_as_soon_as_its_channel_is_drained() -> None:
    machine = reading()
    message = restarted((0, 1, 2, 3))
    told = machine.tell(message, 1.0)
    assert failures(told) == [(REMOTE, 1, "attempt 2 of subtask j1/0.1 takes the place of its attempt 1")]
    assert isinstance(told[0], FailChannel) and type(told[0].error) is Superseded
    assert machine.tell(message, 1.5) == [], "said twice, done once"
    assert requests(machine.happens(REMOTE, ChannelEvent.DRAIN, 2.0)) == [(3, 2, 2)]
    assert machine.tell(message, 2.5) == []
    assert machine.tell(restarted((0, 1, 1, 3)), 2.5) == [], "an older word"


def test_of_two_words_that_come_before_a_channel_is_drained_the_newest_counts() -> None:
    machine = reading()
    machine.happens(REMOTE, ChannelEvent.FAIL, 1.0)
    for attempt, worker in ((2, 3), (3, 1)):
        assert machine.tell(restarted((0, 1, attempt, worker)), 1.0) == []
    machine.tell(restarted((0, 1, 2, 3)), 1.0)
    machine.up(1)
    assert requests(machine.happens(REMOTE, ChannelEvent.DRAIN, 2.0)) == [(1, 3, 2)]
    assert machine.tick(60.0) == []


def test_a_producer_may_move_here_and_away() -> None:
    """Case 137, SingleInputGateTest."""
    machine = reading()
    machine.tell(restarted((0, 1, 2, 2), (0, 0, 2, 3)), 1.0)
    source = second(SOURCE.model_copy(update={"index": 1}))
    machine.tell(deploy(source), 1.0)
    moved = machine.happens(REMOTE, ChannelEvent.DRAIN, 2.0)
    assert moved == [ConnectLocal(REMOTE, attempt_of(0, 1, number=2), 2, 2)]
    assert requests(machine.happens(LOCAL, ChannelEvent.DRAIN, 2.0)) == [(3, 2, 2)]


def test_channels_of_restarted_attempts_are_reported_when_they_are_attached() -> None:
    machine = reading()
    machine.tell(restarted((0, 1, 2, 2), (0, 0, 2, 3)), 1.0)
    machine.tell(deploy(second(SOURCE.model_copy(update={"index": 1}))), 1.0)
    machine.happens(REMOTE, ChannelEvent.DRAIN, 2.0)
    machine.happens(LOCAL, ChannelEvent.DRAIN, 2.0)
    machine.happens(LOCAL, ChannelEvent.ATTACH, 2.0)
    machine.do(machine.state.recovered(attempt_of(0, 1, number=2), "first record", 2.0))
    sent = [each.message for each in machine.tick(2.0 + REPORT_SECONDS) if isinstance(each, Send)]
    (report,) = [message for message in sent if isinstance(message, RecoverySteps)]
    found = [(step.index, step.attempt, step.step, step.channels) for step in report.steps]
    assert found == [(1, 2, "outputs", 1), (0, 2, "outputs", 1), (1, 2, "first record", 1)]


def test_a_task_that_does_not_drain_a_channel_is_abandoned_and_the_error_says_which() -> None:
    machine = reading()
    machine.tell(restarted((0, 1, 2, 3)), 1.0)
    machine.tell(restarted((0, 1, 3, 3)), 3.0)
    assert machine.due == 1.1 and machine.tick(1.1) == []
    assert machine.due == 5.0, "4 s after the first word"
    instructions = machine.tick(5.0)
    assert instructions[0] == AbandonTask(attempt_of(1))
    assert states(instructions) == ["abandoned"]
    assert isinstance(instructions[1], Report) and isinstance(instructions[1].fact, TaskStateChanged)
    error = instructions[1].fact.error
    assert error is not None and error.text == (
        "sink[0] is stuck: for 4 s its function has not returned. It has yet to read what is left of edge 0 "
        "from subtask j1/0.1, whose attempt 3 waits"
    )
    assert machine.due is None
    assert machine.ended(operator=1) == []


@pytest.mark.parametrize("later", [None, (0.0, 0, 1), (0.0, 1, 0), (3.0, 0, 0)])
def test_a_task_that_waits_or_moves_is_not_stuck_however_long_it_takes(later: Progress) -> None:
    machine = reading()
    machine.tell(restarted((0, 1, 2, 3)), 1.0)
    for now in (5.0, 9.0):
        before, machine.progress = machine.progress, later if machine.progress != later else (9.0, 9, 9)
        assert before != machine.progress
        assert AbandonTask(attempt_of(1)) not in machine.tick(now)
        assert machine.due == now + 4.0
    assert AbandonTask(attempt_of(1)) in machine.tick(13.0), "now it has been in one call for 4 s"


def test_a_task_that_waits_for_its_consumers_is_not_stuck() -> None:
    machine = reading()
    machine.progress = None
    machine.tell(restarted((0, 1, 2, 3)), 1.0)
    for now in (5.0, 9.0, 13.0):
        assert machine.tick(now) == []
    machine.up(3, 13.0)
    assert requests(machine.happens(REMOTE, ChannelEvent.DRAIN, 14.0)) == [(3, 2, 2)]
    assert machine.state.channels.inputs.drain_by() is None


def test_a_channel_that_is_down_has_no_timer() -> None:
    machine = reading()
    machine.tell(WorkerLost(term=1, worker=3, epoch=1), 1.0)
    machine.happens(REMOTE, ChannelEvent.DRAIN, 1.0)
    assert machine.tick(1000.0) == [] and machine.due is None
    told = machine.tell(restarted((0, 1, 2, 3), epoch=2), 1000.0)
    assert told == [DialPeer(address(3, epoch=2))]
    assert requests(machine.up(3, 1000.0)) == [(3, 2, 2)]


def test_a_channel_that_has_ended_is_not_attached_again() -> None:
    machine = reading()
    machine.happens(REMOTE, ChannelEvent.END)
    assert machine.tell(restarted((0, 1, 2, 1)), 1.0) == []
    assert machine.up(1, 1.0) == []


@pytest.mark.parametrize("here", [True, False])
def test_a_source_that_repeats_its_rows_is_fenced_also_if_a_deployment_names_the_consumer_first(
    here: bool,
) -> None:
    """Attempt 1 of the consumer has yet to ask for attempt 2 of the source."""
    machine = Machine()
    source, consumer = second(SOURCE).model_copy(update={"version": 1}), attempt_of(1, number=2)
    machine.tell(deploy(source))
    other = sink(2) if here else sink(2).model_copy(update={"index": 1})
    named = [
        TaskAttempt(operator=0, index=0, attempt=2, version=1),
        TaskAttempt(operator=1, index=0, attempt=2),
    ]
    found = machine.tell(deploy(other).model_copy(update={"attempts": named}), 1.0)
    found += machine.tell(restarted((1, 0, 2, 2 if here else 3)), 1.0)
    fences = [each for each in found if isinstance(each, Fence) and each.consumer == consumer]
    assert fences == [Fence(attempt_of(0, number=2), 0, consumer)]
    connected = [at for at, each in enumerate(found) if isinstance(each, ConnectLocal)]
    assert len(connected) == 1 and found.index(fences[0]) < connected[0], "before it reads"


def test_a_link_that_replaces_another_fails_the_channels_of_that_one_first() -> None:
    machine = reading()
    told = machine.up(3, 1.0)
    assert failures(told) == [(REMOTE, 1, "worker 3 connected anew")] and len(told) == 1
    machine.happens(REMOTE, ChannelEvent.DRAIN, 1.0)
    assert requests(machine.tick(1.1)) == [(3, 1, 2)]


def test_a_link_that_breaks_while_there_is_no_coordinator_is_dialed_though_only_the_other_side_reads() -> (
    None
):
    """That one has the higher id, and nobody to ask for a dial."""
    machine = serving(SOURCE)
    machine.asked(3, request())
    assert machine.down(3, 1.0) == [], "most peers are gone then, and the verdict is under way"
    assert machine.tick(1.1) == [DialPeer(address(3))]
    machine.up(3, 1.2)
    assert machine.due is None
    machine.down(3, 2.0)
    machine.tell(WorkerLost(term=1, worker=3, epoch=1), 2.05)
    assert machine.due is None


# --- suspicion ------------------------------------------------------------------------------------------


def suspicion(worker: int, suspected: bool, epoch: int = 1) -> Send:
    return Send(PeerSuspicion(term=1, worker=worker, epoch=epoch, suspected=suspected))


def test_a_suspected_peer_is_reported_and_its_channels_are_repaired_without_a_new_attempt() -> None:
    machine = reading()
    silent = machine.down(3, 1.0, PeerSuspected("worker 3 has answered no Ping for 0.5 s"))
    assert (silent[0], silent[-1]) == (suspicion(3, True), DialPeer(address(3)))
    assert failures(silent[1:-1]) == [(REMOTE, 1, "worker 3 has answered no Ping for 0.5 s")]
    assert machine.state.channels.suspicions == 1
    machine.happens(REMOTE, ChannelEvent.DRAIN, 1.0)
    assert machine.tick(1.1) == [], "the dial is under way"
    error = PeerLost("worker 3 cannot be reached")
    assert machine.dial_failed(3, error, 6.1) == [], "it is tried again"
    assert DialPeer(address(3)) in machine.tick(6.2)
    back = machine.up(3, 7.0)
    assert back[0] == suspicion(3, False)
    assert requests(back[1:]) == [(3, 1, 2)]
    assert machine.down(3, 8.0)[0] != suspicion(3, True), "that link only broke"


def test_silence_is_borne_as_long_as_the_coordinator_bears_it_where_all_tasks_wait_for_their_consumers() -> (
    None
):
    machine = reading(on_unavailable="wait")
    assert machine.state.tolerates_silence(2.9)
    assert not machine.state.tolerates_silence(3.0)


def test_no_silence_is_borne_where_a_task_drops_what_its_consumers_do_not_take_until_it_has_ended() -> None:
    machine = reading(on_unavailable="drop")
    assert not machine.state.tolerates_silence(0.5)
    machine.ended(0)
    machine.ended(1)
    assert machine.state.tolerates_silence(0.5)


def test_the_verdict_ends_a_suspicion() -> None:
    machine = reading()
    machine.down(3, 1.0, PeerSuspected("worker 3 has answered no Ping for 0.5 s"))
    assert machine.due is not None
    machine.tell(WorkerLost(term=1, worker=3, epoch=1), 3.0)
    assert machine.tick(60.0) == []
    machine.tell(restarted((0, 1, 2, 3), epoch=2), 61.0)
    assert suspicion(3, False, epoch=2) not in machine.up(3, 61.0)

"""The worker's decisions: messages and events in, instructions out; no clock, no sockets."""

from __future__ import annotations

import pytest

from minishuffle.errors import PartitionNotFound, PeerLost, ShuffleError
from minishuffle.wire.handshake import REASONS, HandshakeRefused
from minishuffle.wire.messages import (
    CancelTasks,
    Dial,
    PlacedAttempt,
    PrepareJob,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
)
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.instructions import (
    AbandonTask,
    Attach,
    CancelTask,
    ConnectLocal,
    DialPeer,
    Exit,
    FailChannel,
    Fence,
    Instruction,
    Refuse,
    Release,
    Report,
    RequestPartition,
    StartTask,
    state_change,
)
from minishuffle.worker.state import LEAVE_GRACE_SECONDS
from support.attempts import attempt as attempt_of
from support.workerstates import SOURCE, Machine, address, deploy, request, second, serving, sink, states


def test_terms_are_compared_by_order() -> None:
    machine = Machine()
    assert machine.tell(deploy(SOURCE, term=0)) == []
    assert machine.tell(deploy(SOURCE, term=3)) != []
    assert machine.tell(ReleaseJob(term=1, job="j1")) == [], "a coordinator of term 3 has taken over"
    assert machine.state.term == 3


def test_partitions_are_requested_when_the_link_is_up_and_at_once_after_that() -> None:
    """Cases 79 and 136, NettyPartitionRequestClientTest and SingleInputGateTest."""
    machine = Machine()
    machine.tell(deploy(sink()))
    (requested,) = machine.up(3)
    assert isinstance(requested, RequestPartition)
    assert (requested.worker, requested.request.partition.producer, requested.request.subpartition) == (
        3,
        1,
        0,
    )
    again = machine.tell(deploy(sink(attempt=2)))
    assert [i.worker for i in again if isinstance(i, RequestPartition)] == [3]


@pytest.mark.parametrize("worker", [2, 3])
def test_a_producer_that_is_deployed_later_is_asked_when_it_is_there(worker: int) -> None:
    machine = Machine()
    spec = sink()
    gate = spec.inputs[0].model_copy(update={"later": [0, 1]})
    kinds = map(type, machine.tell(deploy(spec.model_copy(update={"inputs": [gate]}))))
    assert list(kinds) == [StartTask] and machine.up(3) == machine.tick(60.0) == []
    placed = PlacedAttempt(operator=0, index=1, attempt=1, worker=worker)
    restarted = TasksRestarted(term=1, job="j1", tasks=[placed], workers=[address(worker)])
    requested = machine.tell(restarted, now=61.0)
    assert machine.tell(restarted, now=61.0) == [], "it is asked once"
    entry = machine.state.channels.inputs[ChannelKey(attempt_of(1), 0, 1)]
    assert (entry.worker, entry.request.producer_attempt) == (worker, 1)
    assert [type(each) for each in requested] == ([RequestPartition] if worker == 3 else [])


def test_dial_on_demand_happens_once() -> None:
    """Case 69, PartitionRequestClientFactoryTest."""
    machine = Machine()
    assert machine.tell(Dial(term=1, peer=address(3))) == [DialPeer(address(3))]
    assert machine.tell(Dial(term=1, peer=address(3))) == []
    machine.up(3)
    assert machine.tell(Dial(term=1, peer=address(3))) == []


def test_a_newer_epoch_is_another_process_which_needs_a_new_link() -> None:
    machine = Machine()
    machine.tell(deploy(SOURCE))
    machine.up(3)
    assert machine.state.channels.peers.announced(3) == 1
    newer = address(3, epoch=7)
    assert DialPeer(newer) in machine.tell(deploy(sink(), workers=[address(2), newer]))
    assert machine.state.channels.peers.announced(3) == 7
    machine.tell(Dial(term=1, peer=address(3, epoch=5)))
    assert machine.state.channels.peers.announced(3) == 7, "an epoch that was replaced does not come back"
    assert [type(i) for i in machine.up(3)] == [RequestPartition]


def test_a_failed_dial_is_tried_again_until_it_is_given_up() -> None:
    """Case 73, PartitionRequestClientFactoryTest."""
    machine = Machine()
    machine.tell(deploy(SOURCE, sink()), now=0.0)
    assert machine.dial_failed(3, PeerLost("refused"), 0.0) == []
    assert machine.due == pytest.approx(0.1)
    assert machine.tick(0.05) == []
    assert machine.tick(0.1) == [DialPeer(address(3))]
    assert machine.dial_failed(3, PeerLost("refused"), 0.2) == []
    assert machine.due == pytest.approx(0.4), "twice as long as before"
    (failed,) = machine.tick(10.0)
    assert isinstance(failed, FailChannel)
    assert failed.channel == ChannelKey(attempt_of(1), 0, 1)
    assert str(failed.error) == "no connection to worker 3 within 10 s: refused"


def test_a_peer_that_does_not_know_its_id_yet_is_dialed_again() -> None:
    machine = Machine()
    machine.tell(deploy(sink()), now=0.0)
    error = HandshakeRefused("peer", "worker 3 was dialed, but a worker answers there")
    assert machine.dial_failed(3, error, 0.0) == []
    assert machine.tick(0.1) == [DialPeer(address(3))]
    (failed,) = machine.dial_failed(3, error, 10.0)
    assert isinstance(failed, FailChannel)
    assert failed.error is error


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != "peer"])
def test_another_refused_handshake_is_not_tried_again(reason: str) -> None:
    machine = Machine()
    machine.tell(deploy(SOURCE, sink(), strategy="none"))
    (failed,) = machine.dial_failed(3, HandshakeRefused(reason, "no"), 0.0)
    assert isinstance(failed, FailChannel)
    assert machine.due is None


@pytest.mark.parametrize("error", [PeerLost("refused"), HandshakeRefused("cluster", "another's")])
def test_a_failed_dial_of_an_epoch_that_is_past_says_nothing_of_the_newer_process(
    error: ShuffleError,
) -> None:
    machine = Machine()
    machine.tell(Dial(term=1, peer=address(3)))
    newer = address(3, epoch=7)
    assert machine.tell(Dial(term=1, peer=newer)) == [DialPeer(newer)]
    assert machine.dial_failed(3, error, 0.1, epoch=1) == []
    machine.tell(deploy(sink(), workers=[address(2), newer]), now=4.0)
    assert machine.tick(5.0) == [], "the newer process is being dialed"
    assert [type(i) for i in machine.up(3)] == [RequestPartition]


def test_a_peer_is_not_dialed_while_a_dial_is_under_way() -> None:
    """Case 72, PartitionRequestClientFactoryTest."""
    machine = Machine()
    machine.tell(deploy(SOURCE, sink()), now=0.0)
    machine.dial_failed(3, PeerLost("refused"), 9.0)
    assert machine.tick(9.1) == [DialPeer(address(3))]
    assert [type(i) for i in machine.tick(10.0)] == [FailChannel]
    assert DialPeer(address(3)) not in machine.tell(deploy(sink(), job="j2"), now=11.0)
    assert machine.dial_failed(3, PeerLost("no answer"), 14.2) == []
    assert machine.tick(14.3) == [DialPeer(address(3))]
    assert [type(i) for i in machine.up(3)] == [RequestPartition]


# --- ahead of need --------------------------------------------------------------------------------------


def prepare(programs: dict[int, bytes], job: str = "j1") -> PrepareJob:
    return PrepareJob(term=1, job=job, programs=programs, workers=[address(1), address(3)])


def test_programs_are_kept_until_the_job_has_ended() -> None:
    machine = Machine()
    machine.tell(prepare({0: b"source", 1: b"sink"}))
    machine.tell(prepare({}, job="j2"))
    short = deploy(SOURCE).model_copy(update={"programs": {}})
    machine.tell(short)
    machine.tell(ReleaseJob(term=1, job="j1", attempts=[TaskAttempt(operator=0, index=0, attempt=1)]))
    again = short.model_copy(update={"tasks": [second(SOURCE)]})
    (start, *_) = machine.tell(again)
    assert isinstance(start, StartTask) and start.message.programs[0] == b"source"
    machine.tell(ReleaseJob(term=1, job="j1"))
    (start, *_) = machine.tell(short)
    assert isinstance(start, StartTask) and start.message.programs == {}


# --- requests of peers --------------------------------------------------------------------------------


def refusal(instructions: list[Instruction]) -> str:
    (refused,) = instructions
    assert isinstance(refused, Refuse)
    return str(refused.error)


def test_a_request_is_granted_now_or_when_the_partition_is_there() -> None:
    """Cases 43, 44 and 264, PartitionRequestRegistrationTest and ResultPartitionManagerTest."""
    machine = serving()
    assert machine.asked(3, request()) == []
    assert machine.tell(deploy(SOURCE))[-1] == Attach(3, request(), attempt_of(0))
    assert machine.asked(3, request(channel=8, subpartition=0)) == [
        Attach(3, request(channel=8, subpartition=0), attempt_of(0))
    ]


def test_a_request_for_a_partition_that_never_comes_is_refused() -> None:
    """Cases 32 and 101, PartitionRequestQueueTest and RemoteInputChannelTest."""
    machine = serving()
    machine.asked(3, request(), 1.0)
    machine.tell(deploy(SOURCE))
    machine.asked(3, request(attempt=2), 1.0)
    assert machine.due == 6.0
    (refused,) = machine.tick(6.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, PartitionNotFound)
    assert "j1/edge0.0 attempt 2 is not on worker 2" in str(refused.error)


def test_requests_of_a_link_that_went_down_are_forgotten() -> None:
    machine = serving()
    machine.asked(3, request())
    machine.down(3)
    assert not [i for i in machine.tick(5.0) if isinstance(i, Refuse)]
    assert not [i for i in machine.tell(deploy(SOURCE)) if isinstance(i, Attach)]


def test_a_subpartition_that_is_read_is_not_taken_over_by_the_same_generation() -> None:
    machine = serving(SOURCE)
    assert [type(i) for i in machine.asked(3, request())] == [Attach]
    expected = (
        "generation 1 of attempt 1 reads subpartition 1 of partition j1/edge0.0 already, "
        "and generation 1 was requested"
    )
    assert refusal(machine.asked(3, request(channel=8))) == expected


def test_a_greater_generation_of_the_known_attempt_is_granted_at_once() -> None:
    machine = serving(SOURCE)
    machine.asked(3, request())
    machine.down(3)
    machine.up(3)
    newer = request(generation=3)
    assert machine.asked(3, newer) == [Attach(3, newer, attempt_of(0))]
    assert "generation 3" in refusal(machine.asked(3, request(channel=8, generation=2)))


def test_a_greater_attempt_of_the_consumer_waits_for_the_coordinators_word() -> None:
    machine = serving(SOURCE)
    machine.asked(3, request())
    early = request(channel=8, consumer_attempt=2)
    assert machine.asked(3, early, now=1.0) == []
    word = [TaskAttempt(operator=1, index=1, attempt=2)]
    told = machine.tell(deploy().model_copy(update={"attempts": word}))
    assert told == [Fence(attempt_of(0), 0, attempt_of(1, 1, number=2)), Attach(3, early, attempt_of(0))]
    expected = "attempt 2 reads subpartition 1 of partition j1/edge0.0: attempt 1 was replaced"
    assert refusal(machine.asked(3, request(channel=9, generation=2))) == expected


def test_a_greater_attempt_that_the_coordinator_never_names_is_refused_in_the_end() -> None:
    machine = serving(SOURCE)
    machine.asked(3, request(consumer_attempt=2), now=1.0)
    assert machine.tick(5.9) == []
    expected = (
        "the coordinator does not know attempt 2 of consumer 1, which asked worker 2 for partition j1/edge0.0"
    )
    assert refusal(machine.tick(6.0)) == expected


def test_a_subpartition_that_the_producer_does_not_have_is_refused() -> None:
    machine = serving(SOURCE)
    expected = "partition j1/edge0.0 has no subpartition 2"
    assert refusal(machine.asked(3, request(subpartition=2))) == expected


def test_a_producer_attempt_that_was_replaced_is_refused() -> None:
    machine = serving(second(SOURCE))
    expected = "attempt 1 of partition j1/edge0.0 was replaced by 2"
    assert refusal(machine.asked(3, request(attempt=1))) == expected


def test_a_request_that_is_taken_back_is_forgotten() -> None:
    """Case 46, PartitionRequestListenerManagerTest."""
    machine = serving()
    machine.asked(3, request())
    machine.do(machine.state.partition_cancelled(3, request().channel))
    assert machine.due is None
    assert not [i for i in machine.tell(deploy(SOURCE)) if isinstance(i, Attach)]


# --- local channels -------------------------------------------------------------------------------------


def test_a_local_channel_waits_for_its_producer_as_a_remote_one_does() -> None:
    """Case 153, LocalInputChannelTest."""
    machine = Machine()
    assert not [i for i in machine.tell(deploy(sink()), now=1.0) if isinstance(i, ConnectLocal)]
    channel = ChannelKey(attempt_of(1), 0, 0)
    assert machine.tell(deploy(SOURCE), now=2.0)[-1] == ConnectLocal(channel, attempt_of(0), 1, 1)


def test_a_local_channel_whose_producer_never_comes_fails_as_a_remote_one_does() -> None:
    """Case 154, LocalInputChannelTest."""
    machine = Machine()
    machine.tell(deploy(sink()), now=1.0)
    machine.up(3)
    machine.asked(3, request(), now=1.0)
    failed, refused = machine.tick(6.0)
    assert isinstance(failed, FailChannel) and isinstance(refused, Refuse)
    assert failed.channel == ChannelKey(attempt_of(1), 0, 0)
    assert str(failed.error) == str(refused.error) == "partition j1/edge0.0 attempt 1 is not on worker 2"
    assert type(failed.error) is type(refused.error) is PartitionNotFound


def test_what_an_attempt_that_has_ended_waited_for_is_forgotten() -> None:
    machine = Machine()
    machine.tell(deploy(sink()), now=1.0)
    machine.ended(operator=1, state="failed")
    machine.tick(60.0)
    assert machine.up(3) == []
    assert not [i for i in machine.tell(deploy(SOURCE)) if isinstance(i, ConnectLocal)]


# --- tasks ----------------------------------------------------------------------------------------------


def test_abandoned_tasks_that_have_ended_after_all_do_not_end_the_worker() -> None:
    machine = Machine()
    for at, attempt in ((0.0, 1), (20.0, 2), (40.0, 3)):
        machine.tell(deploy(SOURCE.model_copy(update={"attempt": attempt})), now=at)
        machine.tell(CancelTasks(term=1, job="j1"), now=at)
        assert not [i for i in machine.tick(at + 10.0) if isinstance(i, Exit)]
        machine.state.tasks.still_run(0)
    assert machine.state.tasks.abandoned == 3


# --- two attempts of a subtask ------------------------------------------------------------------------


def test_the_attempt_before_still_reports_its_end_beside_a_newer_one() -> None:
    machine = Machine()
    machine.tell(deploy(SOURCE))
    machine.tell(deploy(second(SOURCE)))
    (canceled,) = machine.ended(attempt=1, state="canceled")
    assert canceled == Report(state_change(attempt_of(number=1), "canceled"))
    assert states(machine.ended(attempt=2)) == ["finished"]


def test_a_cancel_that_names_an_attempt_leaves_the_other_alone() -> None:
    machine = Machine()
    machine.tell(deploy(SOURCE, second(SOURCE)))
    older = TaskAttempt(operator=0, index=0, attempt=1)
    cancel = CancelTasks(term=1, job="j1", attempts=[older, older.model_copy(update={"attempt": 9})])
    assert machine.tell(cancel) == [CancelTask(attempt_of(0))]
    assert machine.tell(cancel) == []
    assert machine.tell(CancelTasks(term=1, job="j1")) == [CancelTask(attempt_of(0, number=2), True)]
    assert AbandonTask(attempt_of(0)) in machine.tick(10.0)


def test_a_release_that_names_an_attempt_leaves_the_other_alone() -> None:
    machine = serving(SOURCE, second(SOURCE))
    older = TaskAttempt(operator=0, index=0, attempt=1)
    assert machine.tell(ReleaseJob(term=1, job="j1", attempts=[older])) == [Release([attempt_of(0)])]
    assert "was replaced by 2" in refusal(machine.asked(3, request(attempt=1)))
    (attached,) = machine.asked(3, request(attempt=2, channel=8), 0.0)
    assert isinstance(attached, Attach) and attached.producer == attempt_of(0, number=2)
    assert machine.tell(deploy(SOURCE)) == [], "an attempt that is gone does not come back"


def test_each_attempt_serves_its_own_partition() -> None:
    machine = serving(SOURCE, second(SOURCE))
    for number, channel in ((1, 7), (2, 8)):
        asked = request(attempt=number, channel=channel)
        expected = Attach(3, asked, attempt_of(0, number=number))
        assert machine.asked(3, asked, 0.0) == [expected]


def test_a_worker_that_is_sent_sigterm_ends_by_itself_if_nobody_tells_it_to() -> None:
    machine = Machine()
    machine.do(machine.state.leave(0.0))
    due = 8.0 + LEAVE_GRACE_SECONDS
    assert machine.due == due
    assert machine.tick(due - 0.01) == []
    assert machine.tick(due) == [Exit("")]
    assert machine.tick(due + 1) == [], "once"
    assert machine.due is None and machine.state.leaving

"""The registries of channels and partitions by themselves."""

from __future__ import annotations

import pytest

from minishuffle.errors import LocalProtocolError, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import OutputSpec
from minishuffle.worker.registry import (
    TRANSITIONS,
    ChannelKey,
    ChannelPhase,
    InputRegistry,
    PartitionRegistry,
)
from support.attempts import attempt

KEY = ChannelKey(attempt(1), 0, 0)
ROADS = {
    ChannelPhase.WANTED: [],
    ChannelPhase.REQUESTED: [ChannelEvent.REQUEST],
    ChannelPhase.ATTACHED: [ChannelEvent.REQUEST, ChannelEvent.ATTACH],
    ChannelPhase.ENDED: [ChannelEvent.REQUEST, ChannelEvent.ATTACH, ChannelEvent.END],
    ChannelPhase.FAILED: [ChannelEvent.FAIL],
}


def request(producer: int = 0, generation: int = 1, consumer: int = 0) -> PartitionRequest:
    return PartitionRequest(0, "j1", 0, producer, consumer, 1, 1, generation, 0)


def registry_in(phase: ChannelPhase) -> InputRegistry:
    registry = InputRegistry()
    registry.want(KEY, 3, request())
    for event in ROADS[phase]:
        registry.move(KEY, 1, event)
    return registry


def phase_of(registry: InputRegistry) -> ChannelPhase:
    ((key, entry),) = registry.phases()
    assert key == KEY
    return entry.phase


@pytest.mark.parametrize("phase", ChannelPhase)
@pytest.mark.parametrize("event", ChannelEvent)
def test_every_phase_and_event(phase: ChannelPhase, event: ChannelEvent) -> None:
    registry = registry_in(phase)
    assert phase_of(registry) is phase
    following = TRANSITIONS.get((phase, event))
    if following is None:
        with pytest.raises(LocalProtocolError, match=f"{event.value} of channel .* is {phase.value}"):
            registry.move(KEY, 1, event)
        assert phase_of(registry) is phase
    else:
        assert registry.move(KEY, 1, event)
        assert phase_of(registry) is following


def test_nothing_leaves_the_end_and_a_failed_channel_may_only_turn_out_to_have_ended() -> None:
    for (phase, event), following in TRANSITIONS.items():
        if phase is ChannelPhase.ENDED:
            assert following is phase
        elif phase is ChannelPhase.FAILED:
            assert following is (ChannelPhase.ENDED if event is ChannelEvent.END else phase)


def test_what_belongs_to_another_generation_or_to_no_channel_changes_nothing() -> None:
    registry = registry_in(ChannelPhase.ATTACHED)
    assert not registry.move(KEY, 2, ChannelEvent.END)
    assert not registry.move(ChannelKey(attempt(1, number=2), 0, 0), 1, ChannelEvent.END)
    assert phase_of(registry) is ChannelPhase.ATTACHED


def test_a_link_that_goes_down_fails_its_own_channels_and_none_that_is_wanted_yet() -> None:
    registry = InputRegistry()
    keys = [ChannelKey(attempt(1), 0, producer) for producer in range(4)]
    for key, worker in zip(keys, (3, 3, 3, 4), strict=True):
        registry.want(key, worker, request(key.producer))
        if key.producer:
            registry.move(key, 1, ChannelEvent.REQUEST)
    registry.move(keys[2], 1, ChannelEvent.ATTACH)
    registry.move(keys[2], 1, ChannelEvent.END)
    registry.link_down(3)
    assert [entry.phase.value for _, entry in registry.phases()] == ["wanted", "failed", "ended", "requested"]
    assert registry.wants(3) and not registry.wants(4)
    assert [key for key, _ in registry.request_wanted(3)] == [keys[0]]
    assert registry.request_wanted(3) == []


def test_the_channels_of_an_attempt_go_with_it() -> None:
    registry = registry_in(ChannelPhase.WANTED)
    other = ChannelKey(attempt(1, number=2), 0, 0)
    registry.want(other, 3, request())
    registry.remove(KEY.attempt)
    registry.validate()
    assert [key for key, _ in registry.phases()] == [other]
    registry.remove(other.attempt)
    registry.validate()
    assert registry.fail_wanted(3) == []


def test_each_subpartition_has_a_reader_of_its_own() -> None:
    registry = PartitionRegistry()
    outputs = [OutputSpec(edge=0, operator=1, first=4, count=2)]
    registry.add(attempt(0), outputs)
    for consumer in (4, 5):
        assert registry.grant(request(consumer=consumer)) == attempt(0)
        with pytest.raises(ShuffleError, match="generation 1 of attempt 1 reads subpartition"):
            registry.grant(request(consumer=consumer))
        assert registry.grant(request(consumer=consumer, generation=2)) == attempt(0)
    registry.validate({attempt(0): outputs})
    registry.remove(attempt(0), outputs)
    registry.validate({})
    assert registry.grant(request(consumer=4, generation=9)) is None

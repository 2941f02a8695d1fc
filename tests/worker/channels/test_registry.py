"""The registries of channels and partitions by themselves."""

from __future__ import annotations

import inspect

import pytest

from minishuffle.errors import LocalProtocolError, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import OutputSpec
from minishuffle.worker.channels.registry import (
    TRANSITIONS,
    ChannelEntry,
    ChannelKey,
    ChannelPhase,
    InputRegistry,
    PartitionRegistry,
    Upstream,
)
from support.attempts import attempt

KEY = ChannelKey(attempt(1), 0, 0)
ROADS = {
    ChannelPhase.WANTED: [],
    ChannelPhase.REQUESTED: [ChannelEvent.REQUEST],
    ChannelPhase.ATTACHED: [ChannelEvent.REQUEST, ChannelEvent.ATTACH],
    ChannelPhase.DRAINING: [ChannelEvent.FAIL],
    ChannelPhase.CACHED: [ChannelEvent.FAIL, ChannelEvent.RENEW],
    ChannelPhase.DOWN: [ChannelEvent.FAIL, ChannelEvent.DRAIN],
    ChannelPhase.ENDED: [ChannelEvent.REQUEST, ChannelEvent.ATTACH, ChannelEvent.END],
}
NEXT = Upstream(attempt=2, worker=4, version=2)


def request(producer: int = 0, generation: int = 1, consumer: int = 0) -> PartitionRequest:
    return PartitionRequest(PartitionId(JobId("j1"), 0, producer), consumer, generation=generation)


def entry(worker: int = 3, producer: int = 0) -> ChannelEntry:
    return ChannelEntry(attempt(0, producer).subtask, worker, request(producer), repairs=True)


def registry_in(phase: ChannelPhase) -> InputRegistry:
    registry = InputRegistry()
    registry.want(KEY, entry())
    for event in ROADS[phase]:
        happens(registry, event)
    return registry


def happens(registry: InputRegistry, event: ChannelEvent) -> bool:
    """To the channel, at time 1; whoever renews it says where it reads."""
    if event is ChannelEvent.RENEW:
        return registry.renew(KEY, NEXT, drain_by=11.0) is not None
    return registry.move(KEY, registry[KEY].request.generation, event) is not None


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
            happens(registry, event)
        assert phase_of(registry) is phase
    else:
        generation = registry[KEY].request.generation
        assert happens(registry, event)
        assert phase_of(registry) is following
        begins = following is ChannelPhase.WANTED
        assert registry[KEY].request.generation == generation + begins
    registry.validate()


def test_the_table_beside_the_text_is_the_table() -> None:
    text = inspect.getsource(inspect.getmodule(InputRegistry) or pytest)
    rows = [line[1:].split("#")[0] for line in text.splitlines() if line.startswith("#     ")]
    head, *lines = (row for row in rows if row.split()[0] in {"request", *(p.value for p in ChannelPhase)})
    columns = {event: head.index(event.value) for event in ChannelEvent}
    written = {
        (ChannelPhase(line.split()[0]), event): ChannelPhase(line[at:].split()[0])
        for line in lines
        for event, at in columns.items()
        if line[at : at + 1].strip()
    }
    assert written == dict(TRANSITIONS)


def test_no_generation_is_requested_before_the_one_before_was_drained() -> None:
    """Every way from a generation that was requested to the next leads through a drain or an end."""
    lost = {ChannelPhase.REQUESTED, ChannelPhase.ATTACHED, ChannelPhase.DRAINING, ChannelPhase.CACHED}
    undrained = {
        after
        for (phase, event), after in TRANSITIONS.items()
        if phase in lost and event not in (ChannelEvent.DRAIN, ChannelEvent.END)
    }
    assert undrained == lost - {ChannelPhase.REQUESTED}


def test_the_newest_cached_word_is_applied_once_when_the_channel_is_drained() -> None:
    registry = registry_in(ChannelPhase.CACHED)
    newer = Upstream(attempt=3, worker=5, version=3)
    registry.renew(KEY, newer, drain_by=15.0)
    assert (registry[KEY].upstream, registry.drain_by()) == (newer, 11.0), "the task has waited since then"
    assert registry.undrained(10.9) == [] and registry.undrained(11.0) == [KEY]
    assert registry.wanting(5) == []
    happens(registry, ChannelEvent.DRAIN)
    assert registry.wanting(5) == [KEY] and registry.of_worker(3) == []
    found = registry[KEY]
    assert (found.request.producer_attempt, found.request.generation, found.cached) == (3, 2, None)
    assert registry.drain_by() is None
    assert registry.move(KEY, 1, ChannelEvent.DRAIN) is None, "that was the generation before"
    registry.validate()


def test_a_channel_that_turns_out_to_have_ended_wants_nothing_of_the_attempt_that_was_cached() -> None:
    registry = registry_in(ChannelPhase.CACHED)
    happens(registry, ChannelEvent.END)
    assert (registry[KEY].cached, registry.drain_by()) == (None, None)
    assert registry.wanting(4) == [] and phase_of(registry) is ChannelPhase.ENDED
    registry.validate()


def test_a_failed_channel_is_requested_again_once_it_is_drained_and_its_time_has_come() -> None:
    registry = InputRegistry()
    keys = first, second, third = [ChannelKey(attempt(1), 0, producer) for producer in range(3)]
    for key in keys:
        registry.want(key, entry(producer=key.producer))
        registry.move(key, 1, ChannelEvent.FAIL)
    registry.move(second, 1, ChannelEvent.DRAIN)
    for key, now in ((third, 3.0), (second, 1.0), (first, 1.0)):
        registry.retry_later(key, now)
    registry.validate()
    assert registry.next_deadline() == registry[first].retry_at == registry[second].retry_at
    assert registry.take_retries(1.0) == []
    assert registry.take_retries(2.0) == [second], "the task has yet to read what the first has"
    registry.renew(second, Upstream(1, 3, 1), drain_by=9.0)
    assert registry.next_deadline() == registry[third].retry_at
    registry.move(third, 1, ChannelEvent.DRAIN)
    registry.renew(third, NEXT, drain_by=9.0)
    assert registry.take_retries(9.0) == [], "that was the generation before"


def test_what_belongs_to_another_generation_or_to_no_channel_changes_nothing() -> None:
    registry = registry_in(ChannelPhase.ATTACHED)
    assert registry.move(KEY, 2, ChannelEvent.END) is None
    assert registry.move(ChannelKey(attempt(1, number=2), 0, 0), 1, ChannelEvent.END) is None
    assert phase_of(registry) is ChannelPhase.ATTACHED


def test_channels_are_found_by_worker_and_producer() -> None:
    registry = InputRegistry()
    keys = [ChannelKey(attempt(1), 0, producer) for producer in range(4)]
    for key, worker in zip(keys, (3, 3, 3, 4), strict=True):
        registry.want(key, entry(worker, key.producer))
        if key.producer:
            registry.move(key, 1, ChannelEvent.REQUEST)
    registry.move(keys[2], 1, ChannelEvent.ATTACH)
    assert (registry.wanting(3), registry.reading(3)) == ([keys[0]], [keys[1], keys[2]])
    assert (registry.wanting(4), registry.reading(4)) == ([], [keys[3]])
    registry.move(keys[2], 1, ChannelEvent.END)
    registry.move(keys[1], 1, ChannelEvent.FAIL)
    assert registry.reading(3) == []
    assert registry.of_worker(3) == keys[:3]
    assert registry.readers(attempt(0, 1).subtask) == [keys[1]]


def test_the_channels_of_an_attempt_go_with_it() -> None:
    registry = registry_in(ChannelPhase.WANTED)
    other = ChannelKey(attempt(1, number=2), 0, 0)
    registry.want(other, entry())
    assert registry.remove(KEY.attempt) == [KEY]
    registry.validate()
    assert [key for key, _ in registry.phases()] == [other]
    registry.remove(other.attempt)
    registry.validate()
    assert registry.of_worker(3) == registry.readers(attempt(0).subtask) == []


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
    registry.release(attempt(0), outputs)
    registry.validate({})
    assert registry.grant(request(consumer=4, generation=9)) is None


def test_the_partitions_that_an_earlier_attempt_of_a_consumer_reads() -> None:
    registry = PartitionRegistry()
    outputs = [OutputSpec(edge=0, operator=1, first=0, count=2)]
    for producer in (0, 1):
        registry.add(attempt(0, producer), outputs)
        registry.grant(request(producer))
    registry.grant(request(consumer=1))
    for other in (attempt(1), attempt(2, number=2), attempt(1, number=2, job="j2")):
        assert registry.learn(other) == []
    assert registry.learn(attempt(1, number=2)) == [(attempt(0, 0), 0), (attempt(0, 1), 0)]
    assert registry.learn(attempt(1, number=2)) == [], "nothing new"
    assert registry.learn(attempt(1, 1, number=3)) == [(attempt(0, 0), 0)]
    assert registry.learn(attempt(1, 1, number=2)) == []

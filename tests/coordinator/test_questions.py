"""Clients that look into workers: who is asked, and what is answered when, whoever does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.questions import ANSWER_SECONDS_MAX
from minishuffle.errors import ResourceExhausted, UnknownName
from minishuffle.wire.inquiries import (
    AskWorkers,
    ProfiledTask,
    TracedChannel,
    WorkerAnswered,
    WorkerAsked,
    WorkersAnswered,
)

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker


def asked(worker: FakeWorker) -> WorkerAsked:
    """The last question that it got."""
    found: WorkerAsked = worker.got(WorkerAsked)[-1]
    return found


def answer(cluster: FakeCluster, worker: FakeWorker, text: bytes, **fields: Any) -> None:
    values = {"term": cluster.term, "ticket": asked(worker).ticket, **fields}
    cluster.send(worker, WorkerAnswered(answer=text, **values))


def test_all_workers_are_asked_and_the_client_has_all_answers_at_once(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    trace = TracedChannel(producer_operator=0, producer=1, operator=1, index=0)
    profile = ProfiledTask(profile="p", operator=1, index=0)
    request = cluster.ask(AskWorkers(job="j1", trace=trace, profile=profile))
    for each in (one, two):
        assert (asked(each).job, asked(each).trace, asked(each).profile) == ("j1", trace, profile)
    answer(cluster, two, b"2")
    assert cluster.reply(request) is None
    answer(cluster, two, b"twice")
    answer(cluster, one, b"1", ticket=asked(one).ticket + 99)
    assert cluster.reply(request) is None
    answer(cluster, one, b"1")
    assert cluster.reply(request) == WorkersAnswered(answers={1: b"1", 2: b"2"})


def test_one_that_does_not_answer_in_time_is_named(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    request = cluster.ask(AskWorkers())
    answer(cluster, one, b"1")
    cluster.advance(ANSWER_SECONDS_MAX - 0.01)
    assert cluster.reply(request) is None
    cluster.advance(0.02)
    assert cluster.reply(request) == WorkersAnswered(answers={1: b"1"}, silent=[2])
    answer(cluster, two, b"late")
    assert ANSWER_SECONDS_MAX < 1.0, "who asks hears within a second"


def test_one_that_is_lost_meanwhile_is_waited_for_no_longer(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    request = cluster.ask(AskWorkers())
    answer(cluster, one, b"1")
    cluster.lose(two)
    assert cluster.reply(request) == WorkersAnswered(answers={1: b"1"})


def test_named_workers_alone_are_asked(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    request = cluster.ask(AskWorkers(workers=[two.worker]))
    assert not one.got(WorkerAsked)
    answer(cluster, two, b"2")
    assert cluster.reply(request).answers == {2: b"2"}
    cluster.lose(two)
    code, text = cluster.refusal(AskWorkers(workers=[1, 2]))
    assert (code, text) == (UnknownName.code, "worker 2 is not alive; those that are: 1")


def test_without_workers_the_answer_is_empty(cluster: FakeCluster) -> None:
    assert cluster.request(AskWorkers()) == WorkersAnswered(answers={})


def test_a_client_has_a_bounded_number_of_open_questions_and_none_once_it_is_gone(
    cluster: FakeCluster,
) -> None:
    cluster.add()
    for _ in range(limits.LINK_REQUESTS_MAX):
        cluster.ask(AskWorkers())
    assert cluster.refusal(AskWorkers())[0] == ResourceExhausted.code
    cluster.do(cluster.state.link_closed(1_000, cluster.now))
    cluster.replies.clear()
    cluster.advance(2 * ANSWER_SECONDS_MAX)
    assert cluster.replies == {}


@pytest.mark.parametrize("ticket", [0, 12345])
def test_an_answer_that_nobody_waits_for_changes_nothing(cluster: FakeCluster, ticket: int) -> None:
    one = cluster.add()
    cluster.send(one, WorkerAnswered(term=cluster.term, ticket=ticket, answer=b""))
    assert not cluster.replies

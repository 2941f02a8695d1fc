"""Clients that look into workers: who is asked, and what is answered when, whoever does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.clients.questions import ANSWER_SECONDS_MAX
from minishuffle.errors import ResourceExhausted, UnknownName
from minishuffle.wire.inquiries import (
    AskWorkers,
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

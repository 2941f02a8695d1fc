"""The two half-ledgers: figures from Flink's own tests, and Hypothesis over any order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.protocol.credit import BufferKind, ReceiveCredit, SendCredit


def borrow(credit: ReceiveCredit[str], wanted: int, pool: list[str]) -> int:
    """Take up to ``wanted`` floating buffers from ``pool``; returns how many there were."""
    taken = 0
    while taken < wanted and pool:
        credit.on_floating(pool.pop())
        taken += 1
    return taken


def test_the_worked_example() -> None:
    """2 exclusive + 4 floating; 1 received and not consumed; backlog 2: AddCredit 3, 1 floating left."""
    pool = ["f1", "f2", "f3", "f4"]
    credit = ReceiveCredit(["e1", "e2"])
    assert credit.granted == 2
    credit.on_buffer()
    assert credit.idle == 1
    wanted = credit.on_backlog(2)
    assert credit.required == 4
    assert wanted == 3
    assert borrow(credit, wanted, pool) == 3
    assert credit.take_unannounced() == 3
    assert len(pool) == 1
    credit.validate()


def test_backlog_of_five_with_two_exclusive_makes_seven() -> None:
    """Case 52, CreditBasedPartitionRequestClientHandlerTest: 5 → 7 available; 12 → 14 required, 10 there."""
    pool = [f"f{i}" for i in range(8)]
    credit = ReceiveCredit(["e1", "e2"])
    assert borrow(credit, credit.on_backlog(5), pool) == 5
    assert credit.idle == 7
    borrow(credit, credit.on_backlog(12), pool)
    assert (credit.required, credit.idle) == (14, 10)


def test_a_backlog_of_zero_asks_for_nothing() -> None:
    credit = ReceiveCredit(["e1", "e2"])
    credit.on_buffer()
    assert credit.on_backlog(0) == 0


def test_while_waiting_a_larger_backlog_only_raises_the_requirement() -> None:
    credit = ReceiveCredit(["e1", "e2"])
    credit.on_backlog(14)
    credit.waiting = True
    assert credit.on_backlog(20) == 0
    assert credit.required == 22


def test_each_buffer_taken_lowers_the_requirement_by_one() -> None:
    """Case 89, RemoteInputChannelTest."""
    credit = ReceiveCredit(["e1", "e2"])
    credit.on_backlog(3)
    credit.on_buffer()
    assert credit.required == 4


def test_floating_buffers_are_used_first() -> None:
    credit = ReceiveCredit(["e1"])
    credit.on_backlog(1)
    credit.on_floating("f1")
    credit.take_unannounced()
    assert credit.on_buffer() == (BufferKind.FLOATING, "f1")
    assert credit.on_buffer() == (BufferKind.EXCLUSIVE, "e1")


def test_an_exclusive_buffer_that_returns_to_a_full_channel_pushes_a_floating_one_out() -> None:
    credit = ReceiveCredit(["e1", "e2"])
    credit.on_buffer()
    credit.on_buffer()
    borrow(credit, credit.on_backlog(1), ["f3", "f2", "f1"])
    assert credit.idle == 3
    before = credit.unannounced
    assert credit.on_consumed("e1") == "f1"
    assert credit.unannounced == before
    credit.validate()


def test_a_consumed_exclusive_buffer_is_credit_again() -> None:
    credit = ReceiveCredit(["e1", "e2"])
    credit.on_buffer()
    assert credit.on_consumed("e1") is None
    assert credit.take_unannounced() == 1
    assert credit.take_unannounced() == 0


@pytest.mark.parametrize(
    ("exclusive", "arrived", "read", "backlog", "due"),
    [(1, 1, 1, 0, True), (2, 1, 1, 0, False), (2, 1, 1, 1, True), (2, 2, 1, 0, False), (2, 2, 2, 0, True)]
    + [(3, 2, 1, 1, False), (3, 3, 1, 0, False), (3, 3, 1, 1, True), (3, 2, 2, 0, True), (3, 3, 0, 9, False)]
    + [(4, 3, 1, 1, False), (4, 3, 2, 0, False), (4, 3, 2, 1, True), (4, 3, 3, 0, True), (4, 4, 1, 1, True)],
)
def test_credit_is_due_above_half_or_earlier_to_a_producer_with_a_backlog(
    exclusive: int, arrived: int, read: int, backlog: int, due: bool
) -> None:
    credit = ReceiveCredit([f"e{number}" for number in range(exclusive)])
    for _ in range(arrived):
        credit.on_buffer()
    for number in range(read):
        credit.on_consumed(f"e{number}")
    credit.on_backlog(backlog)
    assert credit.is_due == due


def test_credit_is_ample_while_half_is_left_and_nothing_is_lent() -> None:
    credit = ReceiveCredit(["e1", "e2", "e3"])
    for ample in (True, True, False, False):
        assert credit.is_ample == ample
        if not credit.is_spent:
            credit.on_buffer()
    for number in (1, 2, 3):
        credit.on_consumed(f"e{number}")
    assert not credit.is_ample, "the producer has yet to hear of it"
    credit.take_unannounced()
    assert credit.is_ample
    credit.on_backlog(1)
    assert not credit.is_ample
    credit.on_floating("f1")
    credit.on_backlog(0)
    assert not credit.is_ample, "the floating buffer is to go back"
    assert not ReceiveCredit([]).is_ample


def test_overdrawing_is_the_producers_fault() -> None:
    credit = ReceiveCredit(["e1"])
    credit.on_buffer()
    credit.on_consumed("e1")  # there is a buffer, but the producer was not told
    with pytest.raises(RemoteProtocolError, match="overdrew its credit of 1"):
        credit.on_buffer()


def test_sending_without_credit_is_our_fault() -> None:
    credit = SendCredit(1)
    credit.spend()
    with pytest.raises(LocalProtocolError):
        credit.spend()
    credit.grant(2)
    assert credit.available == 2


@pytest.mark.parametrize("amount", [0, -1, limits.CREDIT_MAX])
def test_absurd_grants_are_refused(amount: int) -> None:
    credit = SendCredit(1)
    with pytest.raises(RemoteProtocolError):
        credit.grant(amount)
    assert credit.available == 1


class Ledgers(RuleBasedStateMachine):
    """A producer and a consumer, with credit and buffers on the way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = [f"f{i}" for i in range(4)]
        self.receive = ReceiveCredit(["e1", "e2"])
        self.send = SendCredit(self.receive.granted)
        self.on_the_way: list[int] = []
        self.buffers_on_the_way = 0
        self.held: list[tuple[BufferKind, str]] = []

    @rule(backlog=st.integers(0, 9))
    def backlog(self, backlog: int) -> None:
        borrow(self.receive, self.receive.on_backlog(backlog), self.pool)

    @rule()
    def announce(self) -> None:
        credit = self.receive.take_unannounced()
        if credit:
            self.on_the_way.append(credit)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def credit_arrives(self) -> None:
        self.send.grant(self.on_the_way.pop(0))

    @precondition(lambda self: self.send.available)
    @rule()
    def buffer_leaves(self) -> None:
        self.send.spend()
        self.buffers_on_the_way += 1

    @precondition(lambda self: self.buffers_on_the_way)
    @rule()
    def buffer_arrives(self) -> None:
        self.buffers_on_the_way -= 1
        self.held.append(self.receive.on_buffer())

    @precondition(lambda self: self.held)
    @rule()
    def consume(self) -> None:
        kind, buffer = self.held.pop(0)
        if kind is BufferKind.FLOATING:
            self.pool.append(buffer)
            return
        surplus = self.receive.on_consumed(buffer)
        if surplus is not None:
            self.pool.append(surplus)

    @invariant()
    def books_balance(self) -> None:
        self.receive.validate()
        self.send.validate()
        assert self.send.granted + sum(self.on_the_way) == self.receive.granted
        assert self.send.sent == self.receive.received + self.buffers_on_the_way
        everything = [*self.pool, *self.receive.exclusive, *self.receive.floating, *(b for _, b in self.held)]
        assert sorted(everything) == ["e1", "e2", "f0", "f1", "f2", "f3"]

    def teardown(self) -> None:
        self.receive.void()
        self.receive.validate()


TestLedgers = Ledgers.TestCase


def test_limits_are_hit_one_after_the_other() -> None:
    pool = ["f1"]
    credit = ReceiveCredit(["e1", "e2"])
    assert credit.limits_hit() == []
    credit.on_buffer()
    assert credit.limits_hit() == [], "one exclusive buffer is left"
    credit.on_buffer()
    assert credit.limits_hit() == ["exclusive"]
    credit.waiting = borrow(credit, credit.on_backlog(1), pool) < 3
    assert credit.limits_hit() == ["exclusive", "floating"], "the one that was lent is credit"
    credit.take_unannounced()
    credit.on_buffer()
    assert credit.limits_hit() == ["exclusive", "floating", "credit"]

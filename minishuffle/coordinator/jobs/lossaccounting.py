"""The books of a job: what all attempts of its tasks counted, and which rows were lost. Pure.

Each row is taken in by a task, dropped by a live process, which counts it once and by reason, or was in
flight through something that died. To what workers report the coordinator adds what only it can see:

- *undelivered*: rows that were sent to an attempt which ended in order, and which it never received, because
  it did not read to the end or a link broke under them. They are counted with ``queue_discarded``. The number
  is exact, and only grows.
- *in flight*: for what died with a worker, rows that survivors had sent to it, without those that survivors
  received from it and the drops that it had reported. Of a producer whose worker died too, what it had
  received counts as sent, if that is more than the producer had reported. A task that writes more or fewer
  rows than it reads has them counted by what it was done with, and what it had written of that. It is a bound
  for tasks that write at most one row for each that they read, by the last heartbeats, and settles when those
  after the loss have arrived. Rows that a source which died may have emitted within its lease are among them.
  One that dies while there is no coordinator may have gone further; what others have of that comes once more,
  and hides nothing missing.
- Of partitions that are kept nothing is lost: whatever becomes of one of their ends, all of them is sent
  again. What is counted of them, and of the tasks that write them, is left out. So is what is counted of
  *replayed* tasks (:mod:`~minishuffle.coordinator.jobs.lostpartitions`), which run again from their
  beginning.
- Of a source whose next attempt writes its rows once more nothing is lost either, unless some consumers get
  none of them: what was in flight from it is counted then, and no row that was sent is undelivered.
- *again*: rows that others have of a source which died, and that its next attempt may emit once more: those
  in its leases if it goes on at its positions, and all that it has emitted since a coordinator was lost,
  which may be behind its leases. It is a bound too, as is what a sink had published of rows that are
  replayed, and what a task that is not had taken of a blocking input.
- *sink unfinished*: rows that a file sink had taken when its attempt ended early or died, without those in
  files that were listed.

Traffic names a peer by edge, subtask and attempt, so that each attempt has books of its own, whatever becomes
of those beside it. An attempt with very many former peers counts some of them together: of its producers the
sum is compared then.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from minishuffle.coordinator.journal.codec import Record
from minishuffle.counters import TaskCounters
from minishuffle.plan.graph import Edge
from minishuffle.wire.messages import COUNT_MAX
from minishuffle.wire.packed import PeerRows, unpack_traffic

__all__ = [
    "ATTEMPTS_KEPT",
    "AttemptRecord",
    "Books",
    "Losses",
    "TaskKey",
    "Totals",
    "rows_received",
]

ATTEMPTS_KEPT: Final = 64
"""Ended attempts of a subtask whose traffic is kept; what is lost of an older one is as it was then."""
TaskKey: TypeAlias = tuple[int, int]
"""Operator and index of a subtask."""
Attempt: TypeAlias = tuple[int, int, int]
"""Operator, index and attempt."""


@dataclass(slots=True)
class AttemptRecord(Record):
    """What is known of one attempt. ``end`` is empty while it runs; ``early``: it ended, but not with its
    work done; ``died``: its worker was lost, and with it what it held or kept for others."""

    operator: int
    index: int
    worker: int
    attempt: int
    end: Literal["", "finished", "early", "died"] = ""
    counters: TaskCounters = field(default_factory=TaskCounters)
    traffic: bytes = b""
    """Rows that it has exchanged, by edge and peer: see :func:`unpack_traffic`."""
    rows_listed: int = 0
    """Rows in files that were listed, or in the result that an attempt gave when its job was cancelled."""
    rows_made: int = 0
    """Rows that a source which died may have emitted, its leases included, or skipped."""
    rows_leased: int = 0
    """Of ``rows_made``, those that its next attempt emits whether they were emitted or not."""
    passed_on_max: int | None = None
    """The most of its rows that others can have without any that come once more: set while it is not known
    how far the sources beside it have gone since a coordinator was lost, which may be behind their leases."""
    repeated: Literal["", "all", "part"] = ""
    """The next attempt writes the rows of this one once more, for all that have yet to read them, or for some
    of those: see :mod:`~minishuffle.coordinator.jobs.consumption`."""

    @property
    def key(self) -> TaskKey:
        return self.operator, self.index

    @property
    def id(self) -> Attempt:
        return self.operator, self.index, self.attempt

    def counted(self, counters: TaskCounters, traffic: bytes = b"") -> None:
        """It has counted so much, and exchanged that, unless it is empty."""
        self.counters, self.traffic = counters, traffic or self.traffic

    def exchanged(self, traffic: bytes, rows_dropped: dict[str, int]) -> None:
        """It has exchanged and dropped so much. Both grow on after its end: what it has written may not be
        sent yet, or never be."""
        self.traffic, self.counters = traffic, replace(self.counters, rows_dropped=rows_dropped)

    def listed(self, rows: int) -> None:
        """So many of its rows are in one more file."""
        self.rows_listed += rows

    def ended(self, state: str) -> None:
        """It has come to that state, and runs no more."""
        self.end = "died" if state == "lost" else "finished" if state == "finished" else "early"

    def repeats(self, part: Literal["all", "part"]) -> None:
        """The next attempt writes its rows once more, for all or for some that have yet to read them."""
        self.repeated = part

    def repeats_in_part(self) -> None:
        """Somebody gets nothing of what is written once more."""
        self.repeated = "part" if self.repeated else ""

    def may_have_made(self, rows: int, leased: int) -> None:
        """It is lost: see ``rows_made`` and ``rows_leased``."""
        self.rows_made, self.rows_leased = rows, leased

    def passed_on(self, most: int | None) -> None:
        """See ``passed_on_max``."""
        self.passed_on_max = most


class Totals(NamedTuple):
    """Counts of a subtask over all its attempts."""

    counters: TaskCounters
    rows_sent: int
    rows_received: int
    state_rows_lost: int
    """Held as state by attempts that did not finish; counted by their last report."""


class Past(NamedTuple):
    """What an attempt has exchanged with those whose traffic is not kept any more, in rows."""

    sent_to_it: int = 0
    """By survivors, as is the next."""
    received_of_it: int = 0
    sent_inside: int = 0
    """By it, to what died with it."""
    undelivered: int = 0

    def plus(self, others: Iterable[int]) -> Past:
        return Past(*(one + other for one, other in zip(self, others, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksRecord(Record):
    """What is lost for good, and of which attempts the traffic is not kept any more."""

    undelivered: int
    in_flight: int
    again: int = 0
    unfinished: int
    lossy: bool
    lost: dict[str, int]
    past: tuple[tuple[int, int, int, int, int, int, int], ...]
    """An :data:`Attempt`, and :class:`Past`."""


@dataclass(frozen=True, slots=True)
class PastRecord(Record):
    """The attempts of a subtask that were replaced."""

    ended: tuple[AttemptRecord, ...]
    before: Totals | None
    """The totals of those whose traffic is not kept any more."""


class Losses(NamedTuple):
    """Rows lost in a job."""

    dropped: dict[str, int]
    """By reason."""
    in_flight: int
    certain: bool
    """Whether there are any at all, or an attempt that had taken rows in ended before its work was done:
    what it held of them is lost, and nobody knows how many."""
    state_rows: int = 0
    """See :class:`Totals`."""
    again: int = 0
    """Nothing is lost by them: at most so many came twice."""


class Books:
    """The attempts of a job that have ended and were replaced; those that have not are handed in."""

    def __init__(
        self,
        edges: Sequence[Edge],
        kept: frozenset[int] = frozenset(),
        replayed: frozenset[int] = frozenset(),
    ) -> None:
        self._edges = edges
        self._kept = kept.union(number for number, edge in enumerate(edges) if edge.source in replayed)
        self._replayed = replayed
        self._repeatable = replayed.union(edges[edge].source for edge in kept)
        """Operators of which all that their subtasks write comes once more."""
        self._ended: defaultdict[TaskKey, deque[AttemptRecord]] = defaultdict(deque)
        self._before: dict[TaskKey, Totals] = {}
        """Totals of attempts that are not kept any more."""
        self._past: dict[Attempt, Past] = {}
        """What a kept attempt has exchanged with attempts that are not kept."""
        self._undelivered_before = 0
        self._in_flight_before = 0
        self._again_before = 0
        self._unfinished_before = 0
        self._lossy = False
        self._lost: Counter[str] = Counter()
        """By reason, rows that had left their task."""

    def repeat(self, rows: int) -> None:
        """So many rows that others have come once more."""
        self._again_before += rows

    def lose(self, reason: str, rows: int) -> None:
        """Rows that a task had dealt with are lost all the same."""
        self._lost[reason] += rows

    def close(self, ended: AttemptRecord, current: Iterable[AttemptRecord]) -> None:
        """The next attempt takes the place of this one; ``current`` are those of all subtasks."""
        kept = self._ended[ended.key]
        if len(kept) == ATTEMPTS_KEPT:
            self._lossy = self._lossy or self.losses(current).certain
            self._forget(kept[0], self._records(current))
            self._unfinished_before += self._rows_unfinished(kept[0])
            self._before[ended.key] = self._plus(self._before.get(ended.key), kept.popleft())
        kept.append(
            AttemptRecord(
                ended.operator,
                ended.index,
                ended.worker,
                ended.attempt,
                ended.end,
                ended.counters,
                ended.traffic,
                ended.rows_listed,
                ended.rows_made,
                ended.rows_leased,
                ended.passed_on_max,
                ended.repeated,
            )
        )

    def _forget(self, oldest: AttemptRecord, records: Sequence[AttemptRecord]) -> None:
        """Keep what its traffic says of others, and what was lost of it."""
        ledger = self._ledger(records)
        rest = self._ledger([record for record in records if record is not oldest])
        self._undelivered_before += ledger.undelivered([oldest])
        self._in_flight_before += ledger.in_flight([oldest])
        self._again_before += ledger.again([oldest])
        self._past.pop(oldest.id, None)
        for record in records:
            both = zip(ledger.exchanged(record), rest.exchanged(record), strict=True)
            difference = [one - other for one, other in both]
            if record is not oldest and any(difference):
                self._past[record.id] = self._past.get(record.id, Past()).plus(difference)

    def _ledger(self, records: Sequence[AttemptRecord]) -> _Ledger:
        return _Ledger(self._edges, self._kept, self._repeatable, records, self._past)

    def repeat_in_part(self, key: TaskKey) -> None:
        """Not everybody gets the rows of earlier attempts of a source that are written once more."""
        for record in self._ended.get(key, ()):
            record.repeats_in_part()

    def report(
        self, worker: int, key: TaskKey, attempt: int, traffic: bytes, rows_dropped: dict[str, int]
    ) -> bool:
        """What an attempt that was replaced has exchanged and dropped in all; False if nothing is known of
        it."""
        for record in self._ended.get(key, ()):
            if (record.worker, record.attempt) == (worker, attempt) and record.end != "died":
                record.exchanged(traffic, rows_dropped)
                return True
        return False

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> BooksRecord:
        """What is not of a single subtask."""
        return BooksRecord(
            undelivered=self._undelivered_before,
            in_flight=self._in_flight_before,
            again=self._again_before,
            unfinished=self._unfinished_before,
            lossy=self._lossy,
            lost=dict(self._lost),
            past=tuple((*attempt, *past) for attempt, past in self._past.items()),
        )

    def past_record(self, key: TaskKey) -> PastRecord | None:
        """The attempts of a subtask that were replaced; None if there are none."""
        ended = self._ended.get(key)
        return PastRecord(tuple(ended), self._before.get(key)) if ended else None

    def recall(self, record: BooksRecord, past: Mapping[TaskKey, PastRecord]) -> None:
        """Become what these records say."""
        self._undelivered_before, self._in_flight_before = record.undelivered, record.in_flight
        self._unfinished_before, self._lossy = record.unfinished, record.lossy
        self._again_before, self._lost = record.again, Counter(record.lost)
        self._past = {row[:3]: Past(*row[3:]) for row in record.past}
        for key, each in past.items():
            self._ended[key].extend(each.ended)
            if each.before is not None:
                self._before[key] = each.before

    # --- totals ----------------------------------------------------------------------------------

    def totals(self, current: AttemptRecord) -> Totals:
        """Over all attempts of a subtask."""
        total = self._before.get(current.key)
        for record in (*self._ended.get(current.key, ()), current):
            total = self._plus(total, record)
        assert total is not None
        return total

    def losses(self, current: Iterable[AttemptRecord]) -> Losses:
        """What is lost in the job so far."""
        records = self._records(current)
        ledger = self._ledger(records)
        dropped: Counter[str] = Counter(self._lost)
        for (operator, _), before in self._before.items():
            if operator not in self._repeatable:
                dropped.update(before.counters.rows_dropped)
        for record in records:
            if record.operator not in self._repeatable:
                dropped.update(record.counters.rows_dropped)
        undelivered = self._undelivered_before + ledger.undelivered(records)
        if undelivered:
            dropped["queue_discarded"] += undelivered
        if unfinished := self._unfinished_before + sum(map(self._rows_unfinished, records)):
            dropped["sink_unfinished"] += unfinished
        in_flight = self._in_flight_before + ledger.in_flight(records)
        state_rows = sum(map(self._state_rows, records))
        state_rows += sum(before.state_rows_lost for before in self._before.values())
        certain = self._lossy or bool(+dropped or in_flight) or any(map(ledger.held_rows, records))
        certain = certain or ledger.some_were_not_taken()
        shown = {reason: min(COUNT_MAX, count) for reason, count in sorted(dropped.items()) if count}
        again = min(COUNT_MAX, self._again_before + ledger.again(records))
        return Losses(shown, min(COUNT_MAX, in_flight), certain, min(COUNT_MAX, state_rows), again)

    def passed_on(self, current: Sequence[AttemptRecord]) -> dict[Attempt, int]:
        """By attempt that has not ended, the rows that other workers have received from it."""
        workers = {record.id: record.worker for record in current if not record.end}
        found = {each: self._past[each].received_of_it if each in self._past else 0 for each in workers}
        for record in self._records(current):
            for peer in unpack_traffic(record.traffic):
                if peer.edge < len(self._edges):
                    producer = (self._edges[peer.edge].source, peer.subtask, peer.attempt)
                    if workers.get(producer, record.worker) != record.worker:
                        found[producer] += peer.received
        return found

    def _state_rows(self, record: AttemptRecord) -> int:
        """Rows that it held and that are lost; those of a replayed one come again."""
        lost = record.end in ("early", "died") and record.operator not in self._replayed
        return record.counters.state_rows if lost else 0

    def _rows_unfinished(self, record: AttemptRecord) -> int:
        """Rows that a sink had taken, and that are in no file that was listed and in no result."""
        lost = record.end in ("early", "died") and record.operator not in self._replayed
        return max(0, record.counters.rows_filed - record.rows_listed) if lost else 0

    def _plus(self, total: Totals | None, record: AttemptRecord) -> Totals:
        peers = unpack_traffic(record.traffic)
        sent, received = sum(peer.sent for peer in peers), sum(peer.received for peer in peers)
        lost = min(COUNT_MAX, self._state_rows(record))
        if total is None:
            return Totals(record.counters, min(COUNT_MAX, sent), min(COUNT_MAX, received), lost)
        return Totals(
            total.counters.plus(record.counters),
            min(COUNT_MAX, total.rows_sent + sent),
            min(COUNT_MAX, total.rows_received + received),
            min(COUNT_MAX, total.state_rows_lost + lost),
        )

    def _records(self, current: Iterable[AttemptRecord]) -> list[AttemptRecord]:
        return [*(record for kept in self._ended.values() for record in kept), *current]


class _Ledger:
    """Who sent how much to whom, from the traffic of these attempts.

    Args:
        past: what they have exchanged with others.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        kept: frozenset[int],
        repeatable: frozenset[int],
        records: Sequence[AttemptRecord],
        past: Mapping[Attempt, Past],
    ) -> None:
        self._repeatable = repeatable
        self._sides: Counter[Attempt] = Counter()
        """Rows received of kept partitions: the next attempt gets them again."""
        self._reading = {edge.target for edge in edges}
        self._writing = {edge.source for edge in edges}
        self._records = {record.id: record for record in records}
        self._past = past
        self._sent_by_survivors = Counter({each: past[each].sent_to_it for each in past})
        self._received_by_survivors = Counter({each: past[each].received_of_it for each in past})
        """By producer, rows received from it by others than what died with it."""
        self._sent_inside = Counter({each: past[each].sent_inside for each in past})
        """By producer, rows sent to what died with it."""
        self._sent: defaultdict[Attempt, Counter[Attempt]] = defaultdict(Counter)
        """By consumer and producer; without what is written once more."""
        self._received: defaultdict[Attempt, Counter[Attempt]] = defaultdict(Counter)
        """The same. Attempt 0 of subtask 0 stands for those that the consumer counts together."""
        for record in records:
            for peer in unpack_traffic(record.traffic):
                if peer.edge in kept:
                    self._sides[record.id] += peer.received
                elif peer.edge < len(edges):
                    self._add(record, peer, edges[peer.edge])
        self._add_unreported()

    def _add_unreported(self) -> None:
        """What one that died has received was sent to it, though its producer died before it had said so."""
        for consumer, received in self._received.items():
            reader = self._records.get(consumer)
            for producer, rows in received.items():
                writer = self._records.get(producer)
                if reader is None or writer is None or writer.end != "died":
                    continue
                if not self._died_together(reader, producer):
                    self._sent_by_survivors[consumer] += max(0, rows - self._sent[consumer][producer])

    def _add(self, record: AttemptRecord, peer: PeerRows, edge: Edge) -> None:
        consumer = (edge.target, peer.subtask, peer.attempt)
        producer = (edge.source, peer.subtask, peer.attempt)
        if not self._is_repeated(record.id, consumer):
            self._sent[consumer][record.id] += peer.sent
        if not self._is_repeated(producer, record.id):
            self._received[record.id][producer] += peer.received
        inside = self._died_together(record, consumer)
        if inside:
            self._sent_inside[record.id] += peer.sent
        if not inside or record.operator not in self._reading:
            self._sent_by_survivors[consumer] += peer.sent
        if not self._died_together(record, producer):
            self._received_by_survivors[producer] += peer.received

    def _is_repeated(self, producer: Attempt, consumer: Attempt) -> bool:
        """Whether the consumer gets these rows once more: one that ended early does not, nor does the attempt
        that takes its place."""
        writer, reader = self._records.get(producer), self._records.get(consumer)
        repeated = writer is not None and bool(writer.repeated)
        return repeated and (reader is None or reader.end != "early")

    def _died_together(self, record: AttemptRecord, peer: Attempt) -> bool:
        other = self._records.get(peer)
        if other is None or record.end != "died":
            return False
        return (other.end, other.worker) == ("died", record.worker)

    def exchanged(self, record: AttemptRecord) -> Past:
        """What it has exchanged with others, in that order; ``undelivered`` whether it has ended or not."""
        key = record.id
        sent, received = self._sent_by_survivors[key], self._received_by_survivors[key]
        return Past(sent, received, self._sent_inside[key], self._outstanding(key))

    def undelivered(self, records: Iterable[AttemptRecord]) -> int:
        """Rows on their way to attempts that have ended in order. One that has finished has read to the ends
        of its producers: what it did not receive was lost with a link."""
        return sum(self._outstanding(record.id) for record in records if record.end in ("early", "finished"))

    def _outstanding(self, consumer: Attempt) -> int:
        """Rows that were sent to an attempt, and that it has not received.

        By producer: of one that died more may have been received than it had reported as sent.
        """
        received = self._received[consumer]
        together = {key[0]: -rows for key, rows in received.items() if not key[2]}
        rows = self._past.get(consumer, Past()).undelivered
        for producer, sent in self._sent[consumer].items():
            left = sent - received[producer]
            if producer[0] in together:
                together[producer[0]] += left
            else:
                rows += max(0, left)
        return rows + sum(max(0, left) for left in together.values())

    def some_were_not_taken(self) -> bool:
        """Whether tasks that have all finished wrote more rows than they took. What was sent may not be
        known yet; what was written is."""
        records = self._records.values()
        written = sum(record.counters.records_out for record in records if record.operator in self._writing)
        taken = sum(record.counters.records_in for record in records if record.operator in self._reading)
        return all(record.end == "finished" for record in records) and written > taken

    def in_flight(self, records: Iterable[AttemptRecord]) -> int:
        """Rows in what died, by worker: what went in from survivors and from its sources, without what came
        out. The next attempt of a source goes on behind its leases."""
        balance: Counter[int] = Counter()
        for record in records:
            if record.end != "died" or record.operator in self._repeatable or record.repeated == "all":
                continue
            if record.operator not in self._reading:
                balance[record.worker] += max(0, self._made_and_not_passed_on(record))
                continue
            rows = self._sent_by_survivors[record.id] - self._passed_on(record)
            balance[record.worker] += rows - self._rows_dealt_with(record)
        return sum(max(0, rows) for rows in balance.values())

    def again(self, records: Iterable[AttemptRecord]) -> int:
        """Rows that survivors have of sources which died, and that may come once more."""
        rows = 0
        for record in records:
            if record.end != "died" or record.operator in self._reading | self._repeatable or record.repeated:
                continue
            received, most = self._received_by_survivors[record.id], record.rows_leased
            if record.passed_on_max is not None:
                most += max(0, received - record.passed_on_max)
            rows += min(received, most) if record.operator in self._writing else most
        return rows

    def _made_and_not_passed_on(self, record: AttemptRecord) -> int:
        """Rows that a source may have emitted and that no survivor has, nor what died with it."""
        rows = record.rows_made - record.counters.rows_skipped - self._rows_dealt_with(record)
        return rows - self._passed_on(record) - self._sent_inside[record.id]

    def _passed_on(self, record: AttemptRecord) -> int:
        """Rows that survivors have of it, without any that its next attempt may emit once more."""
        rows = self._received_by_survivors[record.id]
        return rows if record.passed_on_max is None else min(rows, record.passed_on_max)

    def _rows_dealt_with(self, record: AttemptRecord) -> int:
        """Rows that it has dropped or was done with, each once, without what it had written of them: that is
        where others have it. A sink may have filed more since, if files with them are listed."""
        counters = record.counters
        dropped = sum(counters.rows_dropped.values()) - counters.rows_dropped.get("late_after_recovery", 0)
        if record.operator in self._writing:
            return dropped + counters.rows_done - counters.records_out
        return dropped + counters.rows_done + max(0, record.rows_listed - counters.rows_filed)

    def _taken(self, record: AttemptRecord) -> int:
        """Rows that it has taken in, at least, without those that the next attempt gets again."""
        return max(0, record.counters.records_in - self._sides[record.id])

    def held_rows(self, record: AttemptRecord) -> bool:
        """Whether an attempt ended before its work was done and may have held rows then."""
        if record.operator in self._repeatable or record.repeated == "all":
            return False
        if record.end == "died":
            sent = self._sent_by_survivors[record.id] or any(self._sent[record.id].values())
            return bool(sent or record.counters.records_out)
        taken = self._taken(record) or any(self._received[record.id].values())
        return record.end == "early" and record.operator in self._reading and bool(taken)


def rows_received(record: AttemptRecord, edges: Container[int]) -> int:
    """Rows that an attempt has received over these edges."""
    return sum(peer.received for peer in unpack_traffic(record.traffic) if peer.edge in edges)

"""The row accounting of a job: the counts of all attempts of its tasks, and the rows that were lost. Pure.

Each row is processed by a task, dropped by a live process, which counts it once with a reason, or was in
flight in a task or worker that died. The coordinator adds to the workers' reports the counts that only it can
make:

- *undelivered*: rows sent to an attempt that ended in order, and never received by it, because it did not
  read to the end or a link broke. They are counted as ``queue_discarded``. The number is exact and never
  falls.
- *in flight*: rows lost inside a dead worker. These are the rows that survivors sent to its attempts, minus
  the rows that survivors received from them and the drops that they had reported. If the producer's worker
  died too, the larger of its reported rows and the rows received by the consumer counts as sent. A task that
  writes more or fewer rows than it reads is counted by its finished input rows, and by the rows it wrote for
  these. The number is an upper bound for tasks that write at most one row per input row. It is based on the
  last heartbeats, and settles when those after the loss have arrived. It includes the rows of leases that a
  dead source may have emitted. A source that dies while there is no coordinator may have emitted beyond its
  leases; rows of these that others have received may come again, and hide no missing rows.
- Kept partitions lose no rows, since all of them are sent again. Counts of kept partitions and of the tasks
  that write them are left out, and so are counts of *replayed* tasks
  (:mod:`~minishuffle.coordinator.jobs.lostpartitions`), which run again from the beginning.
- With a guarantee no rows are lost either, since they are retained: its tasks count like replayed ones.
- A source whose next attempt repeats its rows loses none either, unless some consumers get none of them. Then
  its rows in flight are counted, and none of the rows it sent is undelivered.
- *again*: rows of a dead source that others have received, and that its next attempt may emit once more: the
  rows of its leases if it continues at its positions, and all rows emitted since a coordinator was lost,
  which may be beyond its leases. It is an upper bound too. It also counts the published rows of a sink that
  is replayed, and the rows of a blocking input that a task outside the replay had read. With a guarantee it
  is what tasks have received as new rows of producers that had gone back to a snapshot.
- *sink unfinished*: rows accepted by a file sink whose attempt ended early or died, minus the rows in its
  listed files.

Traffic names a peer by edge, subtask and attempt, so each attempt has its own account, whatever happens to
other attempts. An attempt with very many former peers counts some of them together; for its producers, the
sums are compared then.
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
"""Number of ended attempts of a subtask whose traffic is kept. Losses of older attempts are fixed when they
are dropped."""
TaskKey: TypeAlias = tuple[int, int]
"""Operator and index of a subtask."""
Attempt: TypeAlias = tuple[int, int, int]
"""Operator, index and attempt."""


@dataclass(slots=True)
class AttemptRecord(Record):
    """The counts of one attempt. ``end`` is empty while it runs. ``early``: it ended before its work was
    done. ``died``: its worker was lost, with all rows that it held or kept for others."""

    operator: int
    index: int
    worker: int
    attempt: int
    end: Literal["", "finished", "early", "died"] = ""
    counters: TaskCounters = field(default_factory=TaskCounters)
    traffic: bytes = b""
    """Rows exchanged, by edge and peer: see :func:`unpack_traffic`."""
    rows_listed: int = 0
    """Rows in listed files, or in the result that an attempt returned when its job was cancelled."""
    rows_made: int = 0
    """Rows that a dead source may have emitted, including its leases, or skipped."""
    rows_leased: int = 0
    """The part of ``rows_made`` that its next attempt emits in any case."""
    passed_on_max: int | None = None
    """Upper bound of its rows that others can have received and that do not come again. Set while it is not
    known how far sources in the same worker have emitted since a coordinator was lost, perhaps beyond their
    leases."""
    repeated: Literal["", "all", "part"] = ""
    """Consumers for which the next attempt repeats the rows of this one: all that still have to read them, or
    only a part of these. See :mod:`~minishuffle.coordinator.jobs.consumption`."""
    moved: bool = False
    """It had processed all rows sent to it when it ended, and its state is with the next attempt, or in the
    savepoint behind which the job stops: it held nothing that is lost."""

    @property
    def key(self) -> TaskKey:
        return self.operator, self.index

    @property
    def id(self) -> Attempt:
        return self.operator, self.index, self.attempt

    def counted(self, counters: TaskCounters, traffic: bytes = b"") -> None:
        """Set the counters, and the traffic unless it is empty."""
        self.counters, self.traffic = counters, traffic or self.traffic

    def exchanged(self, traffic: bytes, rows_dropped: dict[str, int]) -> None:
        """Set the traffic and the dropped rows. Both may grow after the attempt's end, as its written rows
        are sent or dropped."""
        self.traffic, self.counters = traffic, replace(self.counters, rows_dropped=rows_dropped)

    def listed(self, rows: int) -> None:
        """Count the rows of another listed file."""
        self.rows_listed += rows

    def ended(self, state: str) -> None:
        """Set ``end``, from the state in which the attempt ended."""
        self.end = "died" if state == "lost" else "finished" if state == "finished" else "early"

    def repeats(self, part: Literal["all", "part"]) -> None:
        """Set ``repeated``: the next attempt repeats its rows for all consumers or a part."""
        self.repeated = part

    def repeats_in_part(self) -> None:
        """A consumer gets none of the repeated rows."""
        self.repeated = "part" if self.repeated else ""

    def may_have_made(self, rows: int, leased: int) -> None:
        """The attempt is lost: set ``rows_made`` and ``rows_leased``."""
        self.rows_made, self.rows_leased = rows, leased

    def passed_on(self, most: int | None) -> None:
        """Set ``passed_on_max``."""
        self.passed_on_max = most

    def hold_nothing(self) -> None:
        """Set ``moved``: nothing that it holds is lost by its end."""
        self.moved = True

    def lose_state(self) -> None:
        """The state that it kept for the next attempt is lost."""
        self.moved = False


class Totals(NamedTuple):
    """Counts of a subtask over all its attempts."""

    counters: TaskCounters
    rows_sent: int
    rows_received: int
    state_rows_lost: int
    """State rows of attempts that did not finish, from their last report."""


class Past(NamedTuple):
    """Rows exchanged between an attempt and attempts whose traffic is no longer kept."""

    sent_to_it: int = 0
    """Rows that survivors sent to it."""
    received_of_it: int = 0
    sent_inside: int = 0
    """Rows that it sent to attempts that died with it."""
    undelivered: int = 0

    def plus(self, others: Iterable[int]) -> Past:
        return Past(*(one + other for one, other in zip(self, others, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksRecord(Record):
    """The final losses of dropped attempts, and kept attempts' rows exchanged with these."""

    undelivered: int
    in_flight: int
    again: int = 0
    unfinished: int
    lossy: bool
    lost: dict[str, int]
    past: tuple[tuple[int, int, int, int, int, int, int], ...]
    """Rows of an :data:`Attempt` followed by its :class:`Past`."""


@dataclass(frozen=True, slots=True)
class PastRecord(Record):
    """The replaced attempts of a subtask."""

    ended: tuple[AttemptRecord, ...]
    before: Totals | None
    """Totals of the attempts whose traffic is no longer kept."""


class Losses(NamedTuple):
    """Rows lost in a job."""

    dropped: dict[str, int]
    """Lost rows by reason."""
    in_flight: int
    certain: bool
    """Whether rows were lost for certain. True too if an attempt that had read rows ended before its work was
    done: the rows it held are lost, and their number is unknown."""
    state_rows: int = 0
    """See :class:`Totals`."""
    again: int = 0
    """Upper bound of the rows that came twice; these are not lost."""


class Books:
    """The accounts of a job's replaced attempts. The caller passes in the current attempts."""

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
        """Operators whose subtasks' output is written again completely."""
        self._ended: defaultdict[TaskKey, deque[AttemptRecord]] = defaultdict(deque)
        self._before: dict[TaskKey, Totals] = {}
        """Totals of attempts that are no longer kept."""
        self._past: dict[Attempt, Past] = {}
        """Rows that kept attempts have exchanged with attempts that are no longer kept."""
        self._undelivered_before = 0
        self._in_flight_before = 0
        self._again_before = 0
        self._unfinished_before = 0
        self._lossy = False
        self._lost: Counter[str] = Counter()
        """By reason, lost rows that had left their task."""

    def repeat(self, rows: int) -> None:
        """Count ``rows`` received rows that come again."""
        self._again_before += rows

    def lose(self, reason: str, rows: int) -> None:
        """Count rows that a task had processed and that are lost nevertheless."""
        self._lost[reason] += rows

    def close(self, ended: AttemptRecord, current: Iterable[AttemptRecord]) -> None:
        """Keep the account of a replaced attempt; ``current`` are the attempts of all subtasks."""
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
                ended.moved,
            )
        )

    def _forget(self, oldest: AttemptRecord, records: Sequence[AttemptRecord]) -> None:
        """Drop the oldest attempt: keep its losses, and its rows in the accounts of others."""
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
        """Some consumers get none of the repeated rows of a source's earlier attempts."""
        for record in self._ended.get(key, ()):
            record.repeats_in_part()

    def report(
        self, worker: int, key: TaskKey, attempt: int, traffic: bytes, rows_dropped: dict[str, int]
    ) -> bool:
        """Set the total rows exchanged and dropped by a replaced attempt. False if it is not kept."""
        for record in self._ended.get(key, ()):
            if (record.worker, record.attempt) == (worker, attempt) and record.end != "died":
                record.exchanged(traffic, rows_dropped)
                return True
        return False

    def state_lost(self, key: TaskKey, attempt: int) -> None:
        """The state that a replaced attempt kept for the next one is lost."""
        for record in self._ended.get(key, ()):
            if record.attempt == attempt:
                record.lose_state()

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> BooksRecord:
        """For the journal: the sums that belong to no single subtask."""
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
        """The replaced attempts of a subtask for the journal; None if there are none."""
        ended = self._ended.get(key)
        return PastRecord(tuple(ended), self._before.get(key)) if ended else None

    def recall(self, record: BooksRecord, past: Mapping[TaskKey, PastRecord]) -> None:
        """Restore from the records."""
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
        """The totals over all attempts of a subtask."""
        total = self._before.get(current.key)
        for record in (*self._ended.get(current.key, ()), current):
            total = self._plus(total, record)
        assert total is not None
        return total

    def losses(self, current: Iterable[AttemptRecord]) -> Losses:
        """The losses of the job so far."""
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
        again = self._again_before + ledger.again(records)
        again += sum(record.counters.rows_again for record in records)
        again += sum(before.counters.rows_again for before in self._before.values())
        again = min(COUNT_MAX, again)
        return Losses(shown, min(COUNT_MAX, in_flight), certain, min(COUNT_MAX, state_rows), again)

    def passed_on(self, current: Sequence[AttemptRecord]) -> dict[Attempt, int]:
        """The rows that other workers have received from each running attempt."""
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
        """State rows lost with an attempt; 0 for a replayed one, whose rows come again."""
        lost = record.end in ("early", "died") and record.operator not in self._replayed and not record.moved
        return record.counters.state_rows if lost else 0

    def _rows_unfinished(self, record: AttemptRecord) -> int:
        """Rows that a sink had accepted, and that are in no listed file and no result."""
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
    """The rows sent and received between attempts, from their traffic.

    Args:
        past: rows exchanged with attempts that are no longer kept.
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
        """Rows received from kept partitions, which the next attempt receives again."""
        self._reading = {edge.target for edge in edges}
        self._writing = {edge.source for edge in edges}
        self._records = {record.id: record for record in records}
        self._past = past
        self._sent_by_survivors = Counter({each: past[each].sent_to_it for each in past})
        self._received_by_survivors = Counter({each: past[each].received_of_it for each in past})
        """By producer, rows received from it, except by attempts that died with it."""
        self._sent_inside = Counter({each: past[each].sent_inside for each in past})
        """By producer, rows sent to attempts that died with it."""
        self._sent: defaultdict[Attempt, Counter[Attempt]] = defaultdict(Counter)
        """Rows sent by consumer and producer, without repeated rows."""
        self._received: defaultdict[Attempt, Counter[Attempt]] = defaultdict(Counter)
        """Rows received by consumer and producer, without repeated rows. Attempt 0 of subtask 0 stands for
        the producers that the consumer counts together."""
        for record in records:
            for peer in unpack_traffic(record.traffic):
                if peer.edge in kept:
                    self._sides[record.id] += peer.received
                elif peer.edge < len(edges):
                    self._add(record, peer, edges[peer.edge])
        self._add_unreported()

    def _add_unreported(self) -> None:
        """Count rows received by a dead attempt as sent to it, if its producer died too and had not reported
        them."""
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
        """Whether the consumer gets these rows again. A consumer that ended early does not, nor does its next
        attempt."""
        writer, reader = self._records.get(producer), self._records.get(consumer)
        repeated = writer is not None and bool(writer.repeated)
        return repeated and (reader is None or reader.end != "early")

    def _died_together(self, record: AttemptRecord, peer: Attempt) -> bool:
        other = self._records.get(peer)
        if other is None or record.end != "died":
            return False
        return (other.end, other.worker) == ("died", record.worker)

    def exchanged(self, record: AttemptRecord) -> Past:
        """The rows an attempt has exchanged with others; ``undelivered`` whether it has ended or not."""
        key = record.id
        sent, received = self._sent_by_survivors[key], self._received_by_survivors[key]
        return Past(sent, received, self._sent_inside[key], self._outstanding(key))

    def undelivered(self, records: Iterable[AttemptRecord]) -> int:
        """Rows on their way to attempts that have ended in order. A finished attempt has read its producers
        to the end, so rows it did not receive were lost with a link."""
        return sum(self._outstanding(record.id) for record in records if record.end in ("early", "finished"))

    def _outstanding(self, consumer: Attempt) -> int:
        """Rows that were sent to an attempt and not received by it.

        They are compared for each producer: from a dead producer more rows may have been received than it had
        reported as sent.
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
        """Whether all tasks have finished, and have written more rows than they read. The rows sent may not
        be known yet; the rows written are."""
        records = self._records.values()
        written = sum(record.counters.records_out for record in records if record.operator in self._writing)
        taken = sum(record.counters.records_in for record in records if record.operator in self._reading)
        return all(record.end == "finished" for record in records) and written > taken

    def in_flight(self, records: Iterable[AttemptRecord]) -> int:
        """Rows lost in dead attempts, summed by worker: rows from survivors and from its own sources, minus
        rows that came out. The next attempt of a source continues after its leases."""
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
        """Rows of dead sources that survivors have received, and that may come again."""
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
        """Rows that a source may have emitted and no attempt has received, survivors and attempts that died
        with it included."""
        rows = record.rows_made - record.counters.rows_skipped - self._rows_dealt_with(record)
        return rows - self._passed_on(record) - self._sent_inside[record.id]

    def _passed_on(self, record: AttemptRecord) -> int:
        """Rows of an attempt that survivors have received, without rows that its next attempt may emit
        again."""
        rows = self._received_by_survivors[record.id]
        return rows if record.passed_on_max is None else min(rows, record.passed_on_max)

    def _rows_dealt_with(self, record: AttemptRecord) -> int:
        """Rows that an attempt has dropped or finished, each once, minus the rows it had written for them:
        these are counted where others received them. A sink may have filed more rows since, if its listed
        files have them."""
        counters = record.counters
        dropped = sum(counters.rows_dropped.values()) - counters.rows_dropped.get("late_after_recovery", 0)
        if record.operator in self._writing:
            return dropped + counters.rows_done - counters.records_out
        return dropped + counters.rows_done + max(0, record.rows_listed - counters.rows_filed)

    def _taken(self, record: AttemptRecord) -> int:
        """Lower bound of the rows an attempt has read, without rows that the next attempt gets again."""
        return max(0, record.counters.records_in - self._sides[record.id])

    def held_rows(self, record: AttemptRecord) -> bool:
        """Whether an attempt ended before its work was done, and may have held rows then."""
        if record.operator in self._repeatable or record.repeated == "all" or record.moved:
            return False
        if record.end == "died":
            sent = self._sent_by_survivors[record.id] or any(self._sent[record.id].values())
            return bool(sent or record.counters.records_out)
        taken = self._taken(record) or any(self._received[record.id].values())
        return record.end == "early" and record.operator in self._reading and bool(taken)


def rows_received(record: AttemptRecord, edges: Container[int]) -> int:
    """The rows that an attempt has received over ``edges``."""
    return sum(peer.received for peer in unpack_traffic(record.traffic) if peer.edge in edges)

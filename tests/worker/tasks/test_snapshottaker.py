"""Tasks take local snapshots, and their next attempts go on from them: no row is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import PartitionLost, PeerLost, StateLost, WrongResult
from minishuffle.exchange.elements import ELEMENT_HEADER, decode, read_header
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retention import RetainedBytes
from minishuffle.ids import AttemptId, holder_operator, snapshot_edge, state_edge
from minishuffle.operators import column_store, keyed_state
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.messages import CutComplete, HolderSpec, PoisonRow, PoisonSearch, TaskSpec
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.instructions import Fence, StartHolder, StartTask, attempt_id
from minishuffle.worker.tasks import snapshottaker
from minishuffle.worker.tasks.localsnapshots import LocalSnapshots
from minishuffle.worker.tasks.statehandover import unpack_state
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

ROWS = 20_000
KEYS = 7
POISON = 8951884076575120861
"""The hash of the row 100."""
SETTINGS = JobSettings(guarantee="at_least_once", snapshot_interval=0.001, snapshot_cost_max=1.0)


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two elements a snapshot goes on by one part of two keys."""
    monkeypatch.setattr(snapshottaker, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(snapshottaker, "SLICE_SHARE", 0.0)
    monkeypatch.setattr(keyed_state, "SLICE_ROWS", 2)
    monkeypatch.setattr(column_store, "SLICE_SLOTS", 2)


class Numbers:
    """Rows in order."""

    bounded = True

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for begin in range(offset, ROWS, 50):
            yield list(range(begin, min(ROWS, begin + 50)))


class Held(Numbers):
    """They end once the test says so: of tasks whose input has ended others may have to run again, too."""

    may_end = Event()

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for batch in super().read(split, offset):
            if batch[-1] == ROWS - 1:
                assert Held.may_end.wait(30.0)
            yield batch


class Repeating(Numbers):
    """The same again and again."""

    bounded = False

    def read(self, split: int, offset: int) -> Iterator[Any]:
        while True:
            yield from super().read(split, 0)


class Recovery:
    """A job whose snapshots are held here too, and what a coordinator does when tasks are lost."""

    def __init__(self, site: Site, stream: Any, *, parallelism: int = 2) -> None:
        from minishuffle.plan.planner import compile_job

        self.site, self.generation = site, 1
        self.message = site.message(compile_job(stream, parallelism=parallelism, settings=SETTINGS), "j1")
        self.specs: dict[tuple[int, int], TaskSpec] = {}
        for spec in self.message.tasks:
            version = int(not spec.inputs)  # a source makes the same rows again
            self.start(spec.model_copy(update={"holder": 1, "version": version}))
        for key in self.specs:
            self.hold(*key)
        for spec in self.specs.values():
            self.connect(spec)

    def start(self, spec: TaskSpec) -> None:
        self.specs[spec.operator, spec.index] = spec
        self.site.deployment.start(StartTask(self.message, spec))

    def holder(self, operator: int, index: int) -> AttemptId:
        return attempt(holder_operator(operator), index)

    def hold(self, operator: int, index: int) -> None:
        spec = HolderSpec(operator=operator, index=index, attempt=1, task_attempt=1, task_worker=1)
        self.site.deployment.hold(StartHolder(self.holder(operator, index), spec))
        self.join(self.holder(operator, index), snapshot_edge(operator), attempt(operator, index))

    def join(self, reader: AttemptId, edge: int, producer: AttemptId, *, version: int = 0) -> None:
        key = ChannelKey(reader, edge, producer.subtask.index)
        self.generation += 1
        self.site.deployment.connect_local(
            key, producer, self.generation, version=version or producer.attempt
        )

    def connect(self, spec: TaskSpec) -> None:
        for gate in spec.inputs:
            for producer in range(gate.first, gate.first + gate.count):
                now = self.specs[gate.operator, producer]
                self.join(attempt_id("j1", spec), gate.edge, attempt_id("j1", now), version=now.version)

    def lose(self, *keys: tuple[int, int]) -> None:
        """These tasks end all of a sudden, and their next attempts begin."""
        deployment, before = self.site.deployment, {key: self.specs[key] for key in keys}
        for spec in before.values():
            lost = deployment.attempts.pop(attempt_id("j1", spec))
            lost.abandon()
            lost.release()
        for key, spec in before.items():
            operator, index = key
            for holder in [
                each for each in deployment.holders if each.subtask.operator == holder_operator(operator)
            ]:
                new = attempt(operator, index, spec.attempt + 1)
                deployment.fence(Fence(holder, state_edge(operator), new))
            self.start(
                spec.model_copy(update={"attempt": spec.attempt + 1, "state_attempt": 1, "state_worker": 1})
            )
        for key in keys:
            operator, index = key
            new = attempt_id("j1", self.specs[key])
            self.join(self.holder(operator, index), snapshot_edge(operator), new)
            self.join(new, state_edge(operator), self.holder(operator, index))
            self.connect(self.specs[key])
            for spec in self.specs.values():
                if (
                    any(gate.operator == operator for gate in spec.inputs)
                    and (spec.operator, spec.index) not in keys
                ):
                    self.reconnect(spec, operator, index)

    def read(self, operator: int, index: int) -> int:
        """Rows that the current attempt has read."""
        now = attempt_id("j1", self.specs[operator, index])
        return self.site.deployment.attempts[now].task.counters.records_in

    def close(self) -> None:
        for held in self.site.deployment.holders.values():
            held.release()
        for held in self.site.deployment.holders.values():
            held.thread.join()

    def reconnect(self, spec: TaskSpec, operator: int, index: int) -> None:
        reader, now = attempt_id("j1", spec), self.specs[operator, index]
        for gate in spec.inputs:
            if gate.operator == operator and gate.first <= index < gate.first + gate.count:
                channel = self.site.deployment.channel(ChannelKey(reader, gate.edge, index))
                assert channel is not None
                channel.detach(PeerLost("it was lost"))
                self.join(reader, gate.edge, attempt_id("j1", now), version=now.version)


def counting(source: Numbers | None = None) -> Any:
    return Stream.source(source or Numbers()).key_by(lambda row: row % KEYS).count().rebalance().collect()


@pytest.mark.parametrize("lost", [[(0, 0)], [(1, 0)], [(2, 1)], [(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 0)]])
async def test_a_keyed_count_is_right_whichever_task_is_lost(site: Site, lost: list[tuple[int, int]]) -> None:
    Held.may_end.clear()
    recovery = Recovery(site, counting(Held()))
    for _ in range(3):
        await site.until(lambda: recovery.read(1, 0) > 1_000)
        recovery.lose(*lost)
    Held.may_end.set()
    await site.finish()
    recovery.close()
    last = {}
    for key, count in site.rows:
        last[key] = max(count, last.get(key, 0))
    assert last == Counter(row % KEYS for row in [*range(ROWS), *range(ROWS)])
    for operator, index in lost:
        latest = attempt(operator, index, number=4)
        steps = {step for each, step in site.recovered if each == latest}
        assert steps >= ({"first record", "replayed"} if operator else {"first record"})


async def test_what_windows_give_once_more_is_not_late_at_those_behind_them(site: Site) -> None:
    """A lost task sends those behind its snapshot again, and event time has gone on at its consumers."""
    Held.may_end.clear()
    numbers = Stream.source(Held()).event_time(lambda row: datetime.fromtimestamp(row, UTC))
    windows = numbers.key_by(lambda row: row % KEYS).window(timedelta(seconds=100)).count()
    again = windows.key_by(lambda row: 0).window(timedelta(seconds=100), late="fail").count()
    recovery = Recovery(site, again.to_count())
    for _ in range(3):
        rows = recovery.read(2, 0)
        await site.until(lambda rows=rows: recovery.read(2, 0) > rows + 2 * KEYS)
        recovery.lose((1, 0))
    Held.may_end.set()
    await site.finish()
    recovery.close()
    behind = [site.deployment.attempts[attempt(2, index)].task.read_counters() for index in (0, 1)]
    assert sum(each.rows_again for each in behind) > 0
    assert [(each.records_late, each.rows_dropped) for each in behind] == [(0, {}), (0, {})]


def kept(source: Numbers) -> Any:
    """Results that are kept for readers."""
    rows = Stream.source(source).rebalance().map(lambda n: {"n": n})
    return rows.to_table({"n": "int64"}).to_spark("result")


async def end_kept(site: Site, job: Recovery) -> None:
    """End a job although nobody has read what is kept."""
    site.made.clear()
    job.close()
    await site.close()
    site.deployment.drop_spools("j1")


class FilesRecovery(Recovery):
    """A coordinator that lists files, too."""

    def lose(self, *keys: tuple[int, int]) -> None:
        for operator, index in keys:
            spec = self.specs[operator, index]
            counts = Counter(
                file.writer or file.attempt.attempt
                for files in self.site.files.values()
                for file in files
                if file.attempt.subtask.key == (operator, index)
            )
            self.specs[operator, index] = spec.model_copy(update={"files": dict(counts)})
        super().lose(*keys)


@pytest.mark.parametrize("lost", [[(1, 0)], [(0, 1), (1, 0), (1, 1)]])
async def test_files_have_each_row_once_whichever_task_is_lost(
    site: Site, lost: list[tuple[int, int]], tmp_path: Path
) -> None:
    recovery = FilesRecovery(site, Stream.source(Numbers()).rebalance().to_files(tmp_path, rows=1_000))
    for _ in range(3):
        await site.until(lambda: recovery.read(1, 0) > 2_000)
        recovery.lose(*lost)
    await site.finish()
    recovery.close()
    assert all(path.name[0] != "." for path in tmp_path.iterdir())
    rows = pq.read_table(tmp_path)["value"].to_pylist()
    assert sorted(rows) == sorted([*range(ROWS), *range(ROWS)])


class Unheld(FilesRecovery):
    """The holders have gone with their worker, and there is no other."""

    def hold(self, operator: int, index: int) -> None:
        assert (operator, index) in self.specs


async def test_files_are_listed_though_the_holder_has_gone_for_good(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshottaker, "HOLDER_AWAY_SECONDS", 0.05)
    recovery = Unheld(site, Stream.source(Numbers()).rebalance().to_files(tmp_path, rows=1_000))
    await site.finish()
    recovery.close()
    assert sorted(pq.read_table(tmp_path)["value"].to_pylist()) == sorted([*range(ROWS), *range(ROWS)])


async def test_what_came_twice_is_counted_though_the_attempt_dies_that_took_it(site: Site) -> None:
    """The count is in the snapshot with which the next one begins, as are the rows; what the coordinator has
    heard of it is not counted once more."""
    recovery, deployment, sink = Recovery(site, counting(Repeating())), site.deployment, (2, 0)

    def held() -> int:
        """Counted in the oldest snapshot that the holder has of a task that collects."""
        (subpartition,) = deployment.holders[recovery.holder(*sink)].partition.subpartitions
        log = subpartition.log
        places = range(len(log.elements))
        return unpack_state(memoryview(log.read(place))[ELEMENT_HEADER.size :] for place in places).again

    def counted() -> int:
        now = deployment.attempts[attempt_id("j1", recovery.specs[sink])]
        return now.task.read_counters().rows_again

    async def read_on() -> None:
        before = recovery.read(*sink)
        await site.until(lambda: recovery.read(*sink) > before + 50)

    while not counted():
        await read_on()
        recovery.lose((1, 0))
        await read_on()
    again = counted()
    await site.until(lambda: held() == again)
    for known in (0, again):
        recovery.specs[sink] = recovery.specs[sink].model_copy(update={"rows_again": known})
        recovery.lose(sink)
        await read_on()
        assert counted() == again - known
        await site.until(lambda: held() == again)
    recovery.close()


class Endless(Numbers):
    bounded = False


async def test_readers_get_each_row_though_a_sink_is_lost_with_those_that_they_had_not_committed(
    site: Site,
) -> None:
    stream = Stream.source(Endless()).rebalance().map(lambda n: {"n": n}).to_table({"n": "int64"})
    job = Recovery(site, stream.to_spark("result"))
    deployment, found, committed = site.deployment, Counter[int](), Counter[int]()

    def commit(last: int) -> None:
        """A reader takes what there is up to row ``last`` of each subtask, and commits it."""
        for (operator, index), spec in job.specs.items():
            spool = deployment.spools.get(now := attempt_id("j1", spec))
            end = 0 if operator == 0 or spool is None else min(spool.rows, last)
            if spool is None or end <= committed[index]:
                continue
            for rows, parts in spool.read(max(spool.freed, committed[index]), end):
                data = memoryview(b"".join(parts))
                batch = decode(read_header(data)[2], rows, data[ELEMENT_HEADER.size :]).payload
                found.update(batch.column("n").to_pylist())
            committed[index] = end
            deployment.free_rows(now, end, end)

    def is_read(rows: int) -> bool:
        commit(rows)
        return committed == {0: rows, 1: rows}

    await site.until(lambda: is_read(600))
    for index in (0, 1):
        key = 1, index
        spec = job.specs[key]
        spool = deployment.spools.pop(attempt_id("j1", spec))
        await site.until(lambda spool=spool, row=committed[index]: spool.rows > row)
        job.specs[key] = spec.model_copy(update={"first_row": spool.rows})
        job.lose(key)
        spool.give_up()
    expected = Counter(range(ROWS)) + Counter(range(ROWS))

    def are_all_read() -> bool:
        commit(10 * ROWS)
        return not expected - found and len(site.outcomes) == 4

    await site.until(are_all_read)
    counted = sum(spool.rows_again for spool in deployment.spools.values())
    assert (found - expected).total() <= counted
    deployment.drop_spools("j1")
    job.close()


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_a_durable_snapshot_frees_rows_whose_results_no_reader_has_taken_if_there_is_need(
    site_of: type[Site], is_wanted: bool
) -> None:
    """A sink that is lost then asks for rows that are not there any more, for which the whole job goes back.
    Else they are retained for it."""
    site = site_of()
    job, sinks = Recovery(site, kept(Repeating())), [attempt(1, 0), attempt(1, 1)]
    deployment = site.deployment
    gates = [deployment.attempts[key].gates[0] for key in sinks]
    await site.until(lambda: all(gate.taken()[0].row > 2_000 for gate in gates))  # more than a block
    site.pass_barrier()
    await site.until(lambda: all(key in site.made for key in sinks))
    if is_wanted:
        deployment.want_snapshots()
    for key in sinks:
        taker = deployment.attempts[key].task.snapshots
        assert taker is not None
        taker.cut_complete(1, 1, freed=False)
    partition = deployment.attempts[attempt(0, 0)].partition(0)
    assert isinstance(partition, RetainedPartition)
    assert [each.freed > 0 for each in partition.subpartitions] == [is_wanted, is_wanted]
    spool = deployment.spools.pop(sinks[0])
    job.specs[1, 0] = job.specs[1, 0].model_copy(update={"first_row": spool.rows})
    job.lose((1, 0))
    spool.give_up()
    again = attempt(1, 0, 2)
    if is_wanted:
        await site.until(lambda: again in site.outcomes)
        error = site.outcomes[again].error
        assert error is not None and error.code == StateLost.code
    else:
        await site.until(lambda: deployment.spools[again].rows > spool.rows)
    await end_kept(site, job)


class Resting(Numbers):
    """Each split has one batch, and then nothing for now."""

    bounded = False
    goes_on = Event()
    """Never set: what a split waits for, an instant each time."""

    def read(self, split: int, offset: int) -> Iterator[Any]:
        yield list(range(offset, 500))
        while not Resting.goes_on.wait(0.001):
            yield []


async def test_a_durable_snapshot_never_has_a_sink_that_waits_for_rows_which_another_one_freed(
    site_of: type[Site],
) -> None:
    """No row follows those that the sink was lost with: the barrier tells it that they are gone."""
    site = site_of()
    job, sinks = Recovery(site, kept(Resting())), [attempt(1, 0), attempt(1, 1)]
    deployment = site.deployment
    await site.until(lambda: sum(deployment.spools[key].rows for key in sinks) == 1_000)
    site.pass_barrier()
    await site.until(lambda: all(key in site.made for key in sinks))
    deployment.want_snapshots()
    for key in sinks:
        taker = deployment.attempts[key].task.snapshots
        assert taker is not None
        taker.cut_complete(1, 1, freed=False)
    spool = deployment.spools.pop(sinks[0])
    job.specs[1, 0] = job.specs[1, 0].model_copy(update={"first_row": spool.rows})
    job.lose((1, 0))
    spool.give_up()
    again = attempt(1, 0, 2)
    await site.until(lambda: (again, "snapshot read") in site.recovered)
    site.pass_barrier(2)
    await site.until(lambda: again in site.made or again in site.outcomes)
    error = site.outcomes[again].error if again in site.outcomes else None
    assert error is not None and error.code == StateLost.code
    await end_kept(site, job)


async def test_a_durable_snapshot_frees_no_such_rows_of_another_version_than_the_oldest_local_one_has(
    site_of: type[Site],
) -> None:
    """The rows of that version may begin before those that the local snapshot counts: nobody would notice."""
    site = site_of()
    job, sinks = Recovery(site, kept(Repeating())), [attempt(1, 0), attempt(1, 1)]
    deployment = site.deployment
    takers = [taker for key in sinks if (taker := deployment.attempts[key].task.snapshots) is not None]
    await site.until(lambda: all(len(taker._machine.numbers) > 1 for taker in takers))
    for key in sinks:  # a reader has come this far
        deployment.spools[key].free(0, deployment.spools[key].rows)
    deployment.want_snapshots()
    await site.until(lambda: all(taker._machine.taken for taker in takers))
    job.specs[0, 0] = job.specs[0, 0].model_copy(update={"version": 2})
    job.lose((0, 0))
    gates = [gate for taker in takers for gate in taker._gates]
    await site.until(lambda: all(gate.taken()[0].version == 2 for gate in gates))
    partition = deployment.attempts[attempt(0, 0, 2)].partition(0)
    assert isinstance(partition, RetainedPartition)
    before = [each.freed for each in partition.subpartitions]
    site.pass_barrier()
    await site.until(lambda: all(key in site.made for key in sinks))
    deployment.want_snapshots()
    deployment.cut_complete(CutComplete(term=1, job="j1", savepoint=1, kept=1))
    assert [each.freed for each in partition.subpartitions] == before
    await end_kept(site, job)


async def test_each_durable_snapshot_frees_such_rows_while_their_worker_retains_much(
    site_of: type[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker says once that it does: the first one may free too little."""
    monkeypatch.setattr(RetainedBytes, "needs_room", True)
    site = site_of()
    job, sinks = Recovery(site, kept(Repeating())), [attempt(1, 0), attempt(1, 1)]
    deployment = site.deployment
    partition = deployment.attempts[attempt(0, 0)].partition(0)
    assert isinstance(partition, RetainedPartition)
    deployment.want_snapshots()
    gates = [deployment.attempts[key].gates[0] for key in sinks]
    for number in (1, 2):
        freed = [each.freed for each in partition.subpartitions]
        await site.until(  # more than a block
            lambda freed=freed: all(
                gate.taken()[0].row > before + 2_000 for gate, before in zip(gates, freed, strict=True)
            )
        )
        site.made.clear()
        site.pass_barrier(number)
        await site.until(lambda: all(key in site.made for key in sinks))
        deployment.cut_complete(CutComplete(term=1, job="j1", savepoint=number, kept=number))
        for each, before in zip(partition.subpartitions, freed, strict=True):
            assert each.freed > before
    await end_kept(site, job)


class HeldLater(Recovery):
    """Its holders come when the test says so: nothing is freed before."""

    def hold(self, operator: int, index: int) -> None:
        assert (operator, index) in self.specs

    def hold_all(self) -> None:
        for key in self.specs:
            super().hold(*key)


async def test_snapshots_free_what_fills_the_bound_of_a_worker(site_of: type[Site]) -> None:
    """Tasks take them also while they wait for room, and as soon as half of it is full."""
    site = site_of(retained_bytes=48 * 1024)
    recovery = HeldLater(site, counting())
    await site.until(lambda: site.snapshots_wanted > 0)
    recovery.hold_all()
    site.deployment.want_snapshots()
    await site.finish()
    recovery.close()
    assert dict(site.rows) == Counter(row % KEYS for row in [*range(ROWS), *range(ROWS)])
    await site.close()


async def test_what_a_finished_task_has_kept_goes_to_another_holder_and_its_producers_keep_nothing(
    site: Site,
) -> None:
    recovery, deployment = Recovery(site, counting()), site.deployment
    await site.finish()
    held = [each for one in deployment.attempts.values() for each in one.partitions.values()]
    await site.until(
        lambda: not any(isinstance(each, RetainedPartition) and each.store.held for each in held)
    )
    key = attempt(1, 0)
    deployment.holders.pop(recovery.holder(*key.subtask.key)).release()
    second = attempt(holder_operator(1), 0, 2)
    spec = HolderSpec(operator=1, index=0, attempt=2, task_attempt=1, task_worker=1)
    deployment.hold(StartHolder(second, spec))
    deployment.fence(Fence(key, snapshot_edge(1), second))
    recovery.join(second, snapshot_edge(1), key)
    await site.until(lambda: any(each.attempt == second for each in site.held))
    (last,) = deployment.holders[second].partition.subpartitions
    assert last.log.elements, "a next attempt has something to go on from"
    recovery.close()


@pytest.mark.parametrize("by_then", ["", "named", "read"])
async def test_no_task_goes_on_from_before_a_durable_snapshot_for_which_producers_gave_up_rows(
    site: Site, monkeypatch: pytest.MonkeyPatch, by_then: str
) -> None:
    """The holder has gone, the durable snapshot frees what is retained, and another holder comes behind that,
    or it was named or attached before, so that producers retain it."""
    monkeypatch.setattr(snapshottaker, "HOLDER_AWAY_SECONDS", 0.0)
    numbers = Stream.source(Repeating()).key_by(lambda row: row % KEYS).count().to_count()
    recovery, deployment, key = Recovery(site, numbers), site.deployment, attempt(1, 0)
    await site.until(lambda: any(each.attempt == recovery.holder(1, 0) for each in site.held))
    deployment.holders.pop(recovery.holder(1, 0)).release()
    snapshots, second = deployment.attempts[key].task.snapshots, attempt(holder_operator(1), 0, 2)
    assert snapshots is not None

    def name_holder() -> None:
        spec = HolderSpec(operator=1, index=0, attempt=2, task_attempt=1, task_worker=1)
        deployment.hold(StartHolder(second, spec))
        deployment.fence(Fence(key, snapshot_edge(1), second))

    def attach_holder() -> None:
        recovery.join(second, snapshot_edge(1), key)

    def renew_holder(machine: LocalSnapshots) -> None:
        """What was kept is sent, and nothing newer follows."""
        renew(machine)
        renewed.append(machine)
        monkeypatch.setattr(LocalSnapshots, "due", lambda machine: math.inf)

    renew, renewed = LocalSnapshots.renew_holder, list[LocalSnapshots]()
    monkeypatch.setattr(LocalSnapshots, "renew_holder", renew_holder)
    await site.until(lambda: not snapshots.writer.is_read)
    site.pass_barrier()
    await site.until(lambda: key in site.made)
    if by_then:
        name_holder()
    if by_then == "read":
        attach_holder()
    elif by_then == "named":  # and what is kept is sent to it
        await site.until(lambda: len(renewed) == 1)
    snapshots.cut_complete(1, 1, freed=True)
    if not by_then:
        name_holder()
    if by_then != "read":
        attach_holder()
    await site.until(lambda: any(each.attempt == second for each in site.held))
    (log,) = (each.log for each in deployment.holders[second].partition.subpartitions)
    begins = unpack_state(
        memoryview(log.read(place))[ELEMENT_HEADER.size :] for place in range(len(log.elements))
    )
    partitions = [deployment.attempts[attempt(0, index)].partition(0) for index in (0, 1)]
    freed = [each.subpartitions[0].freed for each in partitions if isinstance(each, RetainedPartition)]
    assert [channel.row >= row for channel, row in zip(begins.taken[0], freed, strict=True)] == [True, True]
    recovery.close()


async def test_a_durable_snapshot_is_of_one_moment_though_its_parts_are_made_while_rows_go_on(
    site: Site,
) -> None:
    numbers = Stream.source(Repeating()).key_by(lambda row: row % 1_000).count().to_count()
    recovery, attempts = Recovery(site, numbers), site.deployment.attempts
    counts = [attempt(1, 0), attempt(1, 1)]
    await site.until(lambda: all(attempts[key].task.counters.records_in > 1_000 for key in counts))
    site.pass_barrier()
    await site.until(lambda: site.made.keys() >= {*counts})
    rows = sum(each.position for index in (0, 1) for each in site.saved[attempt(0, index)].positions)
    made = [part.batch for key in counts for parts in site.made[key].parts.values() for part in parts]
    assert len(made) > 100, "an element may come between each two"
    assert sum(sum(batch.column("value").to_pylist()) for batch in made) == rows
    recovery.close()


async def test_a_durable_snapshot_does_not_wait_for_a_local_one_under_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the task would stand for as long as that takes to be sent."""
    rests, cut = list[list[bool]](), snapshottaker.SnapshotTaker.cut

    def noted(taker: snapshottaker.SnapshotTaker, *given: Any) -> Any:
        found = cut(taker, *given)
        rests.append([rest.is_local for rest in taker._rests])
        return found

    monkeypatch.setattr(snapshottaker.SnapshotTaker, "cut", noted)
    numbers = Stream.source(Repeating()).key_by(lambda row: row % 1_000).count().to_count()
    recovery = Recovery(site, numbers)
    count, number = attempt(1, 0), 0
    await site.until(lambda: site.deployment.attempts[count].task.counters.records_in > 1_000)
    while [True, False] not in rests:
        number += 1
        assert number < 100
        site.pass_barrier(number)
        await site.until(lambda: count in site.made)
        site.made.clear()
    recovery.close()


async def test_where_elements_take_long_so_may_what_is_made_between_two(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, go_on = list[float](), snapshottaker.SnapshotTaker._go_on
    monkeypatch.setattr(snapshottaker, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(snapshottaker, "SLICE_SHARE", 1.0)
    monkeypatch.setattr(
        snapshottaker.SnapshotTaker,
        "_go_on",
        lambda taker, seconds: (given.append(seconds), go_on(taker, seconds))[1],
    )
    recovery = Recovery(site, counting(Repeating()))
    await site.until(lambda: any(0.0 < seconds < inf for seconds in given))
    recovery.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_task_fails_whose_retained_rows_or_snapshots_cannot_be_read(site: Site, stream: bool) -> None:
    """Else its consumers, or its holder, would wait for them for good."""
    numbers = Stream.source(Repeating()).key_by(lambda row: row % KEYS)
    recovery = Recovery(site, numbers.count().rebalance().collect())
    await site.until(lambda: recovery.read(1, 0) > 1_000)
    count = site.deployment.attempts[attempt(1, 0)]
    (partition,) = count.partitions.values()
    assert isinstance(partition, RetainedPartition) and count.task.snapshots is not None
    (count.task.snapshots.writer.partition if stream else partition).lose(PartitionLost("the disk is gone"))
    await site.until(lambda: attempt(1, 0) in site.outcomes)
    outcome = site.outcomes[attempt(1, 0)]
    assert outcome.state == "failed" and outcome.error is not None
    assert "the disk is gone" in outcome.error.text
    recovery.close()


async def test_state_that_cannot_be_written_down_ends_the_job_in_words(site: Site) -> None:
    locks = Stream.source(Numbers()).key_by(lambda row: row % KEYS).fold(Lock, lambda lock, row: lock)
    recovery = Recovery(site, locks.to_count(), parallelism=1)
    await site.until(lambda: attempt(1) in site.outcomes)
    error = site.outcomes[attempt(1)].error
    recovery.close()
    assert error is not None and error.code == WrongResult.code
    assert "its state cannot be written down" in error.text and "fold" in error.text


class PoisonRecovery(Recovery):
    """A coordinator that has found a row of the second vertex."""

    def start(self, spec: TaskSpec) -> None:
        found = PoisonRow(row=POISON, place=0, reach=10 * ROWS, why="took it")
        search = PoisonSearch(reach=found.reach, found=[found])
        super().start(spec.model_copy(update={"poison": search}) if spec.operator == 1 else spec)

    def left_out(self) -> dict[str, int]:
        """Rows that the current attempt of that has left out."""
        now = attempt_id("j1", self.specs[1, 0])
        return self.site.deployment.attempts[now].task.counters.user_errors


class Twice(Numbers):
    """Each row twice, far apart; slowly."""

    rate = 4_000

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        for row in range(offset, 2_000):
            yield [row % 1_000]


async def test_a_row_is_not_left_out_again_behind_a_snapshot_without_it(site: Site) -> None:
    stream = Stream.source(Twice()).rebalance().map(abs, on_error="skip").collect()
    recovery = PoisonRecovery(site, stream, parallelism=1)
    (partition,) = site.deployment.attempts[attempt(0)].partitions.values()
    await site.until(lambda: partition.stable()[0] > 100)
    assert recovery.left_out() == {"skip": 1}
    recovery.lose((1, 0))
    await site.finish()
    recovery.close()
    assert recovery.left_out() == {} and Counter(site.rows)[100] == 1

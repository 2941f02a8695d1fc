"""What a worker does for a savepoint: looks for the folder, and writes what its tasks have taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.connectors.spool import SpoolSink
from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError, UnreadableSnapshot
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.spool import Spool
from minishuffle.ids import AttemptId
from minishuffle.operators.base import Operator, Program, TaskContext
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.snapshots.catalog import commit
from minishuffle.snapshots.savedstate import Snapshot
from minishuffle.snapshots.sealedmanifest import SavedOperator, SavedTask, WrittenState, fingerprint
from minishuffle.snapshots.storage import folder_at
from minishuffle.wire.messages import CheckFolder, Restoration, WriteState
from minishuffle.wire.packed import SplitPosition, unpack_positions
from minishuffle.worker.tasks import statewriter
from minishuffle.worker.tasks.statewriter import StateWriter, restoring
from support.batches import as_batch, collecting
from support.reducing import aggregating, counting
from support.savedjobs import SECRET, counts, manifest_of, save_parts

ATTEMPT = AttemptId.of("j1", 1, 0, 1)


class AtOnce:
    """Disk threads that have done it when they are asked."""

    def run(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            found = read()
        except ShuffleError as error:
            found = error
        done(found)


@pytest.fixture
def said() -> list[Any]:
    return []


@pytest.fixture
def writer(said: list[Any]) -> StateWriter:
    return StateWriter(AtOnce(), said.append, said.append)  # type: ignore[arg-type]


def test_a_worker_says_whether_it_finds_what_the_coordinator_has_written(
    writer: StateWriter, said: list[Any], tmp_path: Path
) -> None:
    check = CheckFolder(term=1, job="j1", savepoint=3, folder=str(tmp_path), file="begun", content="words")
    writer.check(check)
    (tmp_path / "begun").write_text("others")
    writer.check(check)
    (tmp_path / "begun").write_text("words")
    writer.check(check)
    assert [each.savepoint for each in said] == [3, 3, 3]
    assert "begun" in said[0].problem and said[1].problem == f"{tmp_path} has another begun"
    assert said[2].problem == ""


def test_what_a_task_has_taken_is_written_and_a_chain_goes_on_with_it(
    writer: StateWriter, said: list[Any], tmp_path: Path
) -> None:
    message = WriteState(term=1, job="j1", savepoint=3, barrier=1, folder=str(tmp_path))
    part = counts(["a", "bb"])
    snapshot = TaskStateSnapshot({"count": [part]}, [SplitPosition(0, 7)], 5)
    writer.taken(ATTEMPT, message, snapshot, 0.25)
    writer.made(ATTEMPT, message, snapshot)
    taken, written = said
    assert taken.stood == 0.25
    assert (unpack_positions(taken.positions), taken.watermark) == ([SplitPosition(0, 7)], 5)
    assert (taken.operators, written.rows, written.problem) == (["count"], 2, "")
    state = WrittenState(written.file, written.bytes, written.index_bytes, written.checksum, written.rows)
    manifest = manifest_of(tasks=(SavedTask(1, 0, "running", 5, state),))
    commit(folder_at(tmp_path), manifest, SECRET)
    assert [each.batch for each in Snapshot(folder_at(tmp_path), manifest).parts("count", 0, 1)] == [
        part.batch
    ]
    for dropped, keys in ([], 2), (["count"], 0):
        operator = counting("end").named("count", "count")
        chain = Chain(Program(None, [operator], []), {}, 0, TaskCounters())
        chain.open([TaskContext("j", "count", 0, 1, 1)])
        restoration = Restoration(path=str(tmp_path), fingerprint=fingerprint(manifest), dropped=dropped)
        restoring(restoration, SECRET)(chain, 0, 1)
        assert operator.state_rows() == keys
    commit(folder_at(tmp_path), manifest_of(number=2, tasks=manifest.tasks), SECRET)
    with pytest.raises(UnreadableSnapshot, match="holds another snapshot than when the job was submitted"):
        restoring(restoration, SECRET)(chain, 0, 1)
    folder_at(tmp_path).remove()
    with pytest.raises(UnreadableSnapshot, match="it was removed"):
        restoring(restoration, SECRET)(chain, 0, 1)


def test_a_task_without_state_writes_nothing_and_one_that_cannot_says_why(
    writer: StateWriter, said: list[Any], tmp_path: Path
) -> None:
    message = WriteState(term=1, job="j1", savepoint=3, barrier=1, folder=str(tmp_path / "file"))
    writer.taken(ATTEMPT, message, TaskStateSnapshot())
    writer.made(ATTEMPT, message, TaskStateSnapshot())
    assert [each.kind for each in said] == ["state_taken", "state_written"]
    assert (said[0].watermark, said[1].file, said[1].problem) == (None, "", "")
    said.clear()
    writer.taken(ATTEMPT, message, "it cannot be pickled")
    writer.made(ATTEMPT, message, "nor can what came later")
    assert [each.problem for each in said] == ["it cannot be pickled", "nor can what came later"]
    said.clear()
    (tmp_path / "file").write_text("")
    writer.made(ATTEMPT, message, TaskStateSnapshot({"count": [counts(["a"])]}))
    assert "file" in said[-1].problem


def test_kept_rows_are_in_a_cut_of_the_job_and_a_chain_goes_on_with_them(
    writer: StateWriter, said: list[Any], tmp_path: Path
) -> None:
    schema = pa.schema([("n", pa.int64())])

    def opened(first: int) -> tuple[Chain, Spool]:
        spool = Spool(partial(ElementStore, "results of the test", StorePlace()), None, first)
        operator = SpoolSink("result", schema).named("to_spark", "kept")
        chain = Chain(Program(None, [operator], []), {}, 0, TaskCounters())
        chain.open([TaskContext("j", "to_spark", 0, 1, 1, spool=spool)])
        return chain, spool

    chain, spool = opened(0)
    chain.entrance(0)(as_batch(pa.record_batch({"n": [1, 2, 3]})))
    assert not chain.snapshot().stored and not chain.snapshot().parts
    taken = chain.snapshot(of_all=True)
    message = WriteState(term=1, job="j1", savepoint=3, barrier=1, folder=str(tmp_path), goes_on=True)
    writer.taken(ATTEMPT, message, taken)
    writer.made(ATTEMPT, message, taken)
    assert said[0].operators == ["kept"]
    state = WrittenState(said[1].file, said[1].bytes, said[1].index_bytes, said[1].checksum, said[1].rows)
    manifest = manifest_of(tasks=(SavedTask(1, 0, "running", 5, state),))
    commit(folder_at(tmp_path), manifest, SECRET)
    chain, spool = opened(10)
    restoring(Restoration(path=str(tmp_path), fingerprint=fingerprint(manifest)), SECRET)(chain, 0, 1)
    assert (spool.rows, spool.rows_again) == (13, 10 + 3)


def test_a_chain_goes_on_with_the_state_of_aggregates_that_it_still_has(tmp_path: Path) -> None:
    def made(columns: Any) -> tuple[Operator, Chain]:
        operator = aggregating(("k",), columns, "end").named("totals", "totals")
        chain = Chain(Program(None, [operator], []), {}, 0, TaskCounters())
        chain.open([TaskContext("j", "totals", 0, 1, 1)])
        return operator, chain

    total, most = {"total": ("v", "sum")}, {"most": ("v", "max")}
    before, _ = made(total | most)
    before.process(as_batch(pa.record_batch({"k": ["a", "a"], "v": [2, 3]})), 0, list[Any]().append)
    saved = SavedOperator("totals", "totals", "aggregate", ("k",), ("total", "most"))
    manifest = save_parts(folder_at(tmp_path), saved, before.write_state())
    outputs = {"totals": ["most", "total"]}
    restoration = Restoration(path=str(tmp_path), fingerprint=fingerprint(manifest), outputs=outputs)
    after, chain = made(most | total)
    restoring(restoration, SECRET)(chain, 0, 1)
    out: list[pa.RecordBatch] = []
    after.finish(collecting(out))
    assert [batch.to_pylist() for batch in out] == [[{"k": "a", "most": 3, "total": 5}]]


def test_a_folder_that_is_another_is_named_without_the_key_of_its_store(
    writer: StateWriter, said: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begun").write_text("others")
    monkeypatch.setattr(statewriter, "_folder", lambda path: folder_at(tmp_path))
    where = "s3://key:word@bucket/s"
    writer.check(CheckFolder(term=1, job="j1", savepoint=3, folder=where, file="begun", content="words"))
    assert said[0].problem == f"{tmp_path} has another begun"

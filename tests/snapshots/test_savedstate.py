"""An opened snapshot: each subtask's state, at any parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from minishuffle.errors import UnknownName, UntrustedSnapshot
from minishuffle.operators.state_parts import keys_of
from minishuffle.snapshots.savedstate import Snapshot, open_snapshot
from minishuffle.snapshots.sealedmanifest import FORMAT_VERSION
from minishuffle.snapshots.storage import folder_at
from support.savedjobs import SECRET, counts, save

FORMATS = Path(__file__).parent / "formats"
"""A snapshot of each version of the format, as :func:`save` of that time wrote it."""
WORDS = [f"word{number}" * (number % 3 + 1) for number in range(300)]


def held(snapshot: Snapshot, index: int, parallelism: int) -> dict[str, int]:
    parts = snapshot.parts("count-1", index, parallelism)
    return {
        key: value
        for part in parts
        for key, value in zip(keys_of(part), part.batch["value"].to_pylist(), strict=True)
    }


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4])
def test_each_subtask_gets_its_keys(parallelism: int, tmp_path: Path) -> None:
    made = save(folder_at(tmp_path / "s"), WORDS)
    snapshot = open_snapshot(tmp_path / "s", SECRET)
    assert snapshot.manifest == made
    for index in range(parallelism):
        keys = keys_of(counts(WORDS, index, parallelism))
        assert held(snapshot, index, parallelism) == {key: len(key) for key in keys}
    assert list(snapshot.parts("another", 0, 1)) == []


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_snapshot_of_each_format_can_be_read(version: int) -> None:
    snapshot = open_snapshot(FORMATS / f"format-{version}", SECRET)
    made = snapshot.manifest
    assert (made.name, made.taken_at, made.committed) == ("words", 1_000.5, b"\x00\xfe")
    assert [(vertex.name, vertex.parallelism) for vertex in made.vertices] == [("words", 1), ("count", 2)]
    assert [(task.vertex, task.index, task.state, task.watermark) for task in made.tasks] == [
        (0, 0, "ended", None),
        (1, 0, "running", 17),
        (1, 1, "running", 17),
    ]
    splits = made.positions["words-0"]
    assert (splits["0"].rows, splits["b"].cursor, splits["b"].ended) == (3, b"\xff\x00", True)
    assert held(snapshot, 0, 1) == {"a": 1, "the": 3, "ccc": 3}


def test_a_directory_stands_for_its_newest_snapshot(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="there is no snapshot in"):
        open_snapshot(tmp_path, SECRET)
    for number in (1, 2):
        save(folder_at(tmp_path / str(number)), number=number, taken_at=float(number))
    assert open_snapshot(str(tmp_path), SECRET).manifest.number == 2
    (tmp_path / "2" / "1-0-1.state").unlink()
    snapshot = open_snapshot(f"file://{tmp_path}", SECRET)
    assert snapshot.manifest.number == 1
    (why,) = snapshot.passed_over
    assert why.startswith(f"there is no {tmp_path}/2/1-0-1.state")


def test_another_cluster_has_to_trust_it(tmp_path: Path) -> None:
    save(folder_at(tmp_path))
    with pytest.raises(UntrustedSnapshot, match="another secret"):
        open_snapshot(tmp_path, b"y" * 32)
    assert held(open_snapshot(tmp_path, b"y" * 32, trust=True), 0, 1) == {"a": 1, "the": 3, "ccc": 3}

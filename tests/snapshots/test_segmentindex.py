"""The index of a state file: whose segments are whose, and what has been changed since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minishuffle.errors import UnreadableSnapshot
from minishuffle.exchange.keys import destination
from minishuffle.snapshots.sealedmanifest import WrittenState
from minishuffle.snapshots.segmentindex import KEY_GROUPS, StateSegment, checked_segment, read_index, wanted
from minishuffle.snapshots.storage import folder_at
from support.savedjobs import save

LEAST = (1 << 64) // KEY_GROUPS
"""Hashes in one group."""


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5, 1_000, KEY_GROUPS])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, KEY_GROUPS - 1), (10_922, 10_923), (17, 4_096)])
def test_a_segment_is_wanted_by_those_who_own_a_hash_of_it(first: int, last: int, parallelism: int) -> None:
    lowest = destination(first * LEAST, parallelism)
    highest = destination((last + 1) * LEAST - 1, parallelism)
    segment = StateSegment("a", "p", 0, first, last, 0, 1, 1, b"")
    for index in {0, lowest - 1, lowest, highest, highest + 1, parallelism - 1}:
        if 0 <= index < parallelism:
            assert wanted(segment, index, parallelism) == (lowest <= index <= highest)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, WrittenState]:
    written = save(folder_at(tmp_path)).tasks[1].written
    assert written is not None
    return tmp_path, written


def test_a_state_file_that_is_cut_anywhere_or_changed_is_refused(saved: tuple[Path, WrittenState]) -> None:
    place, written = saved
    folder, path = folder_at(place), place / written.file
    whole = path.read_bytes()
    index = read_index(folder, written)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UnreadableSnapshot, match=rf"{written.file} (is cut|was changed)"):
            read_index(folder, written)
    for byte in range(len(whole)):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        with pytest.raises(UnreadableSnapshot, match=f"^{path} was changed: .*; use the snapshot before it"):
            for segment in read_index(folder, written):
                checked_segment(folder, written.file, segment)
    path.write_bytes(whole)
    assert sum(map(len, (checked_segment(folder, written.file, each) for each in index))) == (
        written.bytes - written.index_bytes
    )


def test_a_file_that_is_gone_is_named(saved: tuple[Path, WrittenState]) -> None:
    place, written = saved
    with pytest.raises(UnreadableSnapshot, match=f"^there is no {place}/other: it was removed"):
        read_index(folder_at(place), replace(written, file="other"))

"""The index of a state file: which rows of which operator lie where in it. Pure.

A state file consists of segments, each of which is a stream of Arrow IPC with one record batch, and of its
index. A segment has rows of one part (``operators.state_parts``) in a range of *key groups*. A key group is
one of :data:`KEY_GROUPS` equal ranges of hashes, which ``exchange.keys.destination`` divides among subtasks:
each subtask's keys, at any parallelism, are a range of them, and so it reads the segments that overlap its
own. (Flink: ``KeyGroupRange``, whose number of groups is the maximum parallelism. Here a segment has as many
groups as give it enough rows.)"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgpack

from minishuffle.errors import UnreadableSnapshot
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.snapshots.sealedmanifest import WrittenState
from minishuffle.snapshots.storage import Folder

__all__ = ["KEY_GROUPS", "NO_GROUP", "StateSegment", "checked_segment", "pack_index", "read_index", "wanted"]

KEY_GROUPS: Final = PARALLELISM_MAX
"""A power of two: the group of a hash is its first bits."""
NO_GROUP: Final = -1
"""The group of rows without a hash, which are no key's."""
assert KEY_GROUPS & (KEY_GROUPS - 1) == 0


class StateSegment(NamedTuple):
    """Rows of one part whose keys are in a range of key groups."""

    operator: str
    """The id of the operator's state."""
    part: str
    """The name of the part."""
    batch: int
    """Which of the parts in the file, as they were given: its segments have its rows together."""
    first: int
    """The first key group, or NO_GROUP."""
    last: int
    """The last one."""
    offset: int
    length: int
    rows: int
    checksum: bytes
    """SHA-256 of the segment's bytes."""


def wanted(segment: StateSegment, index: int, parallelism: int) -> bool:
    """Whether subtask ``index`` of ``parallelism`` may have rows of it."""
    if segment.first == NO_GROUP:
        return True
    first = segment.first * parallelism // KEY_GROUPS
    behind = -(-(segment.last + 1) * parallelism // KEY_GROUPS)
    return first <= index < behind


def pack_index(segments: Iterable[StateSegment]) -> bytes:
    packed: bytes = msgpack.packb([tuple(segment) for segment in segments])
    return packed


def read_index(folder: Folder, written: WrittenState) -> list[StateSegment]:
    """The segments of a state file, in the order in which they were written.

    Raises:
        UnreadableSnapshot: the file is missing, cut or changed.
        StorageUnavailable: it cannot be read now.
    """
    start = written.bytes - written.index_bytes
    data = folder.read(written.file, start, written.index_bytes)
    where = f"{folder.where}/{written.file}"
    if len(data) < written.index_bytes:
        raise UnreadableSnapshot(
            f"{where} is cut: it has fewer than its {written.bytes:,} bytes; use the snapshot before it"
        )
    if hashlib.sha256(data).hexdigest() != written.checksum:
        raise UnreadableSnapshot(
            f"{where} was changed: its index does not have the checksum in the manifest; use the snapshot "
            "before it"
        )
    return [StateSegment(*entry) for entry in msgpack.unpackb(data)]


def checked_segment(folder: Folder, file: str, segment: StateSegment) -> bytes:
    """The bytes of a segment.

    Raises:
        UnreadableSnapshot: the file is missing, cut or changed.
        StorageUnavailable: it cannot be read now.
    """
    data = folder.read(file, segment.offset, segment.length)
    if len(data) < segment.length or hashlib.sha256(data).digest() != segment.checksum:
        raise UnreadableSnapshot(
            f"{folder.where}/{file} was changed: {segment.length:,} bytes from byte {segment.offset:,} on do "
            "not have their checksum; use the snapshot before it"
        )
    return data

"""The stream of snapshots to their holder: markers, and what was acknowledged of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.elements import Assembler, AssemblyBudget, ByteBudget, ElementFormat, with_header
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.worker.tasks.snapshotstream import BEGUN, SnapshotMarker, SnapshotWriter
from support.retained import VERSION, Producer

NUMBERS = st.integers(0, (1 << 64) - 1)
COUNTS = st.integers(0, (1 << 32) - 1)


@given(st.builds(SnapshotMarker, NUMBERS, COUNTS, st.lists(NUMBERS, max_size=3).map(tuple), COUNTS))
def test_a_marker_is_the_same_behind_its_bytes(marker: SnapshotMarker) -> None:
    packed = marker.pack()
    assert SnapshotMarker.unpack(packed) == marker
    for end in range(len(packed)):
        with pytest.raises(struct.error):
            SnapshotMarker.unpack(packed[:end])


class Stream:
    """A task's end, and the turns of its loop."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.memory = ByteBudget(1 << 20)
        self.producer: Producer
        self.writer = SnapshotWriter(
            self._make,
            lambda: ElementStore("copies", StorePlace(), memory=self.memory),
            lambda *held: self.said.append(held),
            lambda: self.said.append("another"),
            0,
        )

    def _make(self, stable: Callable[[], None], fenced: Callable[[int], None]) -> RetainedPartition:
        self.producer = Producer(unread_bytes=None, on_stable=stable, fenced=fenced)
        return self.producer.partition

    def write(self, number: int, keep: tuple[int, ...]) -> None:
        elements = [with_header(1, ElementFormat.STATE, [b"state"])] * (number % 3)
        assert sum(self.writer.write(number, elements, keep)) == sum(map(len, chain(*elements)))

    def make_stable(self, row: int) -> None:
        self.producer.only.make_stable(VERSION, row)


@given(st.lists(st.integers(0, 5)))
def test_each_marker_is_acknowledged_once_when_the_rows_up_to_it_are_stable(rows: list[int]) -> None:
    stream, ends, wanted = Stream(), list[int](), list[Any]()
    number, stable = 0, 0
    for row in rows:
        if row % 2:
            number += 1
            stream.write(number, (number,))
            wanted.append((number, (number,)))
        else:
            stream.writer.keep((number,))
            wanted.append((BEGUN, (number,)))
        ends.extend(stream.writer.partition.written())
        stable = max(stable, min(ends[-1], stable + row))
        stream.make_stable(stable)
        assert stream.said == wanted[: sum(end <= stable for end in ends)]


def test_a_holder_that_is_named_again_and_those_of_others_change_nothing() -> None:
    stream = Stream()
    stream.write(1, (0, 1))
    for consumer, holder in ((1, 2), (0, 2), (0, 2)):
        stream.writer.partition.fence(consumer, holder)
        assert stream.said == ["another"] * (consumer == 0)


def read(stream: Stream) -> list[Any]:
    """Elements in the stream: payloads, and markers."""
    view = stream.producer.only.attach(1, lambda: None, version=VERSION, attempt=2)
    assembler, found = Assembler(AssemblyBudget(1 << 20)), list[Any]()
    while (piece := view.poll()) is not None:
        assembler.feed(piece.payload, piece.rows)
        while (element := assembler.next()) is not None:
            kind, rows, payload = element
            assert rows == 1
            is_marker = kind == ElementFormat.SNAPSHOT
            found.append(SnapshotMarker.unpack(payload) if is_marker else bytes(payload))
        piece.released()
    return found


def test_another_holder_gets_all_snapshots_that_are_kept() -> None:
    stream = Stream()
    stream.writer.begin([])
    stream.write(1, (0, 1))
    stream.write(2, (0, 1, 2))
    stream.writer.keep((1, 2))
    before = read(stream)
    assert [each for each in before if each != b"state"][:2] == [
        SnapshotMarker(1, 1, (0, 1), 1),
        SnapshotMarker(2, 2, (0, 1, 2), 1),
    ]
    stream.make_stable(3)
    assert stream.said == [(1, (0, 1))]
    stream.writer.partition.fence(0, 2)
    stream.write(3, (1, 3))
    (rows,) = stream.writer.partition.written()
    stream.make_stable(rows)
    assert stream.said[1:] == ["another"], "those markers are not for this holder"
    assert stream.writer.send_again([1, 3])
    assert read(stream)[-3:] == [
        b"state",
        SnapshotMarker(1, 1, (1,), 2),
        SnapshotMarker(3, 0, (1, 3), 2),
    ]
    (rows,) = stream.writer.partition.written()
    stream.make_stable(rows)
    assert stream.said[2:] == [(1, (1,)), (3, (1, 3))]


def test_without_a_copy_of_each_nothing_is_sent_again() -> None:
    stream = Stream()
    stream.write(1, (0, 1))
    assert not stream.writer.send_again([0, 1]), "nothing was said of what it has begun with"
    stream.writer.keep((1,))
    assert stream.writer.send_again([1]) and stream.memory.used
    stream.writer.forget()
    assert not stream.writer.send_again([1]) and not stream.memory.used

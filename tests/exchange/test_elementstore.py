"""Stored elements: in memory, then in a file without a name, each with its checksum."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from minishuffle.errors import PartitionLost, ResourceExhausted
from minishuffle.exchange.elements import ByteBudget
from minishuffle.exchange.elementstore import ElementLog, ElementStore, StoredElement, StorePlace

OWNER = "partition j1/edge2.0 at attempt j1/1.0#3 on worker 4"


def store_in(directory: Path, memory_bytes: int = 0) -> ElementStore:
    return ElementStore(OWNER, StorePlace(str(directory)), memory_bytes=memory_bytes)


def file_of(element: StoredElement) -> int:
    assert element.file is not None
    return element.file.number


def test_a_log_has_its_elements_in_order_in_memory_and_beyond(tmp_path: Path) -> None:
    log = ElementLog(store_in(tmp_path, 10))
    elements = [bytes([number]) * (number + 1) for number in range(20)]
    for number, element in enumerate(elements):
        log.append(number, [element[:1], memoryview(element)[1:]])
    assert [each.rows for each in log.elements] == list(range(20))
    assert [log.read(number) for number in range(20)] == elements
    assert log.bytes == log.store.bytes == sum(map(len, elements))
    assert [each.data is None for each in log.elements] == [number > 3 for number in range(20)]
    assert list(tmp_path.iterdir()) == [], "its file has no name"
    log.clear()
    assert (log.elements, log.bytes) == ([], 0)


def test_logs_share_the_memory_and_the_file_of_their_store(tmp_path: Path) -> None:
    store = store_in(tmp_path, 4)
    one, two = ElementLog(store), ElementLog(store)
    for number in range(6):
        (one, two)[number % 2].append(1, [bytes([number]) * 2])
    assert [one.read(number) for number in range(3)] == [b"\0\0", b"\2\2", b"\4\4"]
    assert [two.read(number) for number in range(3)] == [b"\1\1", b"\3\3", b"\5\5"]
    assert len({id(each.file) for log in (one, two) for each in log.elements}) == 2, "none, and the file"


def test_stores_share_memory_until_they_forget(tmp_path: Path) -> None:
    memory = ByteBudget(10)
    one, two = (ElementStore(OWNER, StorePlace(str(tmp_path)), memory=memory) for _ in range(2))
    assert [store.append(1, [b"12345"]).data is None for store in (one, two, one)] == [False, False, True]
    two.forget()
    assert memory.used == 5 and one.append(1, [b"6789"]).data == b"6789"


def test_limits_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ResourceExhausted, match=f"{OWNER} cannot be kept in .*none: No such .*--state-dir"):
        store_in(tmp_path / "none").append(1, [b"x"])
    budget = ByteBudget(10)
    store, other = (ElementStore(OWNER, StorePlace(str(tmp_path)), budget=budget) for _ in range(2))
    store.append(1, [b"0123"])
    other.append(1, [b"45"])
    store.append(1, [b"6789"])
    text = f"{OWNER} finds no room: .* more than 10 bytes of that worker. Raise blocking_bytes_max, or"
    with pytest.raises(ResourceExhausted, match=text):
        other.append(1, [b"x"])
    store.forget()
    other.append(1, [b"01234567"])
    assert budget.used == 10
    del other
    assert budget.used == 0, "what nobody has takes no room"


def test_a_block_that_is_not_what_was_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    first, second = store.append(1, [b"abc"]), store.append(2, [b"defg", b"h"])
    named = rf"block 1 of {OWNER} cannot be read, 5 bytes at offset 3 of a file in {tmp_path}: "
    os.pwrite(file_of(second), b"X", 4)
    with pytest.raises(PartitionLost, match=f"{named}its checksum is not"):
        store.read(second)
    assert store.read(first) == b"abc", "the others are as they were"
    os.ftruncate(file_of(second), 6)
    with pytest.raises(PartitionLost, match=f"{named}the file ends 2 bytes before its end"):
        store.read(second)

    def broken(number: int, size: int, at: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(PartitionLost, match=f"{named}Input/output error; look at that disk"):
        store.read(second)


def test_a_short_read_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = store_in(tmp_path), os.pread
    element = store.append(1, [b"0123456789"])
    monkeypatch.setattr(os, "pread", lambda number, size, at: real(number, min(size, 3), at))
    assert store.read(element) == b"0123456789"


def test_a_file_is_closed_once_its_store_and_its_readers_let_go(tmp_path: Path) -> None:
    closed: list[int] = []
    store = ElementStore(OWNER, StorePlace(str(tmp_path), closed.append))
    element = store.append(1, [b"abc"])
    number = file_of(element)
    store.forget()
    assert closed == [] and store.read(element) == b"abc"
    del element
    assert closed == [number]
    os.close(number)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from minishuffle.coordinator.journal.codec import (
    FORMAT,
    OtherFormat,
    Record,
    pack_record,
    require_format,
    unpack_record,
)
from minishuffle.errors import ShuffleError


def packed(fields: dict[str, Any]) -> bytes:
    """A record that says what no type of it may fit."""
    return bytes((FORMAT,)) + msgpack.packb(fields)


@pytest.mark.parametrize("number", [number for number in range(1, FORMAT + 3) if number != FORMAT])
def test_a_record_of_another_release_is_not_guessed_at(number: int) -> None:
    records = {("job", "j1"): packed({}), ("task", "j1 0 0"): bytes((number,)) + b"\x80"}
    with pytest.raises(OtherFormat, match=f"it has format {number}, this release reads format {FORMAT}"):
        require_format(records)


def test_damaged_records_are_left_to_who_reads_them() -> None:
    damaged = {("job", "j1"): packed({}), ("job", "j2"): b"\xfe\x80", ("job", "j3"): b""}
    require_format(damaged)
    for name in ("j2", "j3"):
        with pytest.raises(ShuffleError, match=f"record job {name} cannot be read"):
            unpack_record(Fact, ("job", name), damaged["job", name])


@dataclass(frozen=True)
class Fact(Record):
    number: int
    pair: tuple[str, int] = ("", 0)


def test_a_fact_comes_back_and_what_does_not_fit_it_is_named() -> None:
    fact = Fact(3, ("a", 4))
    assert unpack_record(Fact, ("fact", ""), pack_record(fact)) == fact
    assert unpack_record(Fact, ("fact", ""), packed({"number": 3})) == Fact(3), "of before there were pairs"
    for fields, what in (
        ({}, "number: Field"),
        ({"number": "x"}, "number: Input"),
        ({"number": 1, "a": 2}, "a: Un"),
    ):
        with pytest.raises(ShuffleError, match=rf"^record fact cannot be read: Fact\.{what}"):
            unpack_record(Fact, ("fact", ""), packed(fields))

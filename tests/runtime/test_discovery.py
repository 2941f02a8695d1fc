"""Splits that come and go: who owns which, and what is not read twice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from minishuffle.errors import WrongResult
from minishuffle.exchange.keys import stable_hash
from minishuffle.limits import NAMED_SPLITS_MAX
from minishuffle.runtime.discovery import SplitDiscovery
from minishuffle.wire.packed import Cursor, SplitPosition


class Topics:
    """Splits whose names a test changes."""

    replayable = True
    bounded = False
    discovery_interval = timedelta(seconds=5)

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def splits(self) -> list[str]:
        return self.names

    def read(self, split: str, position: bytes, /) -> Iterator[Any]:
        yield [split], b"1"


def found(discovery: SplitDiscovery, now: float) -> dict[int, str]:
    return {split.number: split.cursor.name for split in discovery.look(now)}


def test_each_name_is_of_one_subtask_whatever_the_order() -> None:
    names = [f"orders-{number}" for number in range(20)]
    parts = [found(SplitDiscovery(Topics(*names), index, 3, 5.0), 0.0) for index in range(3)]
    assert sorted(name for part in parts for name in part.values()) == sorted(names)
    for index, part in enumerate(parts):
        again = found(SplitDiscovery(Topics(*reversed(names)), index, 3, 5.0), 0.0)
        assert set(again.values()) == set(part.values())
        assert {stable_hash(name) % 3 for name in part.values()} == {index}
        assert {number % 3 for number in part} == {index}, "numbers of two subtasks differ"


def test_new_names_are_given_once_and_names_that_are_gone_stay_known_until_they_end() -> None:
    source = Topics("a")
    discovery = SplitDiscovery(source, 0, 1, 5.0)
    assert discovery.due < 0.0
    assert found(discovery, 10.0) == {0: "a"}
    assert discovery.due == 15.0
    source.names = ["b"]
    assert found(discovery, 15.0) == {1: "b"}
    source.names = ["b", "a"]
    assert found(discovery, 20.0) == {}
    changes = [SplitPosition(number, 0, cursor=Cursor(name)) for number, name in enumerate("ab")]
    assert discovery.take_changes() == changes, "a next attempt has them also if no answer gives them again"


def test_a_split_that_has_ended_is_forgotten_once_an_answer_lacks_it() -> None:
    source = Topics("a")
    discovery = SplitDiscovery(source, 0, 1, 5.0)
    for number in range(NAMED_SPLITS_MAX + 2):
        source.names = [str(number)]
        (split,) = discovery.look(0.0)
        assert split.take() == [str(number)]
        discovery.end(split)
        assert found(discovery, 0.0) == {}, "it is given still, and not read again"
    ended = SplitPosition(0, 1, 0, True, Cursor("0", b"1", 1), forgotten=True)
    assert discovery.take_changes()[:2] == [SplitPosition(0, 0, cursor=Cursor("0")), ended]


def test_a_next_attempt_goes_on_in_all_that_had_not_ended() -> None:
    resumed = [
        SplitPosition(0, 7, 0, True, Cursor("done", b"7", 7)),
        SplitPosition(4, 3, 2, False, Cursor("gone", b"3", 3)),
    ]
    source = Topics("new", "done")
    discovery = SplitDiscovery(source, 0, 1, 5.0, resumed)
    (gone, new) = discovery.look(0.0)
    assert (gone.number, gone.position, gone.cursor) == (4, 5, Cursor("gone", b"3", 3))
    assert (new.number, new.position, new.cursor) == (5, 0, Cursor("new"))
    source.names = []
    assert discovery.look(0.0) == []
    assert discovery.take_changes()[1:] == [resumed[0]._replace(forgotten=True)]


def test_wrong_names_and_too_many_are_refused() -> None:
    with pytest.raises(WrongResult, match="gives 'a' twice"):
        SplitDiscovery(Topics("a", "a"), 0, 1, 5.0).look(0.0)
    with pytest.raises(WrongResult, match="8193 splits with names"):
        SplitDiscovery(Topics(*map(str, range(NAMED_SPLITS_MAX + 1))), 0, 1, 5.0).look(0.0)


def test_what_a_savepoint_has_of_all_subtasks_is_read_by_one_of_any_number_each() -> None:
    names = [f"orders-{number}" for number in range(12)]
    saved = [SplitPosition(number, 1, cursor=Cursor(name, b"1", 1)) for number, name in enumerate(names)]
    for parallelism in (1, 2, 5):
        source = Topics(*names)
        subtasks = [SplitDiscovery(source, index, parallelism, 5.0, saved) for index in range(parallelism)]
        parts = [found(each, 0.0) for each in subtasks]
        assert sorted(name for part in parts for name in part.values()) == sorted(names)
        source.names = [*names, *(f"new-{number}" for number in range(12))]
        new = [number for each in subtasks for number in found(each, 5.0)]
        assert len(new) == 12 == len({*new} - {*range(12)}), "no number is that of another split"

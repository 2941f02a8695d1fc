"""What was touched behind which mark."""

from __future__ import annotations

import pytest

from minishuffle.operators import change_log
from minishuffle.operators.change_log import ChangeLog


@pytest.mark.parametrize("recent", [1, 4096])
def test_keys_have_the_last_mark_before_they_were_touched(
    monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(change_log, "_RECENT_ROWS_MIN", recent)
    log = ChangeLog()
    first = log.mark()
    assert log.touched_since(first) == []
    log.touch(None, ["b", "a", "b"])
    second = log.mark()
    log.touch(None, ["c"])
    log.touch(7, ["a"])
    assert log.touched_since(first) == [(None, "b"), (None, "a"), (None, "c"), (7, "a")]
    assert log.touched_since(second) == [(None, "c"), (7, "a")]
    log.leave(7)
    assert (log.touched_since(second), log.gone_since(second)) == ([(None, "c")], [7])
    log.touch(7, ["z"])
    assert (log.touched_since(second), log.gone_since(second)) == ([(None, "c"), (7, "z")], [7])


def test_what_is_before_a_mark_is_forgotten() -> None:
    log = ChangeLog()
    log.mark()
    log.touch(1, ["a", "b"])
    log.touch(2, ["a"])
    log.leave(3)
    mark = log.mark()
    log.touch(1, ["b"])
    log.forget_before(mark)
    assert log.touched_since(0) == [(1, "b")]
    assert log.gone_since(0) == []


def test_many_records_of_few_keys_take_no_room() -> None:
    log = ChangeLog()
    mark = log.mark()
    for _ in range(100):
        log.touch(None, ["a", "b"] * 100)
    assert log._rows < 2 * change_log._RECENT_ROWS_MIN
    assert log.touched_since(mark) == [(None, "a"), (None, "b")]

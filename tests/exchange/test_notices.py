"""What stands in a channel's queue and carries no data."""

from __future__ import annotations

from collections.abc import Callable

from minishuffle.exchange.notices import QueuedWatermark
from support.interleave import interleaved


def test_a_watermark_is_replaced_whole_or_not_at_all_while_the_task_takes_it() -> None:
    taken: list[tuple[int, bool]] = []
    replaced: list[bool] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        mark = QueuedWatermark(1, False)
        return lambda: taken.append(mark.take()), lambda: replaced.append(mark.overtake(2, True))

    for _ in interleaved(make):
        assert taken[-1] == (2, True) or (taken[-1] == (1, False) and not replaced[-1])
    assert set(taken) == {(1, False), (2, True)} and set(replaced) == {False, True}

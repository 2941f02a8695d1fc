"""Records that come behind the watermark that closed what they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from minishuffle.dataflow.operators.base import Emit, Side, TaskContext
from minishuffle.dataflow.operators.chained import preview
from minishuffle.dataflow.operators.convert import rows_of
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch

__all__ = ["Late", "LatePolicy"]

LatePolicy: TypeAlias = Literal["drop", "side", "fail"]
"""They are dropped, go to a side output, or end the task with an error."""


@dataclass(frozen=True, slots=True)
class Late:
    """What becomes of late records; they are counted in any case. ``tag`` is that of the side output."""

    policy: LatePolicy = "drop"
    tag: str = ""

    def sides(self, name: str) -> Mapping[str, str]:
        """The tag under the name, if they go to a side output."""
        return {name: self.tag} if self.policy == "side" else {}

    def take(self, batch: Batch, context: TaskContext, emit: Emit) -> None:
        """Some records (at least one) are late.

        Raises:
            UsageError: there are to be none.
        """
        context.counters.note_late(len(batch), dropped=self.policy == "drop")
        if self.policy == "fail":
            (first,) = rows_of(batch.slice(0, 1))
            raise UsageError(
                f"a record came too late, behind the watermark: {preview(first)}: raise out_of_order= of "
                "event_time(), or write late='drop' or late='side'"
            )
        if self.policy == "side":
            emit(Side(self.tag, Batch(batch.payload, None, batch.times)))

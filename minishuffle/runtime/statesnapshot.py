"""What one subtask would have to know to go on elsewhere, as of one moment between two elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minishuffle.exchange.rownumbers import ChannelRows
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME
from minishuffle.operators.state_parts import StatePart, divided
from minishuffle.wire.packed import SplitPosition

__all__ = ["TaskStateSnapshot"]


@dataclass(frozen=True, slots=True)
class TaskStateSnapshot:
    """The state of one subtask. (Flink: ``TaskStateSnapshot``.)

    Its positions are given to the source as those of an earlier attempt are; the rest is given to the chain.
    """

    parts: Mapping[str, Iterable[StatePart]] = field(default_factory=dict)
    """What its operators hold, by their ids; those that hold nothing are left out. Some are made when
    they are asked for."""
    stored: Mapping[str, Iterable[StatePart]] = field(default_factory=dict, kw_only=True)
    """The same of what lies on disk, in a snapshot of the whole job alone: whoever writes it reads it."""
    positions: Sequence[SplitPosition] = ()
    """Where its source is in each split; nothing is leased."""
    watermark: int = BEGINNING_OF_TIME
    """The last one that it has passed on."""
    taken: Mapping[int, Sequence[ChannelRows]] = field(default_factory=dict)
    """Rows of its inputs that it has dealt with, by edge."""
    written: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The number of the next row for each consumer of an edge, in their order; by edge."""
    dealt: Mapping[int, int] = field(default_factory=dict)
    """Rows that it has dealt out in turn, by edge."""
    collected: int = 0
    """Rows that it has collected for the client of the job."""
    at: float = 0.0
    """When it was taken, by the cluster's clock."""
    left_out: Sequence[int] = ()
    """Poison rows that it has left out, by their place in the search for them."""
    pending: bytes = b""
    """What its sink reports once the snapshot is safe."""
    again: int = 0
    """Rows of it and its earlier attempts that had come twice, as they are counted."""

    @classmethod
    def share(cls, snapshots: Iterable[TaskStateSnapshot], index: int, parallelism: int) -> TaskStateSnapshot:
        """What subtask ``index`` of ``parallelism`` goes on with of all snapshots of a vertex: without the
        positions, which are dealt out by their source, and without rows of channels, which begin anew. Event
        time is where it was in the subtask that was least far; one that has ended holds nobody back."""
        parts: dict[str, list[StatePart]] = {}
        watermarks = []
        for each in snapshots:
            watermarks.append(each.watermark)
            for operator, held in each.parts.items():
                parts.setdefault(operator, []).extend(divided(held, index, parallelism))
        watermark = min((time for time in watermarks if time < END_OF_TIME), default=BEGINNING_OF_TIME)
        return cls({id: held for id, held in parts.items() if held}, watermark=watermark)

"""The rows of a batch in order of their slots, and values that run along them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Groups"]

Vector: TypeAlias = "np.ndarray[Any, Any]"


class Groups:
    """The rows of one batch put in order of their slots, each slot's rows in their given order.

    ``order`` are row numbers; ``position`` counts within a slot from 0; ``starts`` and ``ends`` are
    places in ``order`` of each slot's first and last row, ``slots`` the slot of each.
    """

    __slots__ = ("ends", "order", "position", "slots", "starts")

    def __init__(self, slots: Vector) -> None:
        self.order = _stable_order(slots)
        in_order = slots[self.order]
        first = np.empty(len(slots), dtype=bool)
        first[:1] = True
        np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
        self.starts = np.flatnonzero(first)
        self.ends = np.append(self.starts, len(slots))[1:] - 1
        self.slots = in_order[self.starts]
        self.position = np.arange(len(slots)) - np.repeat(self.starts, self.ends - self.starts + 1)

    def running(self, operation: np.ufunc, values: Vector, state: Vector) -> Vector:
        """The state of each row's slot after that row, in the rows' given order; updates ``state``.

        A scan that doubles its reach at each step and never crosses from one slot to another, so
        that an infinity or a huge value of one key cannot touch another's.
        """
        scan = values[self.order]
        scan[self.starts] = operation(state[self.slots], scan[self.starts])
        reach, within = 1, np.flatnonzero(self.position)
        while len(within):
            scan[within] = operation(scan[within - reach], scan[within])
            reach *= 2
            within = within[self.position[within] >= reach]
        state[self.slots] = scan[self.ends]
        result = np.empty_like(scan)
        result[self.order] = scan
        return result


def _stable_order(slots: Vector) -> Vector:
    """``argsort`` that keeps equal slots in order. numpy sorts 16-bit integers by radix, several times
    faster than wider ones by comparison; so the low and then the high half."""
    low = slots.astype(np.uint16)
    order = np.argsort(low, kind="stable")
    highest = int(slots.max(initial=0))
    if highest < 1 << 16:
        return order
    if highest >= 1 << 32:
        return np.argsort(slots, kind="stable")
    high = (slots >> 16).astype(np.uint8 if highest < 1 << 24 else np.uint16)
    return order[np.argsort(high[order], kind="stable")]

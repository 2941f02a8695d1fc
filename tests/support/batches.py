"""Batches as operators of a chain take and give them, from and to what tests say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Mark, Operator, Side, TaskContext

__all__ = ["Calls", "as_batch", "as_item", "collecting", "run_operator", "shown"]


def as_batch(given: Any) -> Batch:
    """A list of rows or a record batch as a batch, or a batch as it is."""
    return given if isinstance(given, Batch) else Batch(given)


def as_item(given: Any) -> Batch | Mark:
    """The same, and marks as they are."""
    return given if isinstance(given, Mark) else as_batch(given)


def shown(item: Any) -> Any:
    """The payload of a batch, (keys, payload) of rows with keys, (tag, payload) of a side output; other marks
    as they are."""
    if isinstance(item, Batch):
        keyed = item.keys is not None and isinstance(item.payload, list)
        return (item.keys, item.payload) if keyed else item.payload
    return (item.tag, item.batch.payload) if isinstance(item, Side) else item


def collecting(out: list[Any]) -> Callable[[Any], None]:
    """Takes what an operator emits, and appends what is :func:`shown` of it."""
    return lambda item: out.append(shown(item))


def run_operator(operator: Operator, *batches: Any, context: TaskContext | None = None) -> list[Any]:
    """What is :func:`shown` of all that an operator emits for these batches, see :func:`as_batch`, and at the
    end."""
    out: list[Any] = []
    operator.open(context or TaskContext("job", "task", 0, 1, 1))
    for batch in batches:
        operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    operator.close()
    return out


class Calls:
    """A function that remembers its arguments."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        self.seen: list[Any] = []

    def __call__(self, row: Any) -> Any:
        self.seen.append(row)
        return self.fn(row)

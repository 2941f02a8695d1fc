"""All records of a source, as its splits give them."""

from __future__ import annotations

from typing import Any

from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Source

__all__ = ["read_all", "records_of"]


def records_of(batches: Any) -> list[Any]:
    """The rows of batches, none of which is empty or too long."""
    out: list[Any] = []
    for batch in batches:
        assert 0 < len(batch) <= BATCH_ROWS_MAX
        out.extend(batch if isinstance(batch, list) else batch.to_pylist())
    return out


def read_all(source: Source) -> list[Any]:
    """Those of all splits, one after the other."""
    return [record for split in source.splits() for record in records_of(source.read(split, 0))]

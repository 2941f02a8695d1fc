"""What :meth:`Stream.generate` makes without a function: records that are their own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["number_batch", "number_rows"]


def number_rows(start: int, count: int) -> list[int]:
    """``count`` integers from ``start`` on."""
    return list(range(start, start + count))


def number_batch(start: int, count: int) -> pa.RecordBatch:
    """The same as the int64 column ``number``."""
    import numpy as np
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"number": np.arange(start, start + count, dtype=np.int64)})

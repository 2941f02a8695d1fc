"""Strings of a whole Arrow column, eight bytes at a time."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

__all__ = ["Texts"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_S3, _S64 = np.uint64(3), np.uint64(64)
_LOW_BYTES: Final = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


class Texts:
    """The bytes of a string or binary column (not a view, not of fixed size), nulls' as they are stored.

    ``lengths`` (int64) are in bytes.
    """

    def __init__(self, array: pa.Array) -> None:
        offsets, data = _buffers(array)
        self._begin = int(offsets[0])
        self._used = int(offsets[-1]) - self._begin
        self._data = data[self._begin : self._begin + self._used]
        self._offsets = offsets
        self._padded: Vector | None = None
        self.lengths: Vector = np.diff(offsets).astype(np.int64, copy=False)

    def matrix(self) -> Vector | None:
        """The bytes (rows x length) if all have one length, else None."""
        rows = len(self.lengths)
        length, left = divmod(self._used, rows) if rows else (0, 1)
        if left or not (self.lengths == length).all():
            return None
        return self._data.reshape(rows, length)

    def text(self, row: int) -> bytes:
        start = int(self._offsets[row]) - self._begin
        return bytes(self._data[start : start + int(self.lengths[row])].data)

    def words(self, at: int, rows: Vector | None = None) -> Vector:
        """The (little-endian, uint64) word at byte ``at`` of each text, or of those in ``rows``; zeros
        stand for what lies beyond its end."""
        ends, lengths = self._offsets[1:], self.lengths
        if rows is not None:
            ends, lengths = ends[rows], lengths[rows]
        starts = ends - lengths
        starts += at - self._begin
        words = self._load(np.minimum(starts, self._used, out=starts))
        words &= _LOW_BYTES.take(lengths - at, mode="clip")
        return words

    def _load(self, at: Vector) -> Vector:
        """The words that begin at any byte, from the aligned ones that they straddle."""
        if self._padded is None:
            # A copy that ends in zeros, so that whole words can be read at any offset.
            self._padded = np.empty((self._used >> 3) + 2, dtype=np.uint64)
            self._padded[self._used >> 3 :] = 0
            self._padded.view(np.uint8)[: self._used] = self._data
        index = at >> 3
        low = self._padded.take(index)
        index += 1
        high = self._padded.take(index)
        shift = (at & 7).view(np.uint64)
        shift <<= _S3
        low >>= shift
        np.subtract(_S64, shift, out=shift)
        high <<= shift  # numpy shifts by 64 to 0
        low |= high
        return low


def _buffers(array: pa.Array) -> tuple[Vector, Vector]:
    """Offsets (n + 1) and the bytes they point into, without a copy."""
    kind = array.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(len(array) + 1, np.int64), np.zeros(0, np.uint8)
    dtype = np.int64 if large else np.int32
    skipped = array.offset * np.dtype(dtype).itemsize
    numbers = np.frombuffer(offsets, dtype, count=len(array) + 1, offset=skipped)
    return numbers, np.frombuffer(b"" if data is None else data, np.uint8)

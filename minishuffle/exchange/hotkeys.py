"""The keys that many rows of an exchange have, from a sample of them.

The counts are those of *space-saving* (Metwally, Agrawal and El Abbadi, 2005): as many counters as
:data:`COUNTERS`; a key without one takes over the least, and its count, which is noted as its error. So a key
that more than ``1 / COUNTERS`` of the sampled rows have always has a counter, and count minus error is never
too much. The counts are halved from time to time, so that old rows weigh less.

One row in :data:`ROWS_PER_SAMPLE` is looked at, and at most :data:`SAMPLES_MAX` of a batch; more at first, so
that something is known soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from minishuffle.exchange.rows import preview

__all__ = ["HotKeys"]

COUNTERS: Final = 32
ROWS_PER_SAMPLE: Final = 1_024
SAMPLES_MAX: Final = 2
FIRST_SAMPLES: Final = 200
ROWS_PER_FIRST_SAMPLE: Final = 16
FIRST_SAMPLES_MAX: Final = 64
HALVED_AT: Final = 1_024
"""Samples."""
SAMPLES_MIN: Final = 100
"""Fewer say nothing."""
SHARE_MIN: Final = 0.1
KEYS_SHOWN: Final = 3
KEY_CHARS_MAX: Final = 40


class HotKeys:
    """The keys of one producer's rows over one edge. The task writes, any thread reads."""

    def __init__(self) -> None:
        self._rows = 0
        """Rows since the last sample."""
        self._taken = 0
        self._samples = 0
        self._counts: dict[str, tuple[int, int, int]] = {}
        """By key: count, error, consumer."""

    def look(self, rows: int, key: Callable[[int], Any], positions: Sequence[int]) -> None:
        """Count some keys of a batch of so many rows.

        Args:
            key: gives the key of a row, by its number.
            positions: the consumer of each row.
        """
        self._rows += rows
        first = self._samples < FIRST_SAMPLES
        per_sample = ROWS_PER_FIRST_SAMPLE if first else ROWS_PER_SAMPLE
        if self._rows < per_sample:
            return
        count = min(FIRST_SAMPLES_MAX if first else SAMPLES_MAX, self._rows // per_sample)
        self._rows = 0
        for _ in range(count):
            self._taken += 7919  # a prime: no period of the rows is followed
            row = self._taken % rows
            self._add(preview(key(row)), int(positions[row]))

    def _add(self, key: str, consumer: int) -> None:
        counts = self._counts
        known = counts.get(key)
        if known is not None:
            counts[key] = (known[0] + 1, known[1], consumer)
        elif len(counts) < COUNTERS:
            counts[key] = (1, 0, consumer)
        else:
            least = min(counts, key=counts.__getitem__)
            error = counts.pop(least)[0]
            counts[key] = (error + 1, error, consumer)
        self._samples += 1
        if self._samples >= HALVED_AT:
            self._counts = {
                name: (n // 2, error // 2, to) for name, (n, error, to) in counts.items() if n > 1
            }
            self._samples //= 2

    def shares(self) -> dict[tuple[int, str], float]:
        """By consumer and key, the share of all rows that it has at least, the greatest first; those that
        have many."""
        samples, counts = self._samples, dict(self._counts)
        if samples < SAMPLES_MIN:
            return {}
        found = {
            (consumer, key): (count - error) / samples for key, (count, error, consumer) in counts.items()
        }
        hot = sorted(
            ((share, name) for name, share in found.items() if share >= SHARE_MIN), key=lambda each: -each[0]
        )
        return {(to, key[:KEY_CHARS_MAX]): share for share, (to, key) in hot[:KEYS_SHOWN]}

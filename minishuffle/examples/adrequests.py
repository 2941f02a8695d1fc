"""Requests of ads that follow from their numbers alone: what was shown, clicked and bought, and when.

The streaming join (``examples/ads.py``) and the pipeline ``ads`` are made from them. A click comes up to
1.25 times ``within`` after its impression, a purchase as long after its click, so that some come too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["FEATURES", "LATEST", "MOMENT", "Flags", "Ids", "AdRequests", "Values", "sigmoid", "timestamps"]

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, np.dtype[np.float64]]

START_MICROS: Final = 1_767_225_600_000_000
"""Event time of request 0: the beginning of 2026 in UTC."""
MOMENT: Final = pa.timestamp("us", tz="UTC")
FEATURES: Final = 4
TASTE: Final = np.array([2.0, -1.5, 1.0, 0.5])
"""Decides, with the features, how likely a click is."""
BIAS: Final = -2.0
LATEST: Final = 1.25
"""The longest time from impression to click, and from there to a purchase, in units of ``within``."""
BOUGHT_SHARE: Final = 0.1
"""Clicks that lead to a purchase, of all."""
SALTS: Final = 16
"""Numbers that each seed has for itself."""


def sigmoid(values: Values) -> Values:
    return 1.0 / (1.0 + np.exp(-values))


def timestamps(micros: Ids) -> pa.Array:
    return pa.array(micros).cast(MOMENT)


@dataclass(frozen=True)
class AdRequests:
    """``rate`` requests in each second of event time; whoever joins them allows ``within`` seconds."""

    rate: int
    within: float
    seed: int = 0

    @property
    def within_micros(self) -> int:
        return round(self.within * 1e6)

    def uniform(self, ids: Ids, salt: int) -> Values:
        """A number in [0, 1) for each request; the same one for the same salt. (SplitMix64.)"""
        salted = (0x9E3779B97F4A7C15 * (SALTS * self.seed + salt + 1)) % 2**64
        mixed = ids.astype(np.uint64) + np.uint64(salted)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53

    def features(self, ids: Ids) -> Values:
        """One row of FEATURES numbers in [-1, 1) for each request."""
        return np.column_stack([2.0 * self.uniform(ids, salt) - 1.0 for salt in range(FEATURES)])

    def times(self, ids: Ids) -> Ids:
        """Microseconds since 1970 at which the ads were shown."""
        return START_MICROS + ids * 1_000_000 // self.rate

    def clicked(self, ids: Ids) -> Flags:
        chance = sigmoid(self.features(ids) @ TASTE + BIAS)
        return self.uniform(ids, FEATURES) < chance

    def click_delays(self, ids: Ids) -> Ids:
        """Microseconds from impression to click, of those without one too."""
        return self._delays(ids, FEATURES + 1)

    def bought(self, ids: Ids) -> Flags:
        """Whether something was bought after the click, if there was one."""
        return self.uniform(ids, FEATURES + 2) < BOUGHT_SHARE

    def purchase_delays(self, ids: Ids) -> Ids:
        """Microseconds from click to purchase, of those without one too."""
        return self._delays(ids, FEATURES + 3)

    def campaigns(self, ids: Ids, count: int) -> Ids:
        """To which of ``count`` campaigns the ad belongs; the square makes the first ones larger."""
        return (self.uniform(ids, FEATURES + 4) ** 2 * count).astype(np.int64)

    def _delays(self, ids: Ids, salt: int) -> Ids:
        return (self.uniform(ids, salt) * LATEST * self.within_micros).astype(np.int64)

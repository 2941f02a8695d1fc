"""The jobs that come with minishuffle, by the name that ``minishuffle submit`` takes."""

from __future__ import annotations

from typing import Final

__all__ = ["BUILT_IN"]

BUILT_IN: Final[dict[str, str]] = {
    "ads": "minishuffle.examples.ads:ads",
    "backpressure": "minishuffle.examples.backpressure:backpressure",
    "keyby": "minishuffle.examples.keyby:keyby",
    "wordcount": "minishuffle.examples.wordcount:wordcount",
}
"""Name -> ``module:attribute``."""

"""Pipelines on Spark: it feeds a running job, takes the result back, and its batch engine checks it."""

from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline

__all__ = ["BUILT_IN", "DataDirectory", "Input", "Pipeline"]

BUILT_IN = {
    "ads": "minishuffle.pipelines.advertising:advertising",
    "flights": "minishuffle.pipelines.flights:flights",
}
"""Name on the command line -> ``module:attribute``."""

"""Pipelines on Spark: it feeds a running job, takes the result back, and its batch engine checks it."""

from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline

__all__ = ["BUILT_IN", "DataDirectory", "Input", "Pipeline"]

BUILT_IN = {
    "ads": "minishuffle.pipelines.advertising:Advertising",
    "flights": "minishuffle.pipelines.flights:Flights",
}
"""Name on the command line -> ``module:attribute``."""

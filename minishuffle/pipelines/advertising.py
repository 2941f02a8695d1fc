"""The pipeline ``ads``: impressions with their clicks and purchases, by campaign and quarter of an hour."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from minishuffle.api.stream import Table
from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.examples.adrequests import AdRequests

__all__ = ["Advertising"]

RATE: Final = 200
"""Impressions per second of event time."""
WITHIN: Final = timedelta(minutes=15)
"""Between impression and click, and between the later of both and a purchase."""
CAMPAIGNS: Final = 100
LOWEST_BID: Final = 1_000
BIDS: Final = 9_000
"""How many there are from the lowest on, in millionths of a unit of money."""
CENTS: Final = 20_000
"""The price of the dearest purchase."""
CHUNK_ROWS: Final = 250_000
KINDS: Final = ("impressions", "clicks", "purchases")
NUMBERS: Final = ("shown", "clicked", "bought", "cost_micros", "cents")
BEST: Final = 10


class Advertising(Pipeline):
    """So many generated impressions joined with their clicks and purchases, in ``splits`` parts each."""

    name = "ads"
    report_title = "the ten campaigns and quarters of an hour with the greatest revenue"
    audit_key = ("campaign", "window_start")
    audit_by = "campaign"

    def __init__(
        self,
        impressions: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2_000_000,
        splits: Annotated[int, Field(ge=1, le=64)] = 2,
        seed: Annotated[int, Field(ge=0, le=1_000_000)] = 1,
    ) -> None:
        self.impressions = impressions
        self.splits = splits
        self.seed = seed

    def inputs(self, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
        """All three as they happened; the files are generated where they are not there yet."""
        return {
            name: Input(frame, ("at", "request"), self.splits)
            for name, frame in self._frames(spark, data).items()
        }

    def job(self, tables: Mapping[str, Table]) -> Table:
        """Join by request, and count by campaign and quarter of an hour of the last thing that happened."""
        shown, clicked, bought = (tables[name].event_time("at").key_by("request") for name in KINDS)
        followed = shown.join(clicked, how="left", within=WITHIN, suffix="_click")
        pairs = followed.key_by("request").join(bought, how="left", within=WITHIN, suffix="_purchase")
        windows = pairs.key_by("campaign").window(WITHIN)
        counted = windows.aggregate(
            shown=("request", "count"),
            clicked=("at_click", "count"),
            bought=("at_purchase", "count"),
            cost_micros=("bid", "sum"),
            cents=("price", "sum"),
        )
        return counted.select("campaign", "window_start", *NUMBERS)

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame:
        """By Spark's batch engine, from the files."""
        from pyspark.sql import functions as F

        shown, clicked, bought = self._frames(spark, data).values()
        clicked = clicked.withColumnRenamed("at", "at_click")
        bought = bought.withColumnRenamed("at", "at_purchase")
        followed = shown.join(
            clicked,
            (shown["request"] == clicked["request"]) & (clicked["at_click"] - shown["at"] <= F.lit(WITHIN)),
            "left",
        ).select(shown["*"], "at_click", F.greatest("at", "at_click").alias("time"))
        pairs = followed.join(
            bought,
            (followed["request"] == bought["request"])
            & (bought["at_purchase"] - followed["time"] <= F.lit(WITHIN)),
            "left",
        ).select(followed["*"], "at_purchase", "price", F.greatest("time", "at_purchase").alias("last"))
        minutes = int(WITHIN.total_seconds()) // 60
        windows = pairs.groupBy("campaign", F.window("last", f"{minutes} minutes").alias("window")).agg(
            F.count("*").alias("shown"),
            F.count("at_click").alias("clicked"),
            F.count("at_purchase").alias("bought"),
            F.sum("bid").alias("cost_micros"),
            F.sum("price").alias("cents"),
        )
        return windows.select("campaign", F.col("window.start").alias("window_start"), *NUMBERS)

    def report(self, result: DataFrame) -> DataFrame:
        """Where the most was earned."""
        best = result.orderBy(result["cents"].desc_nulls_last(), "window_start", "campaign")
        return best.limit(BEST)

    def stats(self, result: DataFrame) -> dict[str, int]:
        """What all windows have together."""
        row = result.agg(dict.fromkeys(("shown", "clicked", "bought", "cents"), "sum")).first()
        sums = {} if row is None else row.asDict()
        return {name: int(sums.get(f"sum({name})") or 0) for name in ("shown", "clicked", "bought", "cents")}

    def _frames(self, spark: SparkSession, data: DataDirectory) -> dict[str, DataFrame]:
        files = generated_files(data.path, self.impressions, self.seed)
        return {name: spark.read.parquet(data.readable(spark, file)) for name, file in files.items()}


# --- data -----------------------------------------------------------------------------------------


def generated_files(folder: Path, impressions: int, seed: int) -> dict[str, Path]:
    """A Parquet file of each kind; those that are there already are taken as they are."""
    import pyarrow.parquet as pq

    from minishuffle.examples.adrequests import AdRequests

    files = {name: folder / f"{name}-{impressions}-{seed}.parquet" for name in KINDS}
    if all(file.is_file() for file in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    requests = AdRequests(RATE, WITHIN.total_seconds(), seed)
    parts = {name: file.with_suffix(".part") for name, file in files.items()}
    with ExitStack() as open_files:
        writers: dict[str, pq.ParquetWriter] = {}
        for start in range(0, impressions, CHUNK_ROWS):
            chunk = generated_tables(requests, start, min(start + CHUNK_ROWS, impressions))
            for name, table in chunk.items():
                if name not in writers:
                    writers[name] = open_files.enter_context(pq.ParquetWriter(parts[name], table.schema))
                writers[name].write_table(table)
    for name, part in parts.items():
        part.rename(files[name])  # What is cut short is never taken for the data.
    return files


def generated_tables(requests: AdRequests, start: int, stop: int) -> dict[str, pa.Table]:
    """What became of the requests from ``start`` to ``stop`` - 1."""
    import numpy as np
    import pyarrow as pa

    from minishuffle.examples.adrequests import FEATURES, timestamps

    ids = np.arange(start, stop)
    shown = requests.times(ids)
    campaigns = requests.campaigns(ids, CAMPAIGNS)
    bids = LOWEST_BID + (requests.uniform(ids, FEATURES + 5) * BIDS).astype(np.int64)
    clicks = ids[requests.clicked(ids)]
    clicked = requests.times(clicks) + requests.click_delays(clicks)
    is_bought = requests.bought(clicks)
    purchases = clicks[is_bought]
    bought = clicked[is_bought] + requests.purchase_delays(purchases)
    prices = 1 + (requests.uniform(purchases, FEATURES + 6) * CENTS).astype(np.int64)
    return {
        "impressions": pa.table(
            {"request": ids, "at": timestamps(shown), "campaign": campaigns, "bid": bids}
        ),
        "clicks": pa.table({"request": clicks, "at": timestamps(clicked)}),
        "purchases": pa.table({"request": purchases, "at": timestamps(bought), "price": prices}),
    }

"""The streaming join: impressions of ads with the clicks that follow, as examples for online training.

Two generated streams with the same request ids (``examples/adrequests.py``). Everything about a request
follows from its id, so :func:`answer` says what the join must give.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from minishuffle.api.columns import col
from minishuffle.api.stream import Table
from minishuffle.examples.adrequests import (
    FEATURES,
    LATEST,
    MOMENT,
    AdRequests,
    Flags,
    Values,
    sigmoid,
    timestamps,
)
from minishuffle.operators.base import TaskContext

__all__ = ["PairsAudit", "Training", "ads", "answer", "audit_pairs", "clicked_in_time", "pairs"]

LEARNING_RATE: Final = 0.5
STEP_ROWS: Final = 256
RECENT: Final = 50_000
"""Examples that each step draws from: clicks leave the join before impressions without one."""


def answer(records: int, within: float = 2.0) -> dict[str, int]:
    """What the join of requests 0 to ``records`` - 1 gives: ``examples``, and how many of them ``clicks``."""
    return {"examples": records, "clicks": int(clicked_in_time(records, within).sum())}


def clicked_in_time(records: int, within: float) -> Flags:
    """Whether the join gives a click to each of requests 0 to ``records`` - 1."""
    ids, requests = np.arange(records), AdRequests(1, within)
    return requests.clicked(ids) & (requests.click_delays(ids) <= requests.within_micros)


class PairsAudit(NamedTuple):
    """How the rows of files differ from what the join gives: rows that are missing, those that are there more
    than once, and those that it does not give."""

    lost: int
    again: int
    wrong: int


def audit_pairs(files: Iterable[str | Path], records: int, within: float) -> PairsAudit:
    """Compare what :func:`pairs` of requests 0 to ``records`` - 1 has written into Parquet files, row by row,
    with what follows from their numbers."""
    found = np.zeros((2, records), np.int64)
    for file in files:
        rows = pq.read_table(file, columns=["request", "at_right"])
        has_click = np.asarray(pc.is_valid(rows["at_right"])).astype(np.int64)
        np.add.at(found, (has_click, np.asarray(rows["request"])), 1)
    right = found[clicked_in_time(records, within).astype(np.int64), np.arange(records)]
    there = int((right > 0).sum())
    return PairsAudit(records - there, int(right.sum()) - there, int(found.sum() - right.sum()))


def impressions(rate: int, records: int | None, sources: int | None = None) -> Table:
    """Columns ``request``, ``at`` (the event time) and ``x0`` … : the ads that were shown, ``rate`` per
    second, made by so many subtasks (None: the job's parallelism)."""

    requests = AdRequests(rate, 0.0)

    def shown(start: int, count: int) -> pa.RecordBatch:
        ids = np.arange(start, start + count)
        features = requests.features(ids)
        columns = {f"x{number}": features[:, number] for number in range(FEATURES)}
        return pa.RecordBatch.from_pydict({"request": ids, "at": timestamps(requests.times(ids)), **columns})

    features = {f"x{number}": pa.float64() for number in range(FEATURES)}
    schema = {"request": pa.int64(), "at": MOMENT, **features}
    generated = Table.generate(shown, rate=rate, records=records, schema=schema).name("impressions")
    return _by(sources, _by(sources, generated).event_time("at"))


def clicks(rate: int, records: int | None, within: float, sources: int | None = None) -> Table:
    """Columns ``request`` and ``at`` (the event time): the clicks on those impressions, out of order by their
    delays."""
    requests = AdRequests(rate, within)

    def followed(start: int, count: int) -> pa.RecordBatch:
        ids = np.arange(start, start + count)
        times = requests.times(ids) + requests.click_delays(ids)
        return pa.RecordBatch.from_pydict(
            {"request": ids, "at": timestamps(times), "clicked": requests.clicked(ids)}
        )

    schema = {"request": pa.int64(), "at": MOMENT, "clicked": pa.bool_()}
    generated = Table.generate(followed, rate=rate, records=records, schema=schema).name("clicks")
    clicked = _by(sources, generated).filter(col("clicked")).drop("clicked")
    late = timedelta(microseconds=LATEST * requests.within_micros)
    return _by(sources, clicked.event_time("at", out_of_order=late))


def pairs(rate: int, records: int | None, within: float, sources: int | None = None) -> Table:
    """Each impression once, with ``at_right``, the time of its click, null without one ``within`` seconds."""
    shown = impressions(rate, records, sources).key_by("request")
    followed = clicks(rate, records, within, sources).key_by("request")
    return shown.join(followed, how="left", within=timedelta(seconds=within))


def _by(subtasks: int | None, table: Table) -> Table:
    return table if subtasks is None else table.parallel(subtasks)


class Training:
    """A sink that learns online: logistic regression by stochastic gradient descent.

    Its result is a map of ``examples``, ``clicks`` and ``weights`` (FEATURES of them and the bias).
    """

    def open(self, context: TaskContext) -> None:
        self._random = np.random.default_rng(context.index)
        self._weights = np.zeros(FEATURES + 1)
        self._recent = np.empty((0, FEATURES + 2))
        """Rows of features, a one for the bias, and the label."""
        self._examples = self._clicks = 0

    def write(self, batch: Any) -> None:
        features = [np.asarray(batch[f"x{number}"], np.float64) for number in range(FEATURES)]
        labels = np.asarray(pc.is_valid(batch["at_right"]), np.float64)
        new = np.column_stack([*features, np.ones(len(batch)), labels])
        self._recent = np.concatenate([self._recent, new])[-RECENT:]
        drawn = self._random.integers(len(self._recent), size=len(new))
        for begin in range(0, len(drawn), STEP_ROWS):
            self._learn(self._recent[drawn[begin : begin + STEP_ROWS]])
        self._examples += len(new)
        self._clicks += int(labels.sum())

    def _learn(self, rows: Values) -> None:
        inputs, labels = rows[:, :-1], rows[:, -1]
        self._weights += LEARNING_RATE * inputs.T @ (labels - sigmoid(inputs @ self._weights)) / len(rows)

    def close(self) -> dict[str, Any]:
        weights = [float(weight) for weight in self._weights]
        return {"examples": self._examples, "clicks": self._clicks, "weights": weights}


def ads(
    rate: Annotated[int, Field(ge=1)] = 20_000,
    records: Annotated[int, Field(ge=1)] | None = None,
    within: Annotated[float, Field(gt=0, le=3600)] = 2.0,
    sources: Annotated[int, Field(ge=1)] | None = None,
) -> Table:
    """Join ``rate`` impressions per second with their clicks, and train on the pairs, until cancelled.

    ``records`` ends the job after that many impressions. ``within`` is how many seconds an impression waits
    for its click. ``sources`` is the parallelism of each of the two streams (default: the job's).
    """
    return pairs(rate, records, within, sources).to(Training()).name("training")

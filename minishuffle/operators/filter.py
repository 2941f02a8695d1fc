"""The records for which a condition holds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import OnError, asides_of
from minishuffle.operators.each_row import EachRow, time_of

if TYPE_CHECKING:
    import pyarrow.compute as pc

__all__ = ["Filter"]


class Filter(EachRow):
    """Emits the records for which a condition holds.

    Args:
        condition: a function of a row, or an expression of columns, whose null counts as false.

    Raises:
        WrongResult: the function gave an Aside, a generator or a coroutine, which would count as true.
    """

    name = "filter"

    def __init__(self, condition: Callable[[Any], Any] | pc.Expression, on_error: OnError = "fail") -> None:
        super().__init__(condition, on_error)
        self._is_expression = not callable(condition)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._is_expression:
            self._take_columns(batch, emit)
            return
        given, results = self.called(batch)
        self._check(results)
        times = given.times
        try:
            rows = list(compress(given.payload, results))
            if times is not None and 0 < len(rows) < len(results):
                times = times[_truths(results)]
        except Exception:  # of a result that is neither true nor false
            kept = given.mask(np.array(self._truths_one_by_one(given, results), np.bool_))
            rows, times = kept.payload, kept.times
        if rows:
            if times is not None:
                self.last_time = times[-1:]
            emit(Batch(rows, None, times) if len(rows) < len(batch.payload) else batch)

    def _take_columns(self, batch: Batch, emit: Emit) -> None:
        # pyarrow.compute takes 9 MiB, which functions of rows do without.
        from minishuffle.operators.evaluation import rows_where

        if len(batch):
            rows = rows_where(batch.payload, self.fn, self.name)
            if len(rows):
                emit(batch if len(rows) == len(batch) else batch.take(rows))

    def _check(self, results: list[Any]) -> None:
        if aside := asides_of(results):
            raise WrongResult(
                f"{self.name}: its function gave Aside({aside[0].name!r:.80}, ...), and filter has no side "
                "outputs of your own: write flat_map(fn, sides=[...]) with a function that returns a list"
            )
        if results and type(results[0]) is not bool and isinstance(results[0], Generator | Coroutine):
            raise WrongResult(
                f"{self.name}: its function gave a {type(results[0]).__name__}, which counts as true "
                "whatever it would give: return True or False"
            )

    def _truths_one_by_one(self, given: Batch, results: list[Any]) -> list[bool]:
        truths = []
        for number, result in enumerate(results):
            truth = False
            try:
                truth = bool(result)
            except Exception as error:
                row = given.payload[number]
                if self.on_error == "fail":
                    self.note_failure(error, row)
                    raise
                self.drop(error, row, time_of(given, number))
            truths.append(truth)
        return truths


def _truths(results: list[Any]) -> Mask:
    """Which of some results are true."""
    if set(map(type, results)) != {bool}:
        results = list(map(bool, results))
    marks: Mask = np.frombuffer(bytes(results), np.bool_)
    return marks

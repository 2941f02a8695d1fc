"""What steps of a plan give for the first rows of its sources, run in this process: to be printed by
``show()``, or to find a schema in."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minishuffle.connectors.limited import LimitedSource
from minishuffle.errors import ShuffleError, TaskFailed, UsageError, counted
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.limits import SHOWN_SECONDS_MAX, SHOWN_SOURCE_ROWS_MAX
from minishuffle.plan.detached import DetachedPlan, TakenEnd, limited, limited_before
from minishuffle.plan.nodes import Node, ObjectSchema
from minishuffle.runtime.onethread import LeftOut, OneThread
from minishuffle.runtime.usererrors import describe_failure

__all__ = ["print_first_rows", "rows_before"]

WAIT_SECONDS: Final = 0.01
"""How soon sources that had nothing are asked again."""


@dataclass(slots=True)
class _Shown:
    """What has come to an end of the plan."""

    name: str
    end: TakenEnd
    batches: list[Payload] = field(default_factory=list)

    def look(self) -> int:
        """How many rows there are."""
        self.batches += self.end.sink.take()
        return sum(map(len, self.batches))

    def rows(self, count: int) -> list[Any]:
        """The first rows, those of columns as tuples of Arrow's scalars."""
        found: list[Any] = []
        for batch in self.batches:
            first = batch[: count - len(found)]
            found += first if isinstance(first, list) else zip(*first.columns, strict=True)
        return found


def print_first_rows(stream: Any, count: int) -> None:
    """See :meth:`StreamBase.show`."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"show takes a number of rows from 1 on, not {count!r:.80}")
    plan = limited(stream, SHOWN_SOURCE_ROWS_MAX)
    shown = [_Shown(name, end) for name, end in plan.ends.items()]
    dropped: Counter[str] = Counter()

    def note(operator: str, side: str, batch: Batch) -> None:
        dropped[f"{operator}.{side}"] += len(batch.payload)

    is_cut = _read(plan, lambda: all(each.look() >= count for each in shown), note)
    _print(shown, count, dropped, _rows_read(plan) if is_cut else None)


def rows_before(step: Node, count: int) -> tuple[list[Batch], int]:
    """What comes to a step of a plan of the first rows of each source, none of which is late, and how many
    rows were read of the source that gave most.

    Raises:
        UsageError: what Spark writes would come to it.
        TaskFailed: a function of the plan raised; has the user's traceback.
    """
    plan = limited_before(step, count)
    try:
        _read(plan, lambda: False)
    except ShuffleError:
        raise
    except Exception as error:
        failure = describe_failure(error, "first rows")
        raise TaskFailed(f"{failure.text}\n{failure.traceback.rstrip()}") from error
    (end,) = plan.ends.values()
    return [Batch(payload) for payload in end.sink.take()], _rows_read(plan)


def _read(
    plan: DetachedPlan[LimitedSource], enough: Callable[[], bool], left_out: LeftOut | None = None
) -> bool:
    """Run the plan until there is ``enough`` or time is up, then with what has come. Whether any source was
    not read to its end."""
    run = OneThread(
        plan.programs, plan.edges, job="show", now=time.monotonic, wall=time.time, left_out=left_out
    )
    stopped = False

    def read() -> None:
        nonlocal stopped
        give_up = time.monotonic() + SHOWN_SECONDS_MAX
        while not run.ended:
            if not stopped and (enough() or time.monotonic() > give_up):
                stopped = run.end_sources()
            if not run.step():
                threading.Event().wait(WAIT_SECONDS)

    run.guarded(read)
    return stopped or any(source.limit.is_cut for source in plan.sources)


def _rows_read(plan: DetachedPlan[LimitedSource]) -> int:
    return max(source.limit.read for source in plan.sources)


def _print(shown: Sequence[_Shown], count: int, dropped: Mapping[str, int], read: int | None) -> None:
    """``dropped``: numbers of records by step and reason. ``read``: so many rows of each source were read,
    and not all; None: all were."""
    from minishuffle.console import console, print_rows

    out = console()
    for each in shown:
        if len(shown) > 1:
            out.print(f"{each.name}:")
        found = each.look()
        schema = each.end.schema
        columns = None if isinstance(schema, ObjectSchema) else [(one.name, str(one.type)) for one in schema]
        print_rows(out, each.rows(count), columns)
        if found > count:
            out.print("… and more rows")
        elif not found:
            out.print("no rows")
    if dropped:
        counts = ", ".join(f"{counted(number, 'record')} ({name})" for name, number in dropped.items())
        out.print(f"dropped: {counts}")
    if read is not None:
        rows = "row" if read == 1 else f"{read:,} rows"
        out.print(f"from the first {rows} of each source: counts, joins and windows are of these")

"""What a stream or a table gives for the first rows of its sources, printed: ``show()``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.limits import SHOWN_SECONDS_MAX, SHOWN_SOURCE_ROWS_MAX
from minishuffle.operators.row_conversion import rows_of
from minishuffle.plan.detached import TakenEnd, limited
from minishuffle.plan.nodes import ObjectSchema
from minishuffle.runtime.onethread import OneThread

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_first_rows"]

WAIT_SECONDS: Final = 0.01
"""How soon sources that had nothing are asked again."""
CELL_CHARS: Final = 60
"""What a cell has of a longer value."""


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
        """The first rows, those of columns as dicts."""
        found: list[Any] = []
        for batch in self.batches:
            found += rows_of(Batch(batch[: count - len(found)]))
        return found


def print_first_rows(stream: Any, count: int) -> None:
    """See :meth:`StreamBase.show`."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"show takes a number of rows from 1 on, not {count!r:.80}")
    plan = limited(stream, SHOWN_SOURCE_ROWS_MAX)
    shown = [_Shown(name, end) for name, end in plan.ends.items()]
    run = OneThread(plan.programs, plan.edges, job="show", now=time.monotonic, wall=time.time)
    stopped = False

    def read() -> None:
        nonlocal stopped
        give_up = time.monotonic() + SHOWN_SECONDS_MAX
        while not run.ended:
            enough = all(each.look() >= count for each in shown)
            if not stopped and (enough or time.monotonic() > give_up):
                stopped = run.end_sources()
            if not run.step():
                threading.Event().wait(WAIT_SECONDS)

    run.guarded(read)
    is_cut = stopped or any(source.limit.is_cut for source in plan.sources)
    _print(shown, count, max(source.limit.read for source in plan.sources) if is_cut else None)


def _print(shown: Sequence[_Shown], count: int, read: int | None) -> None:
    """``read``: so many rows of each source were read, and not all; None: all were."""
    from minishuffle.console import console

    out = console()
    for each in shown:
        if len(shown) > 1:
            out.print(f"{each.name}:")
        found = each.look()
        out.print(_table(each, each.rows(count)))
        if found > count:
            out.print("… and more rows")
        elif not found:
            out.print("no rows")
    if read is not None:
        rows = "row" if read == 1 else f"{read:,} rows"
        out.print(f"from the first {rows} of each source: counts, joins and windows are of these")


def _table(shown: _Shown, rows: list[Any]) -> Table:
    """A table's columns with their types; a column for each name of rows that are dicts; else one of rows."""
    from minishuffle.console import new_table

    schema = shown.end.schema
    if isinstance(schema, ObjectSchema):
        is_named = bool(rows) and all(type(row) is dict for row in rows)
        names = list(dict.fromkeys(name for row in rows for name in row)) if is_named else None
        table = new_table(["row"] if names is None else map(str, names))
        for row in rows:
            table.add_row(*([_cell(row, repr)] if names is None else _cells(row, names)))
        return table
    table = new_table(f"{column.name}\n{column.type}" for column in schema)
    for row in rows:
        table.add_row(*_cells(row, schema.names))
    return table


def _cells(row: dict[Any, Any], names: Sequence[Any]) -> Iterator[str]:
    return (_cell(row[name], str) if name in row else "" for name in names)


def _cell(value: Any, shown: Any) -> str:
    text: str = "null" if value is None else shown(value)
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 1]}…"

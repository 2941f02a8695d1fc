"""Tables on a terminal, or on whatever else the standard output is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minishuffle.errors import encodable

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["console", "new_table", "print_rows"]

MIN_WIDTH: Final = 120
"""Columns of output that is not a terminal, so that a table in a file is not folded to 80."""
CELL_CHARS: Final = 60
"""What a cell has of a longer value."""
FOLDED_CHARS: Final = 26
"""No column of rows is narrower because of others, but where it needs less: as wide as a time."""
GAP: Final = 2
"""Spaces between two columns."""


class _EscapingConsole(Console):
    """Escapes what the encoding of its file lacks, before it is measured: columns stay columns."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(encodable(text, self.encoding), **options)


def console() -> Console:
    """A console on the present standard output."""
    made = _EscapingConsole(highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = max(made.width, MIN_WIDTH)
    return made


def new_table(columns: Iterable[str], right: Iterable[str] = ()) -> Table:
    """An empty table; ``right`` names the columns with numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    aligned = set(right)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in aligned else "left",
            no_wrap=column in aligned,
            overflow="fold",
        )
    return table


def print_rows(out: Console, rows: Sequence[Any], columns: Sequence[tuple[str, str]] | None = None) -> None:
    """A line for each row: of tuples of Arrow's scalars in ``columns``, each a name and a type; or of rows
    that are any objects, in a column for each name of dicts, or each place of tuples of one length. Columns
    that do not fit are named under the rows."""
    if columns is not None:
        heads = [f"{name}\n{kind}" for name, kind in columns]
        cells = [[_cell(value, _scalar_text) for value in row] for row in rows]
    elif rows and all(type(row) is dict for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        heads = list(map(str, names))
        cells = [[_cell(row[name], str) if name in row else "" for name in names] for row in rows]
    elif rows and all(type(row) is tuple and len(row) == len(rows[0]) > 0 for row in rows):
        heads = [f"[{place}]" for place in range(len(rows[0]))]
        cells = [[_cell(value, str) for value in row] for row in rows]
    else:
        heads, cells = ["row"], [[_cell(row, _object_text)] for row in rows]
    fitting = _fitting(out.width, heads, cells)
    table = new_table(heads[:fitting])
    for line in cells:
        table.add_row(*line[:fitting])
    out.print(table)
    if left := [head.partition("\n")[0] for head in heads[fitting:]]:
        out.print(f"… and {len(left)} more {'column' if len(left) == 1 else 'columns'}: {', '.join(left)}")


def _fitting(width: int, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """How many columns fit, the first in any case, if their names are not folded and the rest is."""
    used = -GAP
    for place, head in enumerate(heads):
        name, _, kind = head.partition("\n")
        widest = max(map(cell_len, [kind, *(line[place] for line in cells)]))
        used += GAP + max(cell_len(name), min(widest, FOLDED_CHARS))
        if used > width:
            return max(place, 1)
    return len(heads)


def _cell(value: Any, shown: Callable[[Any], str]) -> str:
    text = "null" if value is None else shown(value)
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 1]}…"


def _object_text(value: Any) -> str:
    return str(value) if isinstance(value, date | datetime | time) else repr(value)


def _scalar_text(scalar: pa.Scalar) -> str:
    """A value of a column in Python's form; in Arrow's if Python has none, of a time after 9999 say."""
    import pyarrow as pa

    if not scalar.is_valid:
        return "null"
    try:
        return str(scalar.as_py())
    except (ValueError, OverflowError, NotImplementedError):
        text = " ".join(pa.repeat(scalar, 1).to_string().split())
        return text.removeprefix("[ ").removesuffix(" ]")

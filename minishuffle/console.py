"""Tables on a terminal, or on whatever else the standard output is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minishuffle.errors import encodable

__all__ = ["console", "new_table"]

MIN_WIDTH: Final = 120
"""Columns of output that is not a terminal, so that a table in a file is not folded to 80."""


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

"""Elements: what an exchange carries, a header and one batch of rows or of Arrow columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KeyedRows"]


@dataclass(slots=True)
class KeyedRows:
    """Rows with the key of each, so that a key function runs once per record."""

    keys: list[Any]
    rows: list[Any]

    def __len__(self) -> int:
        return len(self.rows)

"""What stands behind a step of unknown columns, wherever it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.drafts import Draft, draft_in
from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.plan.unknownschemas import drafting

KNOWN = Table.from_arrow(pa.table({"k": [1]}))
ROWS = Stream.items([{"k": 1}])

WAYS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda draft: (
        draft.filter(pc.field("x") > 1).key_by("x").window(None).count().late.to_spark("y")
    ),
    "rows": lambda draft: draft.to_rows().map(str).parallel(2).rebalance().key_by(str).count().collect(),
    "union": lambda draft: KNOWN.union(KNOWN, draft),
    "union of rows": lambda draft: ROWS.union(draft.to_rows()),
    "join": lambda draft: KNOWN.key_by("k").join(draft.key_by("k"), "left"),
    "asof_join": lambda draft: KNOWN.key_by("k").asof_join(draft.key_by("k")),
    "broadcast_join": lambda draft: KNOWN.broadcast_join(draft, "x"),
    "join of rows": lambda draft: ROWS.key_by("k").join(draft.to_rows().key_by("k")),
    "broadcast_join of rows": lambda draft: ROWS.broadcast_join(draft.to_rows(), "k"),
    "together": lambda draft: Stream.together(KNOWN.collect(), draft.collect("more")),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_made_of_unknown_columns_ends_with_their_step(way: str) -> None:
    with drafting():
        draft: Any = Table.generate(lambda start, count: None)  # type: ignore[arg-type,return-value]
        found = WAYS[way](draft)
    assert isinstance(found, Draft)
    assert found.plan.ends == draft.plan.ends or way == "rows"
    assert [node.label for node in found.plan.ends] == ["unknown columns"]


def test_there_is_none_among_what_is_known() -> None:
    assert draft_in([KNOWN, ROWS, None]) is None
    with pytest.raises(UsageError, match="takes a Table, not a Stream"):
        KNOWN.union(ROWS)  # type: ignore[arg-type]

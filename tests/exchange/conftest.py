"""What the tests of this folder share: elements as bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle.exchange.elements import ELEMENT_HEADER, Batch, encode


@pytest.fixture(scope="session")
def written() -> Callable[[Batch], bytes]:
    """Gives a whole element, its header checked."""
    return written_element


def written_element(batch: Batch) -> bytes:
    rows, parts = encode(batch)
    data = b"".join(parts)
    size, header_rows, _ = ELEMENT_HEADER.unpack_from(data)
    assert (size, header_rows) == (len(data) - ELEMENT_HEADER.size, rows)
    assert all(memoryview(part).format == "B" for part in parts)
    return data

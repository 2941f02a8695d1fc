"""``bench transport`` and ``bench exchange`` on two processes, with little data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench.peer import word_sum
from minishuffle.cli.main import cli


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transport", "exchange"])
def test_checksums_agree_and_every_figure_is_there(kind: str) -> None:
    options = ["--channels", "4", "--pairs", "2", "--megabytes", "16", "--json"]
    result = CliRunner().invoke(cli, ["bench", kind, *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["verified"] is True
    assert (figures["channels"], figures["pairs"], figures["segment_bytes"]) == (4, 2, 32_768)
    assert figures["gbytes_per_second"] > 0
    assert set(figures["raw_gbytes_per_second"]) == {"32768", "262144", "1048576"}
    ratio = figures["ratio_to_raw"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


def test_blocks_that_checksums_do_not_fit() -> None:
    result = CliRunner().invoke(cli, ["bench", "transport", "--segment-bytes", "1001"])
    assert result.exit_code == 2
    assert "--segment-bytes must be a multiple of 8" in result.output


def test_one_changed_byte_changes_the_checksum() -> None:
    block = np.arange(32_768, dtype=np.uint64).view(np.uint8)
    before = word_sum(memoryview(block))
    for at in (0, 7, 100_001, len(block) - 1):
        changed = block.copy()
        changed[at] ^= 1
        assert word_sum(memoryview(changed)) != before

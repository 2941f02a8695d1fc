"""The word count in the README runs as it is printed there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.examples.wordcount import SHIPPED_TEXT

pytestmark = pytest.mark.slow

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = "moby.txt"


@pytest.fixture
def word_count() -> str:
    blocks = [block for block in BLOCK.findall(README.read_text()) if "LocalCluster" in block]
    assert blocks, f"{README} has no Python block with a LocalCluster"
    return str(blocks[0])


@pytest.mark.timeout(120)
def test_the_word_count_of_the_readme_runs_as_printed(word_count: str, tmp_path: Path) -> None:
    assert TEXT in word_count
    shutil.copy(SHIPPED_TEXT, tmp_path / TEXT)
    (tmp_path / "count.py").write_text(word_count)
    ran = subprocess.run(
        [sys.executable, "count.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    printed = dict(re.findall(r"^(.*\S)[ \t]+(\d+)$", ran.stdout, re.MULTILINE))
    expected = Counter(word for line in SHIPPED_TEXT.read_text().splitlines() for word in line.split())
    assert printed
    assert printed.items() <= {word: str(count) for word, count in expected.items()}.items()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("title", ["Event time", "Joins", "Process functions"])
def test_the_example_of_a_section_prints_what_is_printed_there(title: str, tmp_path: Path) -> None:
    section = README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (example,) = BLOCK.findall(section)
    told = re.findall(r"^    (.*\n)", section.partition(f"{example}```")[2], re.MULTILINE)
    (tmp_path / "example.py").write_text(example)
    ran = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "".join(told)


@pytest.mark.timeout(240)
def test_the_pipeline_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    section = README.read_text().partition("\n### Your own Parquet files")[2].partition("\n### ")[0]
    (own,) = BLOCK.findall(section)
    (command,) = re.findall(r"^    minishuffle (pipeline run .*)$", section, re.MULTILINE)
    (tmp_path / "my.py").write_text(own)
    minutes = [60_000_000 * minute for minute in range(600)]
    ads = [f"ad{minute % 7}" for minute in range(600)]
    times = pa.array(minutes, pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"ad": ads, "at": times}), tmp_path / "impressions.parquet")
    clicks = pa.table({"ad": ads, "at": times, "price": pa.array(range(600), pa.int64())}).slice(0, 300)
    pq.write_table(clicks, tmp_path / "clicks.parquet")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "minishuffle.cli",
            *command.split(),
            "--output",
            str(tmp_path / "out"),
            "--json",
        ],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = pq.read_table(tmp_path / "out" / "minishuffle").to_pydict()
    assert (sum(result["shown"]), sum(result["clicks"])) == (600, 300)
    assert sum(cents or 0 for cents in result["cents"]) == sum(range(300))
    assert len(result["ad"]) == 70

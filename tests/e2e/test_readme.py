"""The word count in the README runs as it is printed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from minishuffle.examples.wordcount import SHIPPED_TEXT

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

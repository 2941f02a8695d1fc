"""The tables of ``flink_cases.md`` against the tests that name cases of theirs."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
NAMED = re.compile(r"\bCases?\s+(\d+(?:\s+\([^)]*\))?(?:(?:,|\s+and|,\s+and)\s+\d+(?:\s+\([^)]*\))?)*)")
"""How a docstring names them, one or several, with remarks in parentheses."""
ROW = re.compile(r"^\| (\d+) \| (`\w+#\w+`(?:, `\w*#\w+`)*) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)
TEST_NAME = re.compile(r"`(test_\w+(?:\.py)?)`")


def rows(section: str) -> dict[int, str]:
    """The last column of a section's table, by case."""
    text = (TESTS / "flink_cases.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = ROW.findall(text)
    assert len(found) == text.count("\n|") - 2, "each line is a row of four columns"
    numbers = [int(number) for number, *_ in found]
    assert numbers == sorted(set(numbers))
    return {int(number): last.strip() for number, _, _, last in found}


def sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}


def test_each_case_that_applies_is_named_by_a_test_and_no_other() -> None:
    named = {
        int(number)
        for text in sources().values()
        for found in NAMED.findall(text)
        for number in re.findall(r"\d+", re.sub(r"\([^)]*\)", "", found))
    }
    tested, others = rows("Tested"), rows("Do not apply")
    assert not set(tested) & set(others)
    assert sorted(named) == sorted(tested)


def test_cases_that_do_not_apply_say_why_and_name_tests_that_are_there() -> None:
    there = sources()
    functions = {name for text in there.values() for name in re.findall(r"def (test_\w+)", text)}
    for number, reason in rows("Do not apply").items():
        assert reason, number
        assert set(TEST_NAME.findall(reason)) <= functions | set(there), number

"""Errors of the user's that are hard to report: a task always says how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.errors import TaskFailed, UsageError
from minishuffle.wire.messages import ErrorInfo

if TYPE_CHECKING:
    from conftest import Site


class NoCause(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise RuntimeError("not even its cause")


class OddText(str):
    def __format__(self, spec: str) -> str:
        raise RuntimeError("not even its text")


class Formatless(Exception):
    def __str__(self) -> str:
        return OddText("odd")


class OddRow:
    def __repr__(self) -> str:
        return "\udc80"


def no_cause(row: Any) -> Any:
    raise NoCause("q")


def formatless(row: Any) -> Any:
    raise Formatless


def too_long_for_us(row: Any) -> Any:
    raise UsageError("x" * 10_000_000)


def half_a_character(row: Any) -> Any:
    raise ValueError("before \udc80 after")


async def failure(site: Site, stream: Stream[Any]) -> ErrorInfo:
    (outcome,) = await site.run(stream)
    assert outcome.state == "failed"
    assert outcome.error is not None
    return outcome.error


@pytest.mark.parametrize(("function", "name"), [(no_cause, "NoCause"), (formatless, "Formatless")])
async def test_an_error_that_cannot_be_described_ends_its_task_all_the_same(
    site: Site, function: Any, name: str
) -> None:
    error = await failure(site, Stream.items([1]).map(function).collect())
    assert error.code == TaskFailed.code
    assert error.text == f"{error.task}: {name} (it cannot be described: that raised RuntimeError)"


async def test_a_very_long_error_of_the_runtimes_classes_is_cut(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(too_long_for_us).collect())
    assert error.code == UsageError.code
    assert len(error.text) <= limits.ERROR_TEXT_BYTES_MAX // 4
    assert error.text.endswith(" more characters)")


async def test_a_task_with_a_very_long_name_can_fail(site: Site) -> None:
    stream = Stream.items([1]).map(half_a_character)
    for _ in range(600):
        stream = stream.map(half_a_character)
    error = await failure(site, stream.collect())
    assert len(error.task) <= limits.TASK_NAME_CHARS_MAX
    assert error.text.startswith(error.task)


async def test_text_that_is_no_utf_8_is_told_without_what_is_not(site: Site) -> None:
    error = await failure(site, Stream.items([1]).map(half_a_character).collect())
    assert error.text.endswith("ValueError: before ? after")
    assert "before ? after" in error.traceback


async def test_a_line_that_is_too_long_or_no_utf_8_is_logged_with_a_note(site: Site) -> None:
    await site.run(Stream.items([0, 1]).map(lambda n: "y" * 70_000 if n else OddRow()).print())
    odd, long = site.lines
    assert odd == "?"
    assert len(long) <= limits.LOG_LINE_CHARS_MAX
    assert long.endswith("yyy… (60,066 more characters)")

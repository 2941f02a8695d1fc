from pathlib import Path

import pytest

from minishuffle.examples import wordcount as wordcount_module
from minishuffle.examples.keyby import SlowCount, keyby
from minishuffle.examples.wordcount import SHIPPED_TEXT, wordcount, words
from minishuffle.plan.planner import compile_job


def test_the_shipped_text_is_what_the_notice_says() -> None:
    text = SHIPPED_TEXT.read_text(encoding="ascii")
    assert len(text.split()) == 26_457
    assert "26,457 words" in (Path(wordcount_module.__file__)).read_text()
    assert "Project Gutenberg" not in text
    assert "public domain" in SHIPPED_TEXT.with_name("NOTICE").read_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("`Curiouser and curiouser!' cried Alice", ["curiouser", "and", "curiouser", "cried", "alice"]),
        ("It's   the Hatter's--", ["it's", "the", "hatter's"]),
    ],
)
def test_words(line: str, expected: list[str]) -> None:
    assert words(line) == expected


def test_word_count_has_one_shuffle() -> None:
    graph = compile_job(wordcount(), parallelism=3)
    assert [edge.partitioner for edge in graph.edges] == ["hash"]
    assert graph.slots_needed == 3


@pytest.mark.parametrize(("records", "bounded"), [(None, False), (1000, True)])
def test_keyby_ends_only_when_told(records: int | None, bounded: bool) -> None:
    graph = compile_job(keyby(records=records), parallelism=2)
    assert [edge.partitioner for edge in graph.edges] == ["hash"]
    assert graph.vertices[0].is_source
    assert graph.vertices[0].bounded is bounded


def test_keyby_with_a_delay_has_a_slow_sink_that_counts_the_same() -> None:
    graph = compile_job(keyby(delay=0.5), parallelism=2)
    assert [vertex.name for vertex in graph.vertices] == ["generate", "count -> slow_count"]
    sink = SlowCount(0.0)
    for batch in ([1, 2], [3]):
        sink.write(batch)
    assert sink.close() == 3

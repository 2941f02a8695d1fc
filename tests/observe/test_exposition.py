"""The text of a scrape: both formats, as their own parsers read them."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from minishuffle.counters import Histogram
from minishuffle.observe.exposition import OPENMETRICS, Exposition, Scrape, label_text

ODD = 'a "b" \\ \n{c="d"} \\n é'


def scrape() -> Scrape:
    made = Scrape("worker")
    histogram = Histogram((0.5, 1.0))
    for seconds in (0.25, 0.75, 7.0):
        histogram.observe(seconds)
    made.histogram("minishuffle_event_loop_lag_seconds", histogram)
    made.value("minishuffle_connections", 3)
    made.value("minishuffle_gc_seconds_total", 1e-7)
    made.by_label("minishuffle_connections_refused_total", {ODD: 2})
    names = ("pipeline", "pipeline_id", "vertex", "vertex_id", "subtask")
    labels = label_text(names, (ODD, "j1", ODD, "0", "0"))
    made.value("minishuffle_state_rows", 2**60, labels)
    made.by_label("minishuffle_task_records_total", {"in": 1, "out": 2}, labels)
    return made


def samples(text: str, parse: object) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    assert callable(parse)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        if family.name.startswith("minishuffle")
        for sample in family.samples
    }


def test_both_formats_say_the_same_with_any_label() -> None:
    exposition = Exposition(scrape)
    plain, plain_type = exposition.answer("text/html, */*")
    opened, opened_type = exposition.answer(f"{OPENMETRICS};version=1.0.0,text/plain;q=0.5")
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert opened_type.startswith("application/openmetrics-text; version=1.0.0")
    found = samples(plain.decode(), parse_plain)
    assert found == samples(opened.decode(), parse_openmetrics)
    assert found["minishuffle_connections_refused_total", frozenset({("reason", ODD)})] == 2
    assert found["minishuffle_gc_seconds_total", frozenset()] == 1e-7
    buckets = {
        edge: found["minishuffle_event_loop_lag_seconds_bucket", edge] for edge in edges("0.5", "+Inf")
    }
    assert list(buckets.values()) == [1, 3]
    (rows,) = (value for (name, _), value in found.items() if name == "minishuffle_state_rows")
    assert rows == 2**60


def edges(*values: str) -> list[frozenset[tuple[str, str]]]:
    return [frozenset({("le", value)}) for value in values]


def test_families_without_samples_are_left_out() -> None:
    text = Exposition(lambda: Scrape("worker")).answer("")[0].decode()
    assert "minishuffle" not in text
    assert "process_cpu_seconds_total" in text

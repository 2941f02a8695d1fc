import pytest

from minishuffle.cli.demo import READINGS, Reading, total
from minishuffle.observe.families import METRICS, RUNTIME_METRICS

SAMPLES = [
    ("a_total", {"direction": "in", "task": "x"}, 3.0),
    ("a_total", {"direction": "in", "task": "y"}, 4.0),
    ("a_total", {"direction": "out", "task": "x"}, 50.0),
    ("b", {}, 600.0),
]


def test_totals_add_up_the_series_with_those_labels() -> None:
    assert total(SAMPLES, "a_total", direction="in") == 7
    assert total(SAMPLES, "a_total") == 57
    assert total(SAMPLES, "absent") == 0


def test_a_rate_is_the_growth_per_second() -> None:
    before = [("a_total", {"direction": "in", "task": "x"}, 1.0)]
    counter = Reading("", "a_total", {"direction": "in"}, str, rate=True)
    gauge = Reading("", "b", {}, str)
    assert counter.value(before, SAMPLES, 2.0) == 3.0
    assert gauge.value(before, SAMPLES, 2.0) == 600.0


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.text)
def test_every_reading_is_a_metric_that_workers_serve(reading: Reading) -> None:
    specs = {spec.name: spec for spec in (*METRICS, *RUNTIME_METRICS) if spec.served_by("worker")}
    assert reading.metric in specs
    assert set(reading.labels) <= set(specs[reading.metric].labels)
    assert reading.rate == (specs[reading.metric].type == "counter")


def test_there_are_at_least_a_dozen() -> None:
    assert len(READINGS) >= 12

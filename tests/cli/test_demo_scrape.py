from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from minishuffle.cli import demo
from minishuffle.cli.demo import READINGS, Reading, Verdict, total
from minishuffle.cli.main import cli
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


def test_the_stages_that_are_named_run_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(address=SimpleNamespace(host="127.0.0.1"))
    cluster = SimpleNamespace(workers={}, client=client, web_port=1, state_dir=tmp_path / "gone")
    ran: list[str] = []

    def stage(name: str) -> Verdict:
        ran.append(name)
        return Verdict(True, "seen")

    monkeypatch.setattr(demo, "LocalCluster", lambda **options: nullcontext(cluster))
    for name, (title, _) in demo.STAGES.items():
        monkeypatch.setitem(demo.STAGES, name, (title, lambda cluster, out, name=name: stage(name)))
    named = CliRunner().invoke(cli, ["demo", "--only", "keyby", "--only", "recovery"])
    assert (named.exit_code, ran) == (0, ["keyby", "recovery"]), named.output
    assert demo.NEXT_WITH_SPARK not in named.output
    ran.clear()
    everything = CliRunner().invoke(cli, ["demo"])
    assert (everything.exit_code, ran) == (0, list(demo.STAGES)), everything.output
    assert demo.NEXT_WITH_SPARK in everything.output

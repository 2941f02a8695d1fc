"""The picture of an outage, as it is drawn of given times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from minishuffle.bench import outagechart, recovery
from minishuffle.bench.outagechart import FLINK, FLINK_SOURCE, check_drawable, draw_outage
from minishuffle.cli.main import cli
from minishuffle.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = {
    "kills": 20,
    "outage_ms": {"p50": 33.4, "p95": 43.0, "max": 44.2},
    "output": {
        "from_ms": -300,
        "step_ms": 20,
        "struck": [100.0] * 15 + [0.0, 40.0] + [100.0] * 28,
        "others": [100.0] * 45,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens its fonts once in a process, and keeps them."""
    draw_outage(MEASURED, tmp_path_factory.mktemp("fonts") / "x.svg")


def test_the_picture_says_what_was_measured_and_where_the_rest_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "measure_recovery", lambda **options: MEASURED)
    result = CliRunner().invoke(cli, ["bench", "recovery", "--json", "--svg", str(tmp_path / "first.svg")])
    assert json.loads(result.output) == MEASURED
    draw_outage(MEASURED, tmp_path / "second.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "first.svg").getroot()
    texts = {"".join(each.itertext()).strip() for each in root.iter(f"{SVG}text")}
    assert any(text.startswith("33 ms (longest of 20: 44 ms)") for text in texts)
    assert texts >= {FLINK_SOURCE, "minishuffle", "1.04 s, all output", "19 s, all output", *FLINK}
    first = next(each for each in root.iter(f"{SVG}path") if "fill" in each.get("style", ""))
    assert "fill: #ffffff" in first.attrib["style"], "dark ink needs a ground of its own on a dark page"
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    x, y = zip(*re.findall(r"([\d.]+) ([\d.]+)", first.attrib["d"]), strict=True)
    assert (max(map(float, x)), max(map(float, y))) == pytest.approx((width, height))


def test_what_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "measure_recovery", lambda **options: pytest.fail("it was measured"))
    result = CliRunner().invoke(cli, ["bench", "recovery", "--failure", "coordinator", "--svg", "x.svg"])
    assert result.exit_code == 2 and "name another --failure" in result.output
    result = CliRunner().invoke(cli, ["bench", "recovery", "--svg", "nowhere/x.svg"])
    assert result.exit_code == 2 and "there is no folder nowhere: make it" in result.output
    check_drawable("process")
    monkeypatch.setattr(outagechart, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'minishuffle\[bench\]'"):
        check_drawable("process")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/x\.svg cannot be written: No such file"):
        draw_outage(MEASURED, tmp_path / "none" / "x.svg")

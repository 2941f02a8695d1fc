"""Dashboards: known to Grafana's schema field by field, and self-contained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from minishuffle.observe.families import METRICS, RUNTIME_METRICS

OPEN_FIELDS = re.compile(r"/annotations/list/\d+/(titleFormat|textFormat|step)|/id")
"""What Prometheus' own annotations say beyond the schema, and an id, which Grafana gives."""
METRIC = re.compile(r"\b(?:minishuffle|process|python)_[a-z_]+")
UNITS = {"short", "s", "bytes", "Bps", "percentunit"}


@pytest.fixture(params=["overview", "job"])
def dashboard(request: pytest.FixtureRequest, deploy: Path) -> Any:
    return json.loads((deploy / "grafana" / "dashboards" / f"{request.param}.json").read_text())


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where what was read back differs from what was written; the schema's defaults besides do not count."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        lost = [f"{path}/{key}" for key in ours if key not in theirs]
        return lost + [
            found
            for key in ours.keys() & theirs
            for found in differences(ours[key], theirs[key], f"{path}/{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            found
            for number, pair in enumerate(zip(ours, theirs, strict=True))
            for found in differences(*pair, f"{path}/{number}")
        ]
    return [] if ours == theirs else [path]


def panels(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_each_field_is_in_grafanas_schema(dashboard: Any) -> None:
    """Grafana's own types, generated from its schema, keep every field when they read the dashboard. They do
    not check types of values."""
    register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    assert [path for path in differences(dashboard, read) if not OPEN_FIELDS.fullmatch(path)] == []
    dashboard["panels"][1]["options"]["colourMode"] = "value"
    read = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    assert "/panels/1/options/colourMode" in differences(dashboard, read), "an unknown field is found"


def test_dashboards_are_found_by_fixed_uids_and_read_the_chosen_data_source(
    dashboard: Any, deploy: Path
) -> None:
    assert dashboard["uid"] in ("minishuffle-overview", "minishuffle-job")
    assert dashboard["id"] is None
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert dashboard["templating"]["list"][0]["name"] == "datasource"
    for panel in panels(dashboard):
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    linked = {link["url"].removeprefix("/d/") for link in dashboard["links"]}
    others = [json.loads(path.read_text())["uid"] for path in (deploy / "grafana" / "dashboards").iterdir()]
    assert linked <= set(others) and len(set(others)) == len(others)


def test_panels_have_ids_units_and_places_of_their_own(dashboard: Any) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in panels(dashboard)} <= UNITS


def test_queries_read_metrics_that_exist(dashboard: Any) -> None:
    known = {spec.name for spec in (*METRICS, *RUNTIME_METRICS)}
    for panel in panels(dashboard):
        for target in panel["targets"]:
            read = {metric.removesuffix("_bucket") for metric in METRIC.findall(target["expr"])}
            assert read <= known, target["expr"]


def test_provisioning_reads_the_dashboards_and_the_data_source(deploy: Path) -> None:
    folder = deploy / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())
    assert sources["apiVersion"] == 1
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
    provided = yaml.safe_load((folder / "dashboards" / "minishuffle.yml").read_text())
    assert provided["apiVersion"] == 1
    assert provided["providers"][0]["allowUiUpdates"] is False

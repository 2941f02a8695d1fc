"""Recording rules and alerts, as promtool sees them: well formed, and right on synthetic series."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from minishuffle.observe.families import METRICS
from minishuffle.observe.prometheus import prometheus_config

RULE_NAME = re.compile(r"[a-z_]+:minishuffle_[a-z_]+:[a-z0-9_]+")
METRIC = re.compile(r"(?<![:\w])minishuffle_[a-z_]+")
HISTOGRAM_SUFFIX = re.compile(r"_bucket$")


def promtool(binaries: Path, *arguments: str | Path) -> str:
    """What it prints; fails with that if it finds anything wrong."""
    done = subprocess.run(
        [binaries / "promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules(path: Path) -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_rules_and_the_configuration(prometheus_binaries: Path, deploy: Path) -> None:
    folder = deploy / "prometheus"
    promtool(prometheus_binaries, "check", "rules", folder / "rules.yml", folder / "alerts.yml")
    checked = promtool(
        prometheus_binaries,
        "check",
        "config",
        "--syntax-only",
        folder / "prometheus.yml",
        folder / "prometheus-tls.yml",
    )  # The token is not there.
    assert "SUCCESS" in checked


def test_the_configuration_scrapes_as_that_of_cluster_up_does(deploy: Path, tmp_path: Path) -> None:
    shipped = yaml.safe_load((deploy / "prometheus" / "prometheus.yml").read_text())
    text = prometheus_config("coordinator:8472", tmp_path, "token").read_text()
    written = yaml.safe_load(text.replace(str(tmp_path / "read-token"), "/run/minishuffle-read/token"))
    assert shipped["scrape_configs"] == written["scrape_configs"]


@pytest.mark.slow
def test_each_alert_fires_on_the_series_that_are_to_raise_it(prometheus_binaries: Path, deploy: Path) -> None:
    folder = deploy / "prometheus"
    promtool(prometheus_binaries, "test", "rules", folder / "rules_test.yml")
    alerts = {rule["alert"] for rule in rules(folder / "alerts.yml")}
    tried = set(re.findall(r'alertname="(\w+)"', (folder / "rules_test.yml").read_text()))
    assert tried == alerts


def test_rules_read_metrics_that_exist(deploy: Path) -> None:
    known = {spec.name for spec in METRICS}
    for name in ("rules.yml", "alerts.yml"):
        for rule in rules(deploy / "prometheus" / name):
            read = {HISTOGRAM_SUFFIX.sub("", metric) for metric in METRIC.findall(rule["expr"])}
            assert read <= known, rule


def test_recording_rules_are_named_by_level_metric_and_operation(deploy: Path) -> None:
    recorded = [rule["record"] for rule in rules(deploy / "prometheus" / "rules.yml")]
    assert recorded
    assert not [name for name in recorded if not RULE_NAME.fullmatch(name) or "_total" in name]
    used = set(RULE_NAME.findall((deploy / "prometheus" / "alerts.yml").read_text()))
    assert used <= set(recorded)


def test_each_alert_has_a_severity_and_a_runbook_that_exists(deploy: Path) -> None:
    headings = re.findall(r"^### (\w+)$", (deploy / "prometheus" / "README.md").read_text(), re.MULTILINE)
    for rule in rules(deploy / "prometheus" / "alerts.yml"):
        name, notes = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert notes["summary"] and notes["description"], name
        assert notes["runbook_url"] == f"deploy/prometheus/README.md#{name.lower()}"
        assert name in headings

"""Hosts that cannot be made; those that can are in tests/e2e/test_lost_hosts.py, for root."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from minishuffle.bench import hosts
from minishuffle.cli.main import cli


def test_who_is_not_root_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(cli, ["bench", "recovery", "--failure", "host", "--kills", "1"])
    assert result.exit_code == 2
    text = "hosts are network namespaces, which only root can make: run it as root"
    assert result.stderr.strip().splitlines() == [f"minishuffle: {text}"]


def test_without_ip_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    result = CliRunner().invoke(cli, ["bench", "recovery", "--failure", "host", "--kills", "1"])
    assert result.exit_code == 2
    assert "install iproute2" in result.stderr

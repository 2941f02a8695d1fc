"""This host's identity, and its address on the way to another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minishuffle.transport import interfaces
from minishuffle.transport.interfaces import address_toward, host_identity


def test_processes_of_one_host_have_one_identity() -> None:
    program = "from minishuffle.transport.interfaces import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == host_identity() != ""


def test_another_boot_and_another_network_are_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = host_identity()
    monkeypatch.setattr(interfaces, "NETWORK", str(tmp_path))
    assert host_identity() != here
    monkeypatch.undo()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(interfaces, "BOOT_ID", boot)
    assert host_identity().startswith("another/")
    boot.unlink()
    assert host_identity() != ""


async def test_the_way_to_this_host_is_its_own_address_and_to_nowhere_there_is_none() -> None:
    assert await address_toward("127.0.0.1") == "127.0.0.1"
    assert await address_toward("no such name") == ""

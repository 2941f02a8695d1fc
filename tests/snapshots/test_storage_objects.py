"""Snapshots at ``s3://``: written, read and removed; and a store that answers 503, or late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minishuffle.limits import STORE_TRIES
from support.sources import TESTS

CODE = "from support.objectsnapshots import main; main()"


@pytest.fixture(scope="module")
def found(repository: Path) -> dict[str, Any]:
    """What ``support.objectsnapshots`` has found."""
    ran = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=repository,
        env={"AWS_EC2_METADATA_DISABLED": "true", "PYTHONPATH": str(TESTS)},
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


pytestmark = pytest.mark.slow


def test_an_object_store_holds_snapshots_as_a_directory_does(found: dict[str, Any]) -> None:
    assert found["empty"] == 0
    names = ["1-0-1.state", "1-1-1.state", "manifest"]
    assert found["objects"][1:] == [
        f"bucket/snapshots/s{number}/{name}" for number in (1, 2) for name in names
    ]
    assert found["listed"] == [
        ["s3://bucket/snapshots/s1", "s1", True],
        ["s3://bucket/snapshots/s2", "s2", True],
    ]
    assert found["newest"] == ["s3://bucket/snapshots/s2", {"key": ["the", "a", "ccc"], "value": [3, 1, 3]}]
    assert found["rows"] == [20_000, {"key": ["word7"], "value": [5]}]
    assert found["above"] == "s3://bucket/snapshots"
    missing = "UnreadableSnapshot: there is no s3://bucket/snapshots/s1/nothing: it was removed"
    assert found["missing"].startswith(missing)
    assert "s1" not in found["removed"]
    assert "s2" in found["removed"]


def test_a_store_that_refuses_leaves_no_manifest_without_its_files(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("StorageUnavailable: s3://bucket/snapshots/s3/1-1-1.state: ")
    assert found["refusals"] == STORE_TRIES
    assert found["long"].startswith("StorageUnavailable: s3://bucket/snapshots/s5/1-0-1.state: ")
    assert (found["parts"], found["long length"]) == ([], 1 << 24)
    assert found["no manifest"].startswith("StorageUnavailable: s3://bucket/snapshots/s4/manifest: ")
    assert found["manifests"] == ["bucket/snapshots/s1/manifest", "bucket/snapshots/s2/manifest"]


def test_a_store_that_does_not_answer_is_no_broken_snapshot(found: dict[str, Any]) -> None:
    """No older one takes the place of one that may be whole."""
    assert found["cannot read"].startswith("StorageUnavailable: s3://bucket/snapshots/s2/manifest: ")
    assert found["cannot list"].startswith("StorageUnavailable: s3://bucket/snapshots: ")
    assert found["late"].startswith("StorageUnavailable: s3://bucket/snapshots/s1/manifest: ")

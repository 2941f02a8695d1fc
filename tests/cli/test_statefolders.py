"""``minishuffle state``: snapshots of a directory, their state as tables, and which may be removed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import Result

from minishuffle.cli.session import Session
from minishuffle.cli.statefolders import keys_meant, snapshot_use
from minishuffle.config import CoordinatorPlace, write_coordinator
from minishuffle.ids import Address
from minishuffle.limits import UNFINISHED_SNAPSHOT_SECONDS
from minishuffle.snapshots.storage import folder_at
from support.savedjobs import SECRET, save

Run = Callable[..., Result]


@pytest.fixture
def directory(own_state: Path) -> Path:
    """That of the cluster, whose secret is there: two snapshots of j1, and one that is being written."""
    own_state.mkdir(parents=True)
    (own_state / "secret").write_bytes(SECRET)
    (own_state / "secret").chmod(0o600)
    found = own_state / "snapshots"
    for number in (1, 2):
        save(folder_at(found / f"s{number}"), number=number, taken_at=1_000.0 * number)
    save(folder_at(found / "other"), job="j2", taken_at=500.0)
    (found / "new").mkdir()
    (found / "new" / "0-0-1.state").write_bytes(b"x")
    return found


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def harm(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_the_snapshots_of_a_directory_are_listed(directory: Path, run: Run) -> None:
    (directory / "s1" / "1-0-1.state").unlink()
    lines = run("state", "list").stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:5]] == [
        ["other", "whole", "j2", "words", "savepoint"],
        ["s2", "whole", "j1", "words", "savepoint"],
        ["s1", "broken", "-", "-", "-"],
        ["new", "unfinished", "-", "-", "-"],
    ]
    assert lines[5].startswith(f"s1: there is no {directory}/s1/1-0-1.state")
    assert lines[6] == f"in {directory}"
    found = printed(run("state", "list", str(directory), "--json"))
    assert found["directory"] == str(directory)
    whole = found["snapshots"][1]
    assert (whole["state"], whole["job"], whole["number"], whole["tasks"]) == ("whole", "j1", 2, 3)
    assert whole["path"] == str(directory / "s2")


def test_the_setting_says_where_they_are(
    directory: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "s2").rename(tmp_path / "s2")
    monkeypatch.setenv("MINISHUFFLE_SNAPSHOT_DIR", str(tmp_path))
    assert [each["number"] for each in printed(run("state", "list", "--json"))["snapshots"]] == [2]
    assert run("state", "show", "j1").stdout.startswith("savepoint 2 of job j1")


def test_the_coordinator_says_where_they_are(
    directory: Path, own_state: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "s2").rename(tmp_path / "s2")
    place = CoordinatorPlace(Address("127.0.0.1", 80), 1, snapshot_dir=str(tmp_path))
    write_coordinator(own_state, place)
    assert [each["number"] for each in printed(run("state", "list", "--json"))["snapshots"]] == [2]
    monkeypatch.setenv("MINISHUFFLE_SNAPSHOT_DIR", str(directory))
    assert len(printed(run("state", "list", "--json"))["snapshots"]) == 3


def test_an_empty_directory_says_so(tmp_path: Path, run: Run) -> None:
    assert run("state", "list", str(tmp_path)).stdout == f"there are no snapshots in {tmp_path}\n"


def test_a_snapshot_is_no_directory_of_some(directory: Path, run: Run) -> None:
    found = run("state", "list", str(directory / "s1")).stdout
    assert found == f"{directory}/s1 is a snapshot: 'minishuffle state show' shows what it holds\n"


def test_another_secret_takes_trust(directory: Path, own_state: Path, run: Run) -> None:
    (own_state / "secret").write_bytes(b"z" * 32)
    states = [each["state"] for each in printed(run("state", "list", "--json"))["snapshots"]]
    assert sorted(states) == ["not trusted"] * 3 + ["unfinished"]
    refused = run("state", "show", str(directory / "s2"))
    assert refused.exit_code == 1
    assert "another secret" in refused.stderr
    assert "minishuffle explain MS-131" in refused.stderr
    assert run("state", "show", str(directory / "s2"), "--trust-snapshot").exit_code == 0


@pytest.mark.parametrize("place", ["{}/s2", "{}", "j1", "s2"])
def test_the_operators_of_a_snapshot_are_shown(place: str, directory: Path, run: Run) -> None:
    lines = run("state", "show", place.format(directory)).stdout.splitlines()
    assert lines[0].startswith("savepoint 2 of job j1 (words), taken ")
    assert lines[0].endswith(f" ago: {directory}/s2")
    assert [line.split() for line in lines[2:]] == [
        ["words", "words-0", "-", "1", "0", "-", "-"],
        ["count", "count-1", "values", "2", "3", "2.0", "KiB", "key", "string,", "value", "int64"],
    ]
    count = printed(run("state", "show", place.format(directory), "--json"))["operators"][1]
    assert (count["rows"], count["parts"][0]["columns"]) == (3, {"key": "string", "value": "int64"})


def test_the_state_of_an_operator_is_a_table(directory: Path, run: Run) -> None:
    place = str(directory / "s2")
    lines = run("state", "show", place, "--operator", "count").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["key", "value"], ["string", "int64"], ["the", "3"], ["a", "1"], ["ccc", "3"],
    ]  # fmt: skip
    one = printed(run("state", "show", place, "--operator", "count-1", "--key", "ccc", "--json"))
    assert one == {"operator": "count-1", "rows": [{"key": "ccc", "value": 3}]}
    none = run("state", "show", place, "--operator", "count", "--key", "nobody")
    assert none.stdout == "operator count has no state of the key nobody\n"


def test_a_newer_broken_snapshot_is_passed_over(directory: Path, run: Run) -> None:
    harm(directory / "s2" / "1-1-1.state")
    for place in (str(directory), "j1"):
        found = run("state", "show", place, "--operator", "count")
        assert found.exit_code == 0
        assert f"passed over: {directory}/s2/1-1-1.state was changed" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("show", "j9"), "there is no directory j9, and no snapshot j9 or of a job j9 in"),
        (("show", "{}/s1", "--key", "a"), "--part and --key are of an operator: name it with --operator"),
        (("show", "{}/s1", "--operator", "cuont"), "has no operator 'cuont': did you mean 'count'?"),
        (("rm", "{}"), "is no snapshot: 'minishuffle state list' shows those of a directory"),
        (("rm", "{}/other"), "/other is the last whole snapshot of job j2 (words) there: --force removes it"),
        (("rm", "{}/new"), "somebody may be writing it; --force removes it"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], why: str, directory: Path, run: Run) -> None:
    result = run("state", *(each.format(directory) for each in arguments))
    assert result.exit_code == 2
    assert why in result.stderr
    assert len(list(directory.iterdir())) == 4


def test_a_snapshot_is_removed_while_another_whole_one_stays(directory: Path, run: Run) -> None:
    assert run("state", "rm", "s2").stdout == f"removed {directory}/s2\n"
    assert run("state", "rm", str(directory / "s1")).exit_code == 2
    assert printed(run("state", "rm", str(directory / "s1"), "--force", "--json"))["removed"] == [
        f"{directory}/s1"
    ]
    assert sorted(path.name for path in directory.iterdir()) == ["new", "other"]


def test_one_that_only_seems_whole_does_not_count(directory: Path, run: Run) -> None:
    harm(directory / "s1" / "1-0-1.state")
    refused = run("state", "rm", str(directory / "s2"))
    assert (refused.exit_code, "last whole snapshot of job j1" in refused.stderr) == (2, True)
    (directory / "s1" / "1-1-1.state").unlink()
    assert run("state", "rm", str(directory / "s1")).exit_code == 0


def test_the_newest_of_each_job_are_kept(directory: Path, run: Run) -> None:
    old = (directory / "new" / "0-0-1.state").stat().st_mtime - UNFINISHED_SNAPSHOT_SECONDS - 60
    os.utime(directory / "new" / "0-0-1.state", (old, old))
    harm(directory / "s2" / "1-1-1.state")
    refused = run("state", "rm", str(directory), "--keep", "1")
    assert refused.exit_code == 1
    assert f"{directory}/s2/1-1-1.state was changed" in refused.stderr
    harm(directory / "s2" / "1-1-1.state")
    removed = printed(run("state", "rm", str(directory), "--keep", "1", "--json"))["removed"]
    assert sorted(removed) == [f"{directory}/new", f"{directory}/s1"]
    assert run("state", "rm", str(directory), "--keep", "1").stdout == f"nothing to remove in {directory}\n"


def test_what_snapshots_take_is_summed(directory: Path, own_state: Path) -> None:
    session = Session(state_dir=own_state)
    use = snapshot_use(session, {"j1"})
    (directory / "other" / "manifest").unlink()
    assert (use["directory"], use["count"], use["ended_count"]) == (str(directory), 4, 1)
    assert 0 < use["ended_bytes"] < use["bytes"]
    assert snapshot_use(session, set())["ended_count"] == 2
    assert snapshot_use(Session(state_dir=directory), set()) == {}


@pytest.mark.parametrize(
    ("text", "also"),
    [
        ("ann", None),
        ("3", 3),
        ("1.10", Decimal("1.10")),
        ("-inf", -math.inf),
        ("sNaN", None),
        ("('a', 1)", ("a", 1)),
        ("2026-01-02", date(2026, 1, 2)),
        ("2026-01-02 03:04", datetime(2026, 1, 2, 3, 4)),
        ("12345678-1234-5678-1234-567812345678", UUID("12345678-1234-5678-1234-567812345678")),
        ("[1]", None),
    ],
)
def test_a_key_is_a_text_or_what_that_says(text: str, also: Any) -> None:
    found = keys_meant(text)
    assert found[0] == text
    assert also in found if also is not None else len(found) == 1

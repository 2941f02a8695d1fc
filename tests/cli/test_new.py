"""``minishuffle new``: the project runs as it is written, and is written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
SECONDS_MAX = 300
FILES = ["README.md", "orders.jsonl", "orders.py", "pyproject.toml", "test_cluster.py", "test_orders.py"]
PRINTED = """\
09:00 ann spent 20.00
09:00 bob spent 4.00
10:00 bob spent 9.90
09:50 ann came too late with 1.00
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs: empty."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def refused(run: Run, name: str) -> str:
    result = run("new", "--", name)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr


def test_a_project_has_its_name_and_short_instructions(run: Run, here: Path) -> None:
    (here / "my-shop").mkdir()  # An empty folder is as good as none.
    result = run("new", "my-shop")
    assert result.exit_code == 0, result.output
    assert "  cd my-shop\n  python orders.py\n  python -m pip install pytest\n" in result.stdout
    assert [path.name for path in here.iterdir()] == ["my-shop"]
    assert sorted(path.name for path in (here / "my-shop").iterdir()) == FILES
    readme = (here / "my-shop" / "README.md").read_text()
    assert readme.startswith("# my-shop\n")
    assert len([line for line in readme.splitlines() if line]) <= 10
    assert "`python -m pip install pytest`" in readme
    project = tomllib.loads((here / "my-shop" / "pyproject.toml").read_text())
    assert project["dependency-groups"] == {"dev": ["pytest>=8.3"]}
    umask = os.umask(0)
    os.umask(umask)
    assert (here / "my-shop").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("name", ["", "9lives", "a/b", "..", "-x", "na\u00efve", "a b", "a\n", "a" * 65])
def test_what_is_no_name_is_refused(run: Run, here: Path, name: str) -> None:
    assert "is no name for a project: write up to 64 letters" in refused(run, name)
    assert list(here.iterdir()) == []


def test_a_name_that_hides_a_module_of_python_is_refused(run: Run, here: Path) -> None:
    said = "'json' is a module of Python, which a folder of that name may hide: choose another one"
    assert f"{said}, such as 'json-job'" in refused(run, "json")
    assert list(here.iterdir()) == []


def test_what_is_there_stays(run: Run, here: Path) -> None:
    (here / "full").mkdir()
    (here / "full" / "orders.py").write_text("mine")
    (here / "file").write_text("mine")
    (here / "link").symlink_to("nowhere")
    for name in ("full", "file", "link"):
        assert f"{name} exists already, and is no empty folder: choose another name" in refused(run, name)
    assert sorted(path.name for path in here.iterdir()) == ["file", "full", "link"]
    assert [path.read_text() for path in (here / "full").iterdir()] == ["mine"]


def test_nothing_is_left_half_done(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write_text(path: Path, text: str, **options: str) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", write_text)
    assert f"shop cannot be written into {here}: No space left on device" in refused(run, "shop")
    assert len(written) == 3
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 30)
def test_the_commands_of_its_document_work(run: Run, here: Path) -> None:
    """Those that start a cluster take free ports here."""
    assert run("new", "shop").exit_code == 0
    commands = re.findall("^    (.*)$", (here / "shop" / "README.md").read_text(), re.MULTILINE)
    ports = "--port 0 --web-port 0"
    shell = f"""
minishuffle() {{ [ "$1 $2" != "cluster up" ] || set -- "$@" {ports}; command minishuffle "$@"; }}
trap 'minishuffle cluster down >down.log 2>&1 || cat down.log >&2' EXIT
set -ex
{chr(10).join(commands[:-1])}
"""
    assert commands[-1] == "minishuffle cluster down"
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=here / "shop",
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(PRINTED)
    assert "= 3 passed in " in done.stdout, done.stdout
    late = "'at': datetime.datetime(2026, 3, 1, 9, 50"
    assert late in done.stdout.partition("\nlate:\n")[2]
    assert "\nwarning" not in done.stdout.lower() + done.stderr.lower()

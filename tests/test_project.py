"""What is in the project's folder, and what is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import minishuffle

ROOT = Path(__file__).resolve().parents[1]

# Put together, so that this file does not find itself.
LEFTOVER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")

TOP_LEVEL = frozenset(
    [
        "pyproject.toml",
        "README.md",
        "minishuffle",
        "tests",
        "deploy",
        "scripts",
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "requirements.lock",
        "requirements-docs.lock",
        "requirements-spark.lock",
    ]
)
LOCKS = ("requirements.lock", "requirements-spark.lock", "requirements-docs.lock")
BUILT = frozenset({"build", "dist", "__pycache__"})
"""Made by tools, never committed."""


def test_the_top_level_holds_what_it_should() -> None:
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    there = {name for name in there - BUILT if not name.endswith(".egg-info")}
    assert there <= TOP_LEVEL, f"{sorted(there - TOP_LEVEL)} does not belong at the top level"
    assert there >= TOP_LEVEL, f"{sorted(TOP_LEVEL - there)} is missing"


def test_nothing_is_left_for_later() -> None:
    folders = (ROOT / "minishuffle", ROOT / "tests")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert files
    files += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    files += [ROOT / "Makefile", ROOT / "README.md"]
    files += [*(ROOT / "minishuffle").rglob("README.md"), *(ROOT / "deploy").rglob("*.*")]
    found = {str(path): LEFTOVER.search(path.read_text(encoding="utf-8")) for path in files}
    assert not [f"{name}: {match[0]}" for name, match in found.items() if match]


def test_processes_of_the_tests_keep_the_bytecode_that_python_compiles() -> None:
    command = [
        "make",
        "--no-print-directory",
        "--eval",
        "print: ; @printenv PYTHONDONTWRITEBYTECODE || echo unset",
        "print",
    ]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert printed.stdout == "unset\n", printed.stdout + printed.stderr


PYTHON_THAT_NOTES = """#!/bin/sh
# Splits PIP_CONSTRAINT at blanks, as pip does.
for file in ${PIP_CONSTRAINT-}; do
    [ -f "$file" ] || { echo "ERROR: no constraints in '$file'"; exit 1; }
done
case "$*" in *" pip install "*) echo "$*" >>asked ;; *"-m venv"*) echo "made anew" >>asked ;; esac
"""


def test_each_form_adds_what_it_needs_to_the_same_environment(tmp_path: Path) -> None:
    """In a folder with a blank in its name."""
    clone = tmp_path / "with space"
    (clone / "scripts").mkdir(parents=True)
    for name in ("scripts/bootstrap", *LOCKS, "pyproject.toml"):
        shutil.copy(ROOT / name, clone / name)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON_THAT_NOTES)
    python.chmod(0o755)

    def asked(*form: str) -> list[list[str]]:
        """The locks of each installation; the package itself has none."""
        (clone / "asked").write_text("")
        script = clone / "scripts" / "bootstrap"
        made = subprocess.run([script, *form], capture_output=True, text=True, timeout=60)
        assert made.returncode == 0, made.stderr
        lines = (clone / "asked").read_text().splitlines()
        assert "made anew" not in lines
        assert ("done: .venv is ready" in made.stderr) == bool(lines)
        return [re.findall(r"--requirement=(\S+)", line) for line in lines]

    assert asked("--try") == [["requirements.lock"], []]
    assert asked("--try") == []
    assert asked() == [["requirements.lock", "requirements-spark.lock"], []]
    assert asked() == asked("--try") == []
    assert asked("--docs") == [["requirements.lock", "requirements-docs.lock"], []]
    assert asked("--docs") == asked() == []
    (clone / "requirements-spark.lock").write_text("pyspark==4.3.1\n")
    assert asked("--try") == []
    assert asked() == [["requirements.lock", "requirements-spark.lock"], []]


def test_a_look_and_the_fast_tests_need_one_lock_and_no_more() -> None:
    for target in ("try", "test-fast", "lint", "fmt", "dist"):
        command = ["make", "--no-print-directory", "--dry-run", target]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert re.findall(r"scripts/bootstrap.*", printed.stdout) == ["scripts/bootstrap --try"], target


def test_the_same_pythons_are_allowed_everywhere() -> None:
    def text_of(name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    first, after = map(
        int, re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text_of("pyproject.toml"))[0]
    )
    minors = [f"3.{minor}" for minor in range(first, after)]
    assert re.findall(r"Python :: (3\.\d+)", text_of("pyproject.toml")) == minors
    assert f"MINORS=({' '.join(minors)})" in text_of("scripts/build-dist")
    assert f"RANGE='(3, {first}) <= sys.version_info[:2] <= (3, {after - 1})'" in text_of("scripts/bootstrap")
    for name in ("Makefile", "README.md", "deploy/README.md", *LOCKS):
        assert f"Python {minors[0]} to {minors[-1]}" in text_of(name), name


SECTION_BYTES_MAX = 12_000
"""Of a version in the changelog: what its users have to know, and not all that was done."""


def test_the_newest_version_of_the_changelog_is_that_of_the_package_and_short() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    newest = next(each for each in sections if not each.startswith("[Unreleased]"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert re.findall(r"^\[(.+)\] - \d{4}-\d\d-\d\d$", newest, re.MULTILINE) == [project["version"]]
    assert minishuffle.__version__ == project["version"]
    assert max(len(each.encode()) for each in sections) <= SECTION_BYTES_MAX


def test_the_wheel_has_the_page_as_it_is_built_and_not_its_sources(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith("minishuffle/web/page/")]
    built = {path.name for path in (ROOT / "minishuffle" / "web" / "page" / "built").iterdir()}
    assert {"index.html", "app.js", "style.css"} <= built
    assert {name.removeprefix("minishuffle/web/page/built/") for name in names} == built

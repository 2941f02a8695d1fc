"""Which Java is found, and what is said of one that will not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from minishuffle.errors import UsageError
from minishuffle.spark.session import INSTALL, checked_java, find_java

SCRIPT = """\
#!/bin/sh
case "$1" in
-version) echo '{version}' >&2 ;;
--list-modules) printf '%s\\n' {modules} ;;
esac
"""
MODULES = "java.base@17.0.15 jdk.incubator.vector@17.0.15"


def install(
    home: Path, version: str = 'openjdk version "17.0.15" 2025-04-15', modules: str = MODULES
) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(SCRIPT.format(version=version, modules=modules))
    java.chmod(0o755)
    return java


def refusal() -> str:
    with pytest.raises(UsageError) as raised:
        checked_java()
    text = str(raised.value)
    assert INSTALL in text and "\n" not in text
    return text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What JAVA_HOME names; nothing is there yet."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    return tmp_path / "java"


def test_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_java() is None
    assert "there is none" in refusal()


@pytest.mark.parametrize(
    "version, number",
    [
        ('openjdk version "17.0.15" 2025-04-15', "17.0.15"),
        ('java version "21" 2023-09-19 LTS', "21"),
        ('openjdk version "26-ea" 2026-03-17', "26-ea"),
    ],
)
def test_one_that_will_do(home: Path, version: str, number: str) -> None:
    java = install(home, version)
    found = checked_java()
    assert (found.path, found.version, found.lacks) == (java, number, "")


@pytest.mark.parametrize("version", ['openjdk version "1.8.0_402"', 'openjdk version "11.0.22" 2024-01-16'])
def test_one_that_is_too_old(home: Path, version: str) -> None:
    java = install(home, version)
    text = refusal()
    assert str(java) in text and "older than Java 17" in text


def test_one_without_the_module_that_spark_adds(home: Path) -> None:
    install(home, modules="java.base@17.0.15")
    assert "lacks the module jdk.incubator.vector" in refusal()


def test_one_that_tells_no_version(home: Path) -> None:
    install(home, version="hello")
    assert "does not tell its version" in refusal()


def test_one_that_cannot_be_run(home: Path) -> None:
    install(home).chmod(0o644)
    assert "cannot be run (Permission denied)" in refusal()


def test_a_java_home_without_java(home: Path) -> None:
    text = refusal()
    assert "cannot be run (No such file or directory)" in text
    assert "let JAVA_HOME name that one or be unset" in text


def test_java_home_goes_before_the_path(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = install(tmp_path / "other", 'openjdk version "21.0.1"')
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    java = install(home)
    assert checked_java().path == java
    monkeypatch.delenv("JAVA_HOME")
    assert checked_java().path == other

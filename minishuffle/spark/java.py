"""Which Java Spark would start, and whether it will do: PySpark itself says only JAVA_GATEWAY_EXITED."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minishuffle.errors import UsageError

__all__ = ["INSTALL", "Java", "checked_java", "find_java"]

VERSION_MIN: Final = 17
MODULE: Final = "jdk.incubator.vector"
"""Spark starts every JVM with ``--add-modules`` of it, which ends one that lacks it."""
INSTALL: Final = "sudo apt-get install openjdk-17-jre-headless"
SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Java:
    """``lacks`` is empty if Spark can use it."""

    path: Path
    version: str
    lacks: str = ""


def find_java() -> Java | None:
    """The Java that Spark takes: ``$JAVA_HOME/bin/java``, else the first on the path; None: there is none."""
    home = os.environ.get("JAVA_HOME", "")
    found = Path(home) / "bin" / "java" if home else shutil.which("java")
    if found is None:
        return None
    path = Path(found)
    try:
        said = _output(path, "-version")
        version = re.search(r'version "([^"]+)"', said)
        if version is None:
            return Java(path, "", "it does not tell its version")
        number = version[1]
        if _major(number) < VERSION_MIN:
            return Java(path, number, f"it is older than Java {VERSION_MIN}")
        modules = _output(path, "--list-modules")
    except OSError as error:
        return Java(path, "", f"it cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return Java(path, "", f"it does not answer within {SECONDS_MAX:g} s")
    if MODULE not in modules:
        return Java(path, number, f"it lacks the module {MODULE}")
    return Java(path, number)


def _output(path: Path, flag: str) -> str:
    ran = subprocess.run([path, flag], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    return ran.stdout + ran.stderr


def _major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_402"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def checked_java() -> Java:
    """A Java that Spark can use.

    Raises:
        UsageError: there is none; the text has the command that installs one.
    """
    java = find_java()
    if java is None:
        raise UsageError(f"Spark needs Java {VERSION_MIN} or newer, and there is none: run '{INSTALL}'")
    if java.lacks:
        raise UsageError(
            f"Spark cannot use the Java at {java.path}: {java.lacks}; run '{INSTALL}', and let JAVA_HOME "
            "name that one or be unset"
        )
    return java

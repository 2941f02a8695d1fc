"""The public names, and what importing the package must not cost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import minishuffle
from minishuffle import errors

HEAVY = ["uvloop", "pyarrow", "pandas", "pyspark", "click", "prometheus_client"]


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    root = Path(minishuffle.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = modules_after("import minishuffle; minishuffle.__version__")
    assert "minishuffle" in loaded
    assert not loaded.intersection(HEAVY)


@pytest.mark.slow
def test_processes_and_commands_load_what_they_use() -> None:
    """Each process of a cluster imports the one, each ``minishuffle jobs`` the other."""
    assert not modules_after("import minishuffle.cli.worker").intersection(["numpy", "pyarrow", "rich"])
    assert not modules_after("import minishuffle.cli.jobs").intersection(["numpy", "pyarrow"])


def test_the_stream_module_leaves_arrow_for_later() -> None:
    loaded = modules_after("from minishuffle import Stream, KeyedStream, UsageError")
    assert "minishuffle.api.stream" in loaded
    assert not loaded.intersection(HEAVY)


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "minishuffle", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"minishuffle, version {minishuffle.__version__}\n"


@pytest.mark.parametrize("name", minishuffle.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(minishuffle, name)
    assert value is not None
    if isinstance(value, type):
        assert value.__name__ == name


def test_every_error_class_is_public() -> None:
    assert {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} <= set(
        minishuffle.__all__
    )


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse(Path(minishuffle.__file__).read_text(encoding="utf-8"))
    seen = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minishuffle.")
        for alias in node.names
    }
    assert seen == set(minishuffle._MODULE_OF.items())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Strem'"):
        minishuffle.Strem  # noqa: B018
    assert "Stream" in dir(minishuffle)

"""Import statements in a task's thread: its own modules first, and nobody else's."""

from __future__ import annotations

import builtins
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minishuffle.operators.base import ModuleSource
from minishuffle.worker.tasks.jobimports import import_from

SOURCES = {
    "helper": ModuleSource("import pack.inner\nfactor = 2\nseen = []\n", "/job/helper.py", False),
    "pack": ModuleSource("from . import inner\nname = __name__\n", "/job/pack/__init__.py", True),
    "pack.inner": ModuleSource(
        "from .other import value as here\nimport json\n", "/job/pack/inner.py", False
    ),
    "pack.other": ModuleSource("value = 7\n", "/job/pack/other.py", False),
    "broken": ModuleSource("1 / 0\n", "/job/broken.py", False),
}


@pytest.fixture(autouse=True)
def _plain_imports() -> Iterator[None]:
    before = builtins.__import__
    yield
    builtins.__import__ = before


def in_a_thread(code: str, sources: dict[str, ModuleSource] = SOURCES) -> dict[str, Any]:
    """What a task's function sees that runs this code."""
    found: dict[str, Any] = {"__name__": "job"}

    def run() -> None:
        import_from(sources)
        try:
            exec(code, found)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20.0)
    return found


def test_modules_and_packages_of_the_job_are_imported() -> None:
    found = in_a_thread(
        "import helper\nimport pack.inner as inner\nfrom pack import other, name\nimport pack.other\n"
        "import json, os.path\nfrom os import path\n"
    )
    assert "error" not in found, found
    assert found["helper"].factor == 2
    assert found["inner"].here == found["other"].value == found["pack"].other.value == 7
    assert (found["name"], found["json"]) == ("pack", json)
    assert found["helper"].pack.inner is found["inner"]
    assert not {"helper", "pack", "pack.inner"} & sys.modules.keys()


def test_each_task_has_its_own() -> None:
    """Also of the same name, and a module is loaded once in each."""
    code = "import helper\nhelper.seen.append(1)\nfrom helper import seen"
    assert in_a_thread(code)["seen"] == [1]
    assert in_a_thread(code)["seen"] == [1]
    other = {"helper": ModuleSource("seen = [9]", "/other/helper.py", False)}
    assert in_a_thread(code, other)["seen"] == [9, 1]
    with pytest.raises(ModuleNotFoundError):
        exec("import helper", {})


def test_what_a_module_raises_comes_as_it_is_and_what_is_not_there_is_not() -> None:
    assert isinstance(in_a_thread("import broken")["error"], ZeroDivisionError)
    missing = in_a_thread("import pack.absent")["error"]
    assert isinstance(missing, ModuleNotFoundError) and missing.name == "pack.absent"
    assert isinstance(in_a_thread("from pack import absent")["error"], ImportError)
    assert isinstance(in_a_thread("import absent_everywhere")["error"], ModuleNotFoundError)

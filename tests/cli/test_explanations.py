"""Explanations of errors: complete, and with examples that are printed as they stand there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from minishuffle import errors
from minishuffle.cli.explanations import explanations
from minishuffle.config import create_secret
from minishuffle.local import LocalCluster
from minishuffle.spark.session import SparkFailed
from support.sources import PACKAGE, ROOT, modules

Run = Callable[..., Result]
EXPLAINED = {each.number: each for each in explanations()}
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^```console\n\$ minishuffle (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOGGED = re.compile(r"^Example.*\n\n((?:    .*\n)+)", re.MULTILINE)
AT_A_TERMINAL = [number for number, each in EXPLAINED.items() if SESSION.search(each.text)]


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_each_class_of_errors_is_explained_and_no_other() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    expected = {cls.number: cls.__name__ for cls in (*classes, SparkFailed)}
    assert {number: each.name for number, each in EXPLAINED.items()} == expected
    assert list(EXPLAINED) == sorted(EXPLAINED)
    for each in EXPLAINED.values():
        assert re.findall(r"^(?:Cause|Example|Fix)\b", each.text, re.MULTILINE) == ["Cause", "Example", "Fix"]
        assert len(each.summary) <= 80


def test_each_code_that_is_mentioned_exists() -> None:
    files = [path for suffix in ("*.py", "*.md") for path in PACKAGE.rglob(suffix)]
    named = {number for path in (ROOT / "README.md", *files) for number in code_names(path)}
    assert named <= {*EXPLAINED, "MS-"}


def code_names(path: Path) -> list[str]:
    return re.findall(r"\bMS-\d*", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", ["MS-111", "ms-111", "ms111", "111", "UnknownName"])
def test_a_code_is_explained(code: str, run: Run) -> None:
    shown = run("explain", code).stdout
    assert shown.startswith("MS-111 UnknownName\n\nCause: nothing has that name. ")
    assert (
        "\n    $ minishuffle submit job.py:job --wait\n    minishuffle: job.py:4: key_by: there is no"
        in shown
    )
    assert "```" not in shown
    assert "\n\nFix: take one of the names " in shown


def test_without_a_code_all_are_listed(run: Run) -> None:
    lines = run("explain").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[each.number, each.name] for each in EXPLAINED.values()]
    assert lines[2] == "MS-111  UnknownName           nothing has that name"


@pytest.mark.parametrize(
    ("code", "hint"),
    [("MS-199", "did you mean MS-1"), ("PeerLots", "did you mean MS-140 (PeerLost)?"), ("x", "")],
)
def test_of_an_unknown_code_the_nearest_is_named(code: str, hint: str, run: Run) -> None:
    result = run("explain", code)
    assert result.exit_code == 2
    assert f"no error has the code {code!r}; {hint}" in result.stderr
    assert "'minishuffle explain' lists all" in result.stderr


def test_an_error_of_python_is_said_to_be_none_of_ours(run: Run) -> None:
    result = run("explain", "KeyError")
    assert result.exit_code == 2
    assert "KeyError is not of minishuffle: a function of yours raised it, and the traceback" in result.stderr
    assert "see 'minishuffle explain MS-160' (TaskFailed)" in result.stderr


# --- examples --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1, slots=1) as started:
        yield started


@pytest.mark.parametrize("number", AT_A_TERMINAL)
def test_an_example_prints_what_stands_there(
    number: str, cluster: LocalCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create_secret(tmp_path / "other-secret")
    place = str(cluster.client.address)
    for name, value in {"COORDINATOR": place, "SECRET_FILE": cluster.state_dir / "secret"}.items():
        monkeypatch.setenv(f"MINISHUFFLE_{name}", str(value))
    monkeypatch.setenv("MINISHUFFLE_CLUSTER", "local")
    for program in PROGRAM.findall(EXPLAINED[number].text):
        (tmp_path / "job.py").write_text(program)
    ports = {place: "127.0.0.1:8471", f"127.0.0.1:{cluster.web_port}": "127.0.0.1:8472"}
    for command, expected in SESSION.findall(EXPLAINED[number].text):
        for real, written in ports.items():
            command = command.replace(written, real)
        printed = run(*command.split()).output
        for real, written in ports.items():
            printed = printed.replace(real, written)
        pattern = re.escape(one_line(expected)).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, one_line(printed)), printed
        says_all = EXPLAINED[number].name in ("ShuffleError", "UsageError")
        assert printed.rstrip().endswith(f"(minishuffle explain {number})") != says_all


def raised_texts() -> Iterator[tuple[str, str]]:
    """The name of each class with each text that the package raises it with, as a regular expression."""
    for module in modules(PACKAGE):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                yield node.func.id, pattern_of(node.args[0])


def pattern_of(text: ast.expr) -> str:
    if isinstance(text, ast.JoinedStr):
        return "".join(map(pattern_of, text.values))
    return re.escape(str(text.value)) if isinstance(text, ast.Constant) else ".+"


def test_an_example_of_a_log_is_a_text_that_the_package_raises() -> None:
    logged = {number: LOGGED.search(each.text) for number, each in EXPLAINED.items()}
    shown = {number: one_line(found[1]) for number, found in logged.items() if found}
    assert set(shown) | set(AT_A_TERMINAL) == set(EXPLAINED)
    del shown["MS-120"]  # A program's own lines: none raises it.
    del shown["MS-170"]  # Its text is put together: spark/test_session.py.
    patterns = [(name, re.compile(text)) for name, text in raised_texts() if text != ".+"]
    for number, text in shown.items():
        name = EXPLAINED[number].name
        assert [each for owner, each in patterns if owner == name and each.fullmatch(text)], text

"""What the documents show runs as it is printed: Python blocks, and sessions at a terminal.

A session types the commands of a ```` ```console ```` block one by one into one shell. Printed output is
compared word for word, except for numbers that differ from run to run; ``...`` stands for any words or lines.
"""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from minishuffle.examples.wordcount import SHIPPED_TEXT
from support.documents import ROOT, SPARK, Block, blocks, sections
from support.ports import free_ports

pytestmark = pytest.mark.slow

CLI = "minishuffle/cli/README.md"
DATAFLOW = "minishuffle/api/README.md"
TEXT = "moby.txt"
SECONDS_MAX = 60.0

AS_PRINTED = {
    "Positions of a source's own": 1,
    "Results": 1,
    "Several sinks": 1,
    "A first look": 1,
    "Testing your job": 3,
    "Side outputs": 1,
    "Your own metrics": 1,
    "Asynchronous functions": 1,
    "Tables": 3,
    "Event time": 1,
    "Reading files": 1,
    "Joins": 1,
    "Process functions": 1,
}
"""Sections with so many programs and, below each, what that program prints."""

RUN = {
    ("README.md", "A job, and a kill"): 1,
    (DATAFLOW, "Word count"): 1,
    **{(DATAFLOW, title): count for title, count in AS_PRINTED.items()},
    (DATAFLOW, "Your own job"): 1,
    (DATAFLOW, "From a program"): 1,
    (SPARK, "Your own Parquet files"): 2,
}
"""By document and section, the number of Python blocks that a test runs: below, those of Spark in
``cli/test_pipeline.py``."""


def test_every_python_block_of_every_document_is_run() -> None:
    there: Counter[tuple[str, str]] = Counter()
    for path in (ROOT / "README.md", *(ROOT / "minishuffle").rglob("README.md")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for title, found in sections(name):
            there[name, title] += sum(block.language == "python" for block in found)
        assert text.count("\n```python\n") == sum(n for (at, _), n in there.items() if at == name), name
    assert +there == Counter(RUN)


# --- programs --------------------------------------------------------------------------------------


def run_program(code: str, folder: Path) -> str:
    """The standard output of a program that prints no error, which begins with imports of its own."""
    (folder / "program.py").write_text(code)
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.timeout(120)
def test_the_word_count_runs_as_printed(tmp_path: Path) -> None:
    (word_count,) = blocks(DATAFLOW, "Word count")
    assert TEXT in word_count.code
    shutil.copy(SHIPPED_TEXT, tmp_path / TEXT)
    printed = dict(re.findall(r"^(.*\S)[ \t]+(\d+)$", run_program(word_count.code, tmp_path), re.MULTILINE))
    expected = Counter(word for line in SHIPPED_TEXT.read_text().splitlines() for word in line.split())
    assert printed
    assert printed.items() <= {word: str(count) for word, count in expected.items()}.items()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("title", AS_PRINTED)
def test_the_examples_of_a_section_print_what_is_printed_there(
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is the main program, in this process, which has imported all that it imports."""
    monkeypatch.chdir(tmp_path)
    for number, example in enumerate(blocks(DATAFLOW, title)):
        assert example.printed
        program = tmp_path / f"program_{number}.py"
        program.write_text(example.code)
        runpy.run_path(str(program), run_name="__main__")
        assert capfd.readouterr() == (example.printed, "")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# --- sessions --------------------------------------------------------------------------------------

LOOKS = (
    "minishuffle cluster status",
    "minishuffle jobs show",
    "minishuffle jobs logs",
    "minishuffle jobs events",
)
"""Commands that only look, typed again until their output is the printed one."""


def shapes(text: str) -> list[str]:
    """The words of a text, in which numbers that differ from run to run are all the same."""
    text = re.sub(r"\b(?:[KMG]iB|B)\b", "bytes", re.sub(r"\b(worker|parallelism) (\d+)", r"\1_\2", text))
    text = re.sub(r"\b\d+ min (\d+ s)\b", r"\1", text)  # On a machine that is slow.
    exact = re.compile(r"j\d+|\(?(?:worker|parallelism)_\d+|.*\[\d+\]:?|\d+/\d+")
    return [
        word if exact.fullmatch(word) else re.sub(r"\d[\d,]*(?:\.\d+)?", "#", word) for word in text.split()
    ]


def differs(printed: list[str], seen: str) -> str:
    """What the document prints that is not there in that order; empty if the two agree."""
    chunks: list[list[str]] = [[]]
    for word in shapes("\n".join(printed)):
        if word == "...":
            chunks.append([])
        else:
            chunks[-1].append(word)
    words, at = shapes(seen), 0
    for number, chunk in enumerate(chunks):
        size = len(chunk)
        places = [0] if number == 0 else list(range(at, len(words) - size + 1))
        if number == len(chunks) - 1:
            open_end = number > 0 and not chunk  # "..." is the last word.
            places = [place for place in places if place + size == len(words) or open_end]
        found = next((place for place in places if words[place : place + size] == chunk), None)
        if found is None:
            return f"{' '.join(chunk)!r} is not in\n{seen}"
        at = found + size
    return ""


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that are printed below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


class Terminal:
    """A shell with a state directory of its own, in which ``cluster up`` takes free ports."""

    END = "command-ended"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, web_port = free_ports(2)
        self._left: dict[int, float] = {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PATH": path}
        environment["MINISHUFFLE_HEARTBEAT_TIMEOUT"] = str(SECONDS_MAX)  # A stall is not what is shown.
        environment.pop("MINISHUFFLE_COORDINATOR", None)
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ports = f"--port {self.port} --web-port {web_port}"
        self.type(
            'minishuffle() { if [ "$1 $2" = "cluster up" ]; then set -- "$@" ' + ports + "; fi; "
            'command minishuffle "$@"; }'
        )

    def type(self, line: str, code: int = 0) -> str:
        """Type one line and wait for its end; gives what it printed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\necho {self.END} $?\n".encode())
        self.process.stdin.flush()
        out, deadline = b"", time.monotonic() + SECONDS_MAX
        while not (end := re.search(rf"^{self.END} (\d+)\n\Z".encode(), out, re.MULTILINE)):
            seconds = deadline - time.monotonic()
            assert seconds > 0 and select.select([self.process.stdout], [], [], seconds)[0], (
                f"{line}: {out!r}"
            )
            piece = os.read(self.process.stdout.fileno(), 65_536)
            assert piece, f"{line} ended the shell: {out!r}"
            out += piece
        seen = out[: end.start()].decode()
        assert int(end[1]) == code, f"{line} gave {int(end[1])}: {seen}"
        return seen

    def play(self, block: Block) -> None:
        """Type every command of a block and compare what it prints."""
        for command, printed in commands(block):
            difference = differs(printed, self.type(command))
            if command.startswith("minishuffle cluster up"):
                self._left = self.processes()
            deadline = time.monotonic() + SECONDS_MAX
            while difference and command.startswith(LOOKS) and time.monotonic() < deadline:
                difference = differs(printed, self.type(command))
            assert difference == "", command

    def processes(self) -> dict[int, float]:
        """Process ids, each with its start, of the cluster that is up."""
        record = self.folder / "state" / "minishuffle" / "default" / "cluster.json"
        entries = json.loads(record.read_text())["processes"].values() if record.exists() else []
        return {entry["pid"]: entry["started"] for entry in entries}

    def running(self) -> list[psutil.Process]:
        """The processes of the cluster that was brought up, as far as they still run."""
        found = []
        for pid, started in (self._left | self.processes()).items():
            try:
                process = psutil.Process(pid)
                if abs(process.create_time() - started) < 2.0 and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def close(self) -> None:
        """Kill whatever is left; for tests that fail."""
        for process in self.running():
            process.kill()
        self.process.kill()
        self.process.communicate(timeout=SECONDS_MAX)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_output_is_compared_word_for_word() -> None:
    seen = "job j1 (keyby): running, 0.3 s\ngenerate[0]  running  1  1,200  4.0 KiB\ncount[0]  lost  1/2\n"
    for printed in (
        ["job j1 (keyby): running, 12.5 s", "..."],
        ["...", "generate[0] running 9 47 3 B", "count[0] lost 1/2"],
        ["job j1 (keyby): running, 1 s", "...", "count[0] lost 1/2"],
        ["job j1 (keyby): running, 2 min 32 s", "..."],
        ["job j1 ... 0.3 s", "...", "count[0] lost 1/2"],
    ):
        assert differs(printed, seen) == ""
    for printed in (
        ["job j2 (keyby): running, 0.3 s", "..."],
        ["generate[0] running 1 1,200 4.0 KiB", "..."],
        ["...", "count[0] lost 2/2"],
        ["...", "count[0] lost"],
        ["...", "generate[0] failed 1 1,200 4.0 KiB", "..."],
        [],
    ):
        assert differs(printed, seen) != ""
    assert differs(["job j3 (keyby) runs, parallelism 1"], "job j3 (keyby) runs, parallelism 2\n") != ""


@pytest.mark.timeout(240)
def test_the_quick_tour_works_when_it_is_typed_in_one_session(terminal: Terminal) -> None:
    (six,) = blocks(CLI, "Six commands", "console")
    (kill,) = blocks(CLI, "Kill a worker", "console")
    assert len(commands(six)) == 6
    terminal.play(six)
    assert len(terminal.running()) == 3
    terminal.play(kill)
    assert terminal.running() == []
    assert terminal.processes() == {}


@pytest.mark.timeout(240)
def test_the_first_job_joins_on_while_a_worker_is_killed(terminal: Terminal) -> None:
    (job,) = blocks("README.md", "A job, and a kill")
    (session,) = blocks("README.md", "A job, and a kill", "console")
    (terminal.folder / "ads.py").write_text(job.code)
    terminal.play(session)
    assert terminal.running() == []
    pairs = pq.read_table(terminal.folder / "pairs")
    assert pairs.schema.names == ["ad", "shown", "clicked"]
    clicked = pairs.filter(pc.is_valid(pairs["clicked"]))
    assert clicked.num_rows > 0
    assert clicked["clicked"].equals(clicked["shown"])


@pytest.mark.timeout(240)
def test_a_job_of_the_users_own_works_as_printed(terminal: Terminal) -> None:
    (own,) = blocks(DATAFLOW, "Your own job")
    (session,) = blocks(DATAFLOW, "Your own job", "console")
    (program,) = blocks(DATAFLOW, "From a program")
    (terminal.folder / "orders.py").write_text(own.code)
    terminal.play(Block("console", "$ minishuffle cluster up --detach\n...\n", ""))
    terminal.play(session)
    assert "127.0.0.1:8471" in program.code
    (terminal.folder / "program.py").write_text(program.code.replace(":8471", f":{terminal.port}"))
    assert terminal.type("python program.py") == program.printed
    terminal.play(Block("console", "$ minishuffle cluster down\ncluster 'default' is down\n...\n", ""))
    assert terminal.running() == []

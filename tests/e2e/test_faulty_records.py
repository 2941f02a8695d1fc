"""Records that cannot be read, in real processes: a job that ends at once, a worker killed between two."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle import LocalCluster, Table
from minishuffle.errors import TaskFailed
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.observe.leftout import left_out
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 60.0
LENGTH = 200_000
WRONG = (1_000, 150_000)
"""In the first and the third batch."""


@pytest.fixture(scope="module")
def one_worker() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1) as cluster:
        yield cluster


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """CSV with a line end in a quoted value before each record that is wrong."""
    lines = [f'{number},"a\nb"' for number in range(LENGTH)]
    for number in WRONG:
        lines[number] = f"x{number},c"
    (tmp_path / "a.csv").write_text("n,s\n" + "\n".join(lines) + "\n")
    return tmp_path / "a.csv"


def test_what_no_restart_mends_ends_the_job_at_its_first_attempt(
    one_worker: LocalCluster, file: Path
) -> None:
    table = Table.from_files(file, format="csv", schema={"n": int, "s": str})
    job = one_worker.submit(table.to_count(), parallelism=1)
    why = r"a\.csv, line 2002: column 'n' has 'x1000', which does not fit int64"
    with pytest.raises(TaskFailed, match=why):
        job.wait(timeout=SECONDS_MAX)
    assert {task.attempt for task in job.info().tasks} == {1}


def test_a_worker_killed_between_two_of_them_moves_neither(
    one_worker: LocalCluster, file: Path, tmp_path: Path
) -> None:
    killed = str(tmp_path / "killed")

    def dies_once(row: dict[str, Any]) -> int:
        if row["n"] == 100_000 and not os.path.exists(killed):
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        number: int = row["n"]
        return number

    schema = {"n": int, "s": str}
    table = Table.from_files(file, format="csv", schema=schema, on_error="dead_letter")
    stream = table.to_rows().map(dies_once).collect()
    job = one_worker.submit(stream, parallelism=1, settings=JobSettings(source_lease=0))
    rows = set(job.rows(allow_loss=True))
    assert {task.attempt for task in job.info().tasks} == {2}
    letters = [line for line in job.logs() if "dead letter: " in line]
    found = {match.groups() for line in letters if (match := re.search(r"record (\d+), .*: (.*)", line))}
    said = [(str(n + 1), f"text 'x{n},c'") for n in WRONG]
    # What was in hand, or not sent yet, died with the worker.
    assert said[1] in found
    assert found <= set(said)
    good = set(range(LENGTH)) - set(WRONG)
    assert {n for n in good if n >= 2 * BATCH_ROWS_MAX} <= rows <= good
    assert 1 <= left_out(job.info())["dead_letters"] <= 3

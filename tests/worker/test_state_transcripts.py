"""What happens to the machine of a worker, and what comes out: see ``support.transcripts``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from minishuffle.worker.instructions import Instruction, Report, Send
from support.transcripts import WorkerTranscript, check, sent_to_workers, taken_and_given, word_of

DIRECTORY = Path(__file__).parent / "transcripts"
COORDINATOR = Path(__file__).parents[1] / "coordinator" / "transcripts"
FILES = sorted(DIRECTORY.glob("*.txt"))
OF_THE_SHELL = {"registered", "failure"}
"""Answers to a registration: the machine begins with one."""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_a_worker_does_is_what_the_transcript_says(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, WorkerTranscript, rewrites=request.config.getoption("--rewrite-transcripts"))


def test_every_message_for_workers_and_every_instruction_is_in_a_transcript() -> None:
    taken, given = taken_and_given(DIRECTORY)
    assert sent_to_workers(COORDINATOR) - taken == OF_THE_SHELL
    assert {word_of(each) for each in get_args(Instruction)} - given == {word_of(Send), word_of(Report)}

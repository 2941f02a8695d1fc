"""What happens to the coordinator's machine, and what comes out: see ``support.transcripts``."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from minishuffle.coordinator.instructions import Instruction, Reply, SendToWorker
from minishuffle.wire.messages import ControlMessage
from support.transcripts import FACTS, CoordinatorTranscript, check, taken_and_given, word_of

DIRECTORY = Path(__file__).parent / "transcripts"
FILES = sorted(DIRECTORY.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_comes_out_is_what_the_transcript_says(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, CoordinatorTranscript, rewrites=request.config.getoption("--rewrite-transcripts"))


def test_every_message_and_every_instruction_is_in_a_transcript() -> None:
    taken, given = taken_and_given(DIRECTORY)
    kinds = set(ControlMessage.by_type) - {"attempt_report"} | set(FACTS)
    assert kinds - taken - given == set()
    instructions = {word_of(each) for each in get_args(Instruction) if each not in (SendToWorker, Reply)}
    assert instructions - given == set()

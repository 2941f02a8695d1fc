"""What happens to the coordinator's machine, and what comes out: see ``support.transcripts``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transcripts import CoordinatorTranscript, check

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_comes_out_is_what_the_transcript_says(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, CoordinatorTranscript, rewrites=request.config.getoption("--rewrite-transcripts"))

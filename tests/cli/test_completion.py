"""Completion of commands and options by a shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
SECONDS_MAX = 60
TYPED = """
eval "$(minishuffle completion bash)"
complete_it() { # complete_it WORD...: what bash offers for the last of these words
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "$(complete -p minishuffle | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" minishuffle
    echo "${COMPREPLY[*]}"
}
complete_it minishuffle clu
complete_it minishuffle cluster u
complete_it minishuffle completion ""
complete_it minishuffle cluster up --detac
"""


def test_bash_completes_commands_options_and_values() -> None:
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", TYPED],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["cluster", "up", "bash zsh fish", "--detach"]


@pytest.mark.parametrize(
    ("shell", "registers", "words"),
    [
        ("zsh", "compdef _minishuffle_completion minishuffle", ("minishuffle clu", "1")),
        ("fish", "complete --no-files --command minishuffle", ("minishuffle clu", "clu")),
    ],
)
def test_other_shells_get_a_script_and_its_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch, shell: str, registers: str, words: tuple[str, str]
) -> None:
    script = run("completion", shell).output
    assert registers in script and f"_MINISHUFFLE_COMPLETE={shell}_complete" in script
    monkeypatch.setenv("_MINISHUFFLE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", words[0])
    monkeypatch.setenv("COMP_CWORD", words[1])
    answer = run().output
    assert "cluster" in answer and "submit" not in answer

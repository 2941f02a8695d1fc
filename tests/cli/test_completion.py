"""Completion by a shell: commands, options and what they name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
SECONDS_MAX = 60
TYPED = """
eval "$(minishuffle completion bash)"
compopt() { echo "compopt $2"; }
complete_it() { # complete_it WORD...: what bash offers for the last of these words
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "$(complete -p minishuffle | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" minishuffle
    echo "${COMPREPLY[*]}"
}
complete_it minishuffle clu
complete_it minishuffle cluster u
complete_it minishuffle completion ""
complete_it minishuffle cluster up --detac
complete_it minishuffle submit key
complete_it minishuffle submit keyby --set fl
complete_it minishuffle explain ms-11
complete_it minishuffle submit slow
complete_it minishuffle submit wordcount --set buffer_t
complete_it minishuffle jobs show ""
complete_it minishuffle worker kill ""
complete -p minishuffle
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
    lines = done.stdout.splitlines()
    assert lines[:4] == ["cluster", "up", "bash zsh fish", "--detach"]
    assert lines[4:6] == ["compopt default", "keyby"]
    assert lines[6:8] == ["compopt nospace", "floating_buffers_per_gate= flow_control="]
    assert "MS-111" in lines[8].split() and "MS-101" not in lines[8]
    assert lines[9:11] == ["compopt default", ""], "files: there is no such built-in job"
    assert lines[11:13] == ["compopt nospace", "buffer_timeout="]
    assert lines[13:15] == ["", ""], "silence where no cluster runs"
    assert "-o default" in lines[15], "files where nothing fits"


def test_what_the_cluster_has_completes_what_names_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, own_state: Path
) -> None:
    timeouts: list[float] = []

    class Cluster:
        def __init__(self, *_: Any, timeout: float, **__: Any) -> None:
            timeouts.append(timeout)

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None: ...

        def jobs(self, *, tasks: bool) -> list[SimpleNamespace]:
            return [SimpleNamespace(job=job, name="keyby", state="running") for job in ("j5", "j12")]

        def job(self, job: str) -> SimpleNamespace:
            return SimpleNamespace(
                tasks=[SimpleNamespace(name=f"map-{job} -> sink", index=i) for i in (0, 1)]
            )

        def workers(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(worker=n, state=state) for n, state in ((1, "alive"), (2, "lost"))]

    def offered(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", f"minishuffle {' '.join(words)}")
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return [line.partition(",")[2] for line in run().output.splitlines()]

    monkeypatch.setattr("minishuffle.cli.session.Client", Cluster)
    monkeypatch.setenv("_MINISHUFFLE_COMPLETE", "bash_complete")
    own_state.mkdir(parents=True)
    (own_state / "secret").write_text("s" * 32)
    (own_state / "secret").chmod(0o600)
    for command in ("jobs show", "jobs cancel", "top", "diagnose", "dump", "trace", "tap", "profile"):
        assert offered(*command.split(), "j1") == ["j12"], command
    assert offered("profile", "j5", "--task", "map") == ["map-j5[0]", "map-j5[1]"]
    for command in ("worker kill", "worker drain", "dump --worker"):
        assert offered(*command.split(), "''") == ["1"], command
    assert max(timeouts) <= 0.25


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

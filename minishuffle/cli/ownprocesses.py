"""Processes of this user's: whether those on record run, and which there are of a cluster without a record.

Where state directory or secret are gone, nothing on the disk says where a cluster is: its processes are found
by their command lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from minishuffle.config import ENVIRONMENT_PREFIX, default_state_dir
from minishuffle.errors import UsageError

__all__ = ["LAUNCHER", "alive", "is_minishuffle", "is_stopped", "own_processes", "role"]

LAUNCHER = "'cluster up'"
"""The command that has started the others, and looks after them unless it has detached them."""
START_TIME_TOLERANCE_SECONDS = 2.0
ROLES = {
    ("coordinator", "start"): "coordinator",
    ("worker", "start"): "worker",
    ("cluster", "up"): LAUNCHER,
}
_PROGRAMS = frozenset({"minishuffle", "minishuffle.cli"})


def is_minishuffle(pid: int, started: float | None = None) -> bool:
    """Whether process ``pid`` runs and is one of ours.

    ``started`` (seconds since the epoch) guards against a process id that was given again.
    """
    try:
        process = psutil.Process(pid)
        names = {os.path.basename(word) for word in process.cmdline()[:3]}
        if process.status() == psutil.STATUS_ZOMBIE or not names & _PROGRAMS:
            return False
        return started is None or abs(process.create_time() - started) < START_TIME_TOLERANCE_SECONDS
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Whether process ``pid`` is there and does nothing, after SIGSTOP, say."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def alive(record: Mapping[str, Any]) -> dict[str, int]:
    """The ids of those recorded processes that run, by name."""
    launcher = record.get("launcher")
    entries = record["processes"] | ({LAUNCHER: launcher} if launcher else {})
    return {
        name: entry["pid"]
        for name, entry in entries.items()
        if is_minishuffle(entry["pid"], entry["started"])
    }


def own_processes(directory: Path) -> dict[str, Any] | None:
    """The processes of this user's on this machine that have that state directory, in the form of the record
    that ``cluster up`` writes; None if there is none. The directory need not be there. This process, and
    what has started it, are none of them."""
    wanted = os.path.realpath(directory)
    not_of_it = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    processes: dict[str, dict[str, Any]] = {}
    launcher = None
    for process in psutil.process_iter():
        try:
            if process.pid in not_of_it or process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            if (name := role(words)) is None or _directory(process, words) != wanted:
                continue
            entry = {"pid": process.pid, "started": process.create_time()}
        except (psutil.Error, OSError):  # It has ended, or is not to be looked into.
            continue
        if name == LAUNCHER:
            launcher = entry
        else:
            number = _option(words, "--id") if name == "worker" else ""
            name = f"{name} {number}" if number else name
            processes[name if name not in processes else f"{name}, too, {process.pid}"] = entry
    if not processes and launcher is None:
        return None
    return {"processes": processes, "launcher": launcher}


def role(words: Sequence[str]) -> str | None:
    """What process of a cluster a command line runs, if any."""
    program = next((at for at, word in enumerate(words[:3]) if os.path.basename(word) in _PROGRAMS), None)
    if program is None or (program == 2 and words[1] != "-m"):  # 'timeout 60 minishuffle …' is none.
        return None
    pairs = zip(words[program + 1 :], words[program + 2 :], strict=False)
    return next((ROLES[pair] for pair in pairs if pair in ROLES), None)


def _option(words: Sequence[str], flag: str) -> str:
    """The value of an option; empty where it is not given."""
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return behind
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def _directory(process: psutil.Process, words: Sequence[str]) -> str:
    """The state directory that a process has, all links followed."""
    environment: Mapping[str, str] = process.environ()
    given = _option(words, "--state-dir") or environment.get(f"{ENVIRONMENT_PREFIX}STATE_DIR", "")
    if given:
        return os.path.realpath(os.path.join(process.cwd(), given))
    cluster = _option(words, "--cluster") or environment.get(f"{ENVIRONMENT_PREFIX}CLUSTER", "")
    try:
        return os.path.realpath(default_state_dir(cluster or "default", environment))
    except UsageError:
        return ""

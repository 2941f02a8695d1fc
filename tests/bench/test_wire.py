"""``bench transport`` and ``bench exchange`` on two processes, with little data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from minishuffle.bench.peer import word_sum
from minishuffle.bench.wire import PeerProcess
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError
from support.soak import SOAK
from support.waiting import until

SECONDS_MAX = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transport", "exchange"])
def test_checksums_agree_and_every_figure_is_there(kind: str) -> None:
    options = ["--channels", "4", "--pairs", "2", "--megabytes", "16", "--json"]
    result = CliRunner().invoke(cli, ["bench", kind, *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["verified"] is True
    assert (figures["channels"], figures["pairs"], figures["segment_bytes"]) == (4, 2, 32_768)
    assert figures["gbytes_per_second"] > 0
    assert set(figures["raw_gbytes_per_second"]) == {"32768", "262144", "1048576"}
    ratio = figures["ratio_to_raw"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transport", "exchange"] if SOAK else ["transport"])
def test_with_tls_it_is_measured_against_bare_tls_and_none(kind: str) -> None:
    options = ["--tls", "--channels", "4", "--pairs", "2", "--megabytes", "16", "--json"]
    result = CliRunner().invoke(cli, ["bench", kind, *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["verified"] is True
    for name in ("ratio_to_bare_echo", "ratio_to_bare_stream", "ratio_to_plain"):
        assert 0 < figures[name]["min"] <= figures[name]["median"] <= figures[name]["max"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_peers_end_with_their_parent_and_say_nothing(number: int, code: int) -> None:
    options = ["--pairs", "99", "--megabytes", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "minishuffle.cli", "bench", "transport", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        peers = until(lambda: talking_peers(process.pid), "a measurement", SECONDS_MAX)
        os.killpg(process.pid, number)  # As Ctrl-C in a terminal does.
        _, err = process.communicate(timeout=SECONDS_MAX)
        _, alive = psutil.wait_procs(peers, timeout=SECONDS_MAX)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, alive) == (code, [])
    assert err.strip() == ("minishuffle: interrupted" if number == signal.SIGINT else "")


def talking_peers(measuring: int) -> list[psutil.Process]:
    """The two peers of that process once they talk to each other; none before."""
    peers = psutil.Process(measuring).children()
    return peers if len(peers) == 2 and all(map(talks, peers)) else []


def talks(peer: psutil.Process) -> bool:
    return any(c.status == psutil.CONN_ESTABLISHED for c in peer.net_connections())


@pytest.mark.slow
def test_a_peer_that_ends_by_itself_is_quoted() -> None:
    peer = PeerProcess.start("producer")
    try:
        with pytest.raises(
            ShuffleError, match=r"(?s)producer process ended with exit code 1\n.*no_such_command"
        ):
            peer.ask("no_such_command")
    finally:
        peer.stop()


def test_blocks_that_checksums_do_not_fit() -> None:
    result = CliRunner().invoke(cli, ["bench", "transport", "--segment-bytes", "1001"])
    assert result.exit_code == 2
    assert "--segment-bytes must be a multiple of 8" in result.output


def test_one_changed_byte_changes_the_checksum() -> None:
    block = np.arange(32_768, dtype=np.uint64).view(np.uint8)
    before = word_sum(memoryview(block))
    for at in (0, 7, 100_001, len(block) - 1):
        changed = block.copy()
        changed[at] ^= 1
        assert word_sum(memoryview(changed)) != before

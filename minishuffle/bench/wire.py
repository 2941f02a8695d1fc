"""``bench transport`` and ``bench exchange``: the credit protocol against the raw socket.

Two processes on loopback. A pair of measurements runs the full protocol and then plain blocking
``sendall``/``recv_into`` with the same socket options and the same block size, so that both see the
same machine; the ratio is taken pair by pair. Both sides of both read or stamp every payload, and
checksums are compared.

With TLS, it is the full protocol against the TLS of the same event loop with nothing around it: an echo, by
which each block goes and comes back, and a stream, by which it only goes. Both send as many blocks of the
same size at once. And it is against the full protocol without TLS.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from minishuffle.authority import throw_away_files
from minishuffle.config import TlsFiles
from minishuffle.errors import ShuffleError
from minishuffle.limits import SEGMENT_BYTES_DEFAULT

__all__ = ["PAIRS_MIN", "PeerProcess", "measure_tls", "measure_wire"]

PAIRS_MIN: Final = 9
RAW_BLOCKS: Final = (32_768, 262_144, 1_048_576)


@dataclass(slots=True)
class PeerProcess:
    """A peer process that answers one JSON line to each."""

    role: str
    popen: subprocess.Popen[str]
    errors: IO[bytes]
    """Its standard error; of no interest when it is stopped in the middle of a measurement."""

    @classmethod
    def start(cls, role: str, tls: TlsFiles | None = None) -> PeerProcess:
        command = [sys.executable, "-m", "minishuffle.bench.peer", role, *(tls or ())]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # Closed by stop.
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C in the terminal is for the parent, with which it ends anyhow.
            start_new_session=True,
        )
        return cls(role, popen, errors)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            code = self.popen.wait(10)
            self.errors.seek(0)
            text = self.errors.read().decode(errors="replace").rstrip()
            raise ShuffleError(f"the {self.role} process ended with exit code {code}\n{text}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def stop(self) -> None:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It ended before it read all of its input.
            self.popen.stdin.close()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()
        self.errors.close()


@dataclass(frozen=True, slots=True)
class _Rate:
    gbytes_per_second: float
    verified: bool


def _rate(received: dict[str, Any], sent: dict[str, Any]) -> _Rate:
    return _Rate(received["bytes"] / received["seconds"] / 1e9, received["sum"] == sent["sum"])


def _protocol(
    kind: str,
    producer: PeerProcess,
    consumer: PeerProcess,
    total_bytes: int,
    *,
    channels: int,
    segment_bytes: int,
) -> _Rate:
    buffers = total_bytes // segment_bytes // channels * channels
    arguments = {"channels": channels, "segment_bytes": segment_bytes, "buffers": buffers}
    producer.ask(kind, **arguments)
    received = consumer.ask(kind, **arguments)
    return _rate(received, producer.ask("sum"))


def _raw(producer: PeerProcess, consumer: PeerProcess, block_bytes: int, total_bytes: int) -> _Rate:
    total = total_bytes // block_bytes * block_bytes
    port = consumer.ask("raw_port")["port"]
    consumer.tell("raw", block_bytes=block_bytes, total_bytes=total)
    sent = producer.ask("raw", port=port, block_bytes=block_bytes, total_bytes=total)
    return _rate(consumer.answer(), sent)


def _bare_tls(
    producer: PeerProcess, consumer: PeerProcess, block_bytes: int, total_bytes: int, *, echoes: bool
) -> _Rate:
    total = total_bytes // block_bytes * block_bytes
    port = consumer.ask("bare_tls_port", echoes=echoes)["port"]
    consumer.tell("bare_tls")
    sent = producer.ask("bare_tls", port=port, block_bytes=block_bytes, total_bytes=total, echoes=echoes)
    received = consumer.answer()
    return _rate(sent["back"] if echoes else received, sent)


def measure_tls(
    kind: Literal["transport", "exchange"],
    *,
    channels: int = 64,
    segment_bytes: int = SEGMENT_BYTES_DEFAULT,
    pairs: int = PAIRS_MIN,
    megabytes: int = 512,
) -> dict[str, Any]:
    """As :func:`measure_wire`, with TLS: against the loop's own, and against no TLS at all."""
    total = megabytes * 1_000_000
    rates: dict[str, list[_Rate]] = {"ours": [], "echo": [], "stream": [], "plain": []}
    with contextlib.ExitStack() as stack:
        files = throw_away_files(Path(stack.enter_context(tempfile.TemporaryDirectory())), "127.0.0.1")

        def start(role: str, tls: TlsFiles | None) -> PeerProcess:
            peer = PeerProcess.start(role, tls)
            stack.callback(peer.stop)
            return peer

        def full(producer: PeerProcess, consumer: PeerProcess, size: int) -> _Rate:
            return _protocol(kind, producer, consumer, size, channels=channels, segment_bytes=segment_bytes)

        secured = start("producer", files), start("consumer", files)
        plain = start("producer", None), start("consumer", None)
        for producer, consumer in (secured, plain):
            producer.ask("dial", port=consumer.ask("listen")["port"])
            full(producer, consumer, total // 4)
        _bare_tls(*secured, segment_bytes, total // 4, echoes=True)
        for _ in range(pairs):
            rates["ours"].append(full(*secured, total))
            rates["echo"].append(_bare_tls(*secured, segment_bytes, total, echoes=True))
            rates["stream"].append(_bare_tls(*secured, segment_bytes, total, echoes=False))
            rates["plain"].append(full(*plain, total))
    return {
        "segment_bytes": segment_bytes,
        "channels": channels,
        "gbytes_per_second": _median(rates["ours"]),
        "bare_echo_gbytes_per_second": _median(rates["echo"]),
        "bare_stream_gbytes_per_second": _median(rates["stream"]),
        "plain_gbytes_per_second": _median(rates["plain"]),
        "ratio_to_bare_echo": _ratios(rates["ours"], rates["echo"]),
        "ratio_to_bare_stream": _ratios(rates["ours"], rates["stream"]),
        "ratio_to_plain": _ratios(rates["ours"], rates["plain"]),
        "verified": all(rate.verified for some in rates.values() for rate in some),
        "pairs": pairs,
    }


def measure_wire(
    kind: Literal["transport", "exchange"],
    *,
    channels: int = 64,
    segment_bytes: int = SEGMENT_BYTES_DEFAULT,
    pairs: int = PAIRS_MIN,
    megabytes: int = 512,
) -> dict[str, Any]:
    """Run the pairs and report medians; rates are 10^9 payload bytes per second.

    ``transport`` moves buffers from loop to loop; ``exchange`` has a writer thread fill and a reader
    thread read every byte.
    """
    total = megabytes * 1_000_000
    producer, consumer = PeerProcess.start("producer"), PeerProcess.start("consumer")
    try:
        port = consumer.ask("listen")["port"]
        producer.ask("dial", port=port)
        _protocol(kind, producer, consumer, total // 4, channels=channels, segment_bytes=segment_bytes)
        _raw(producer, consumer, segment_bytes, total // 4)
        ours: list[_Rate] = []
        raws: list[_Rate] = []
        for _ in range(pairs):
            ours.append(
                _protocol(kind, producer, consumer, total, channels=channels, segment_bytes=segment_bytes)
            )
            raws.append(_raw(producer, consumer, segment_bytes, total))
        others = {
            size: [_raw(producer, consumer, size, total) for _ in range(3)]
            for size in RAW_BLOCKS
            if size != segment_bytes
        }
    finally:
        producer.stop()
        consumer.stop()
    raw_medians = {
        str(segment_bytes): _median(raws),
        **{str(size): _median(rates) for size, rates in others.items()},
    }
    every = [*ours, *raws, *(rate for rates in others.values() for rate in rates)]
    return {
        "segment_bytes": segment_bytes,
        "channels": channels,
        "gbytes_per_second": _median(ours),
        "raw_gbytes_per_second": raw_medians,
        "ratio_to_raw": _ratios(ours, raws),
        "ratio_to_best_raw": round(_median(ours) / max(raw_medians.values()), 3),
        "verified": all(rate.verified for rate in every),
        "pairs": pairs,
    }


def _ratios(ours: list[_Rate], others: list[_Rate]) -> dict[str, float]:
    """Median, least and greatest of the ratios, pair by pair."""
    ratios = sorted(a.gbytes_per_second / b.gbytes_per_second for a, b in zip(ours, others, strict=True))
    return {
        "median": round(statistics.median(ratios), 3),
        "min": round(ratios[0], 3),
        "max": round(ratios[-1], 3),
    }


def _median(rates: list[_Rate]) -> float:
    return round(statistics.median(rate.gbytes_per_second for rate in rates), 3)

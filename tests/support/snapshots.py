"""What a worker says of itself when it does nothing."""

from __future__ import annotations

from typing import Any

from minishuffle.counters import LAG_SECONDS_BOUNDS, ConnectionCounters, Histogram, WorkerSnapshot

__all__ = ["idle_worker"]


def idle_worker(**fields: Any) -> WorkerSnapshot:
    """Worker 1, without tasks; fields replaced as asked."""
    idle: dict[str, Any] = {
        "worker": 1,
        "epoch": 1,
        "slots": 2,
        "slots_used": 0,
        "remote": ConnectionCounters(),
        "local_bytes": 0,
        "local_buffers": 0,
        "connections": 1,
        "segments_total": 64,
        "segments_free": 64,
        "segments_peak": 0,
        "segments_extra": 0,
        "segment_bytes": 32768,
        "assembly_bytes": 0,
        "loop_lag": Histogram(LAG_SECONDS_BOUNDS),
        "abandoned_tasks": 0,
        "connections_refused": {},
        "tasks": (),
    }
    return WorkerSnapshot(**idle | fields)

"""A dump as text: what waits is a line, what is at rest is summed up."""

from __future__ import annotations

from typing import Any

from minishuffle.cli.dump import dump_lines


def pool(**fields: Any) -> dict[str, Any]:
    return {"name": "p", "in_use": 3, "size": 4, "minimum": 2, "maximum": 9, "waits": False, **fields}


def input_channel(producer: int, **fields: Any) -> dict[str, Any]:
    return {
        "producer": producer,
        "phase": "attached",
        "worker": 2,
        "generation": 1,
        "producer_attempt": 1,
        "queue": 0,
        "events_queued": 0,
        "half_element": False,
        "ended": False,
        "waits_for": "",
        **fields,
    }


CREDIT = {
    "announced": 0,
    "unannounced": 1,
    "exclusive_free": 0,
    "exclusive": 2,
    "floating_free": 1,
    "required": 5,
    "starved": True,
}
TASK = {
    "job": "j1",
    "task": "count[0]",
    "operator": 1,
    "index": 0,
    "attempt": 2,
    "state": "running",
    "thread": "backpressured",
    "seconds": 12.34,
    "waits_for": "a segment of output j1/edge1.0",
    "stack": [f"file.py:{number} f" for number in range(9)],
    "cancelled": False,
    "records_in": 1000,
    "records_out": 10,
    "state_rows": 7,
    "outbox_bytes": 50,
    "buffers_returned": 1,
    "gates": [
        {
            "edge": 0,
            "from_operator": 0,
            "pool": pool(waits=True),
            "buffer_bytes": 3072,
            "waiting_for_floating": [1],
            "waiting_for_exclusive": [],
            "ready": [0, 1],
            "channels": [
                input_channel(0),
                input_channel(1, queue=3, credit=CREDIT),
                input_channel(2, phase="wanted", waits_for="a link to the producer's worker"),
                input_channel(3, queue=1, local={"lent": 1, "credit": 34}),
            ],
            "channels_left_out": 5,
        }
    ],
    "partitions": [
        {
            "edge": 1,
            "to_operator": 2,
            "pool": None,
            "channels": [
                {
                    "consumer": 0,
                    "queue": 4,
                    "backlog": 3,
                    "open_bytes": 0,
                    "available": False,
                    "suspected": True,
                    "closed": False,
                    "reader": "worker 3",
                    "credit": 0,
                    "ready": False,
                }
            ],
            "channels_left_out": 0,
        }
    ],
}
WORKER = {
    "worker": 1,
    "epoch": 1,
    "term": 1,
    "memory": {"segments": 2044, "free": 3, "extra": 0, "written_off": 0, "waiting_pools": ["output x"]},
    "control": {"connected": False, "outboxes_waiting": 2, "reports_unacknowledged": 4},
    "inbox": 6,
    "links": [
        {
            "peer": "worker 2",
            "remote": "127.0.0.1:99",
            "paused": True,
            "buffers_in_socket": 16,
            "control_unsent": 1,
            "channels_out": 8,
            "channels_ready": 5,
        }
    ],
    "requests_waiting": [
        {
            "from": "worker 2",
            "job": "j1",
            "edge": 0,
            "producer": 1,
            "producer_attempt": 2,
            "consumer": 0,
            "consumer_attempt": 1,
            "seconds_left": 9.25,
        }
    ],
    "requests_left_out": 1200,
    "tasks": [TASK],
    "tasks_left_out": 0,
}


def test_everything_that_waits_has_a_line() -> None:
    assert list(dump_lines(WORKER)) == [
        "worker 1: 3 of 2,044 segments free, 6 items for the loop, 2 outboxes for the coordinator, "
        "4 reports that the coordinator has not acknowledged, no coordinator",
        "  waits for a segment of any other pool: output x",
        "  link to worker 2 (127.0.0.1:99): paused, 16 buffers in the socket, 1 control frames, 5 of 8 "
        "channels ready to send",
        "  waits: worker 2 wants edge 0 of j1, producer 1#2 for consumer 0#1, for 9.2 s more",
        "  and 1,200 more requests",
        "  j1 count[0] (1.0#2): running, backpressured for 12.3 s, waits for a segment of output "
        "j1/edge1.0; 1,000 records in, 10 out, 7 entries of state (keys)",
        "    50 bytes for the coordinator, 1 buffers to be taken back",
        "    at file.py:0 f",
        "    at file.py:1 f",
        "    at file.py:2 f",
        "    at file.py:3 f",
        "    reads edge 0: 3 of 4 segments, waits for one of another pool, 3,072 bytes to be in each",
        "      in line for a floating buffer: 0.1",
        "      ready to be read: 0.0, 0.1",
        "      0.1:1.0 from worker 2: attached, 3 in the queue, credit 0 and 1 unannounced, 0 of 2 exclusive "
        "and 1 floating buffers free, 5 required, starved",
        "      0.2:1.0 from worker 2: wanted, waits for a link to the producer's worker, 0 in the queue",
        "      0.3:1.0 from worker 2: attached, 1 in the queue, 1 of 34 of its producer's segments",
        "      1 channels at rest, and 5 more that are left out",
        "    writes edge 1: kept on disk or in memory",
        "      1.0:2.0 read by worker 3: suspected, 4 in the queue, backlog 3, credit 0",
    ]


def test_nothing_is_said_of_what_is_not_there() -> None:
    control = {"connected": True, "outboxes_waiting": 0, "reports_unacknowledged": 0}
    task = TASK | {"outbox_bytes": 0, "stack": [], "gates": [], "partitions": []}
    worker = WORKER | {"inbox": 0, "control": control, "links": [], "tasks": [task], "requests_left_out": 0}
    worker |= {"requests_waiting": [], "memory": WORKER["memory"] | {"waiting_pools": []}}
    first, _, queued = dump_lines(worker)
    assert (first, queued) == (
        "worker 1: 3 of 2,044 segments free, nothing queued",
        "    1 buffers to be taken back",
    )
    *_, last = dump_lines(worker | {"tasks": [task | {"buffers_returned": 0}]})
    assert last.startswith("  j1 count[0]")

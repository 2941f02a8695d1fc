"""The exposition of both processes: names, labels, values, budget."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from minishuffle.counters import (
    ConnectionCounters,
    CoordinatorSnapshot,
    GateSnapshot,
    Histogram,
    OperatorCounters,
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
    WorkerEntry,
    WorkerSnapshot,
)
from minishuffle.observe.exposition import OPENMETRICS, Exposition
from minishuffle.observe.families import METRICS, RUNTIME_METRICS
from minishuffle.observe.metrics import coordinator_exposition, worker_exposition
from minishuffle.operators.user_metrics import UserMetrics
from support.scraped import Scraper, scraped_families

MakeGate = Callable[..., GateSnapshot]
MakeTask = Callable[..., TaskSnapshot]
MakeWorker = Callable[..., WorkerSnapshot]
MakeCoordinator = Callable[..., CoordinatorSnapshot]
Family = tuple[str, str, frozenset[str]]

ROOT = Path(__file__).resolve().parents[2]
FIRST_TASK = {
    "pipeline": "wordcount",
    "pipeline_id": "j1",
    "vertex": "count",
    "vertex_id": "0",
    "subtask": "0",
}
FIRST_GATE = {**FIRST_TASK, "gate": "0"}
LATENCIES = {"3": Histogram((0.1, 1.0))}


def families(exposition: Exposition) -> set[Family]:
    """(name, type, labels) of every family that a scrape shows, ``le`` left out."""
    shown = set()
    for family in scraped_families(exposition):
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, f"{family.name} has samples with different labels"
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown.add((name, family.type, labels.pop()))
    return shown


def listed(process: str) -> set[Family]:
    rows = (*METRICS, *RUNTIME_METRICS)
    return {(m.name, m.type, frozenset(m.labels)) for m in rows if m.process in (process, "both")}


def series(exposition: Exposition) -> int:
    return sum(not line.startswith(b"#") for line in exposition.answer("")[0].splitlines())


def test_a_worker_serves_exactly_the_families_of_the_table(
    make_worker: MakeWorker, make_task: MakeTask
) -> None:
    exposition = worker_exposition(lambda: make_worker(tasks=(make_task(latencies=LATENCIES),)), "1.2.3")
    assert families(exposition) == listed("worker")


def test_metrics_of_the_users_code_have_the_labels_of_their_operator(
    make_worker: MakeWorker, make_task: MakeTask
) -> None:
    own = UserMetrics("map", 1)
    own.counter("orders", "Orders seen.").add(3)
    own.gauge("queue").set(2.5)
    own.histogram("seconds", bounds=[0.1, 1]).observe(0.5)
    other = UserMetrics("map", 2)
    other.counter("orders").add(1)
    clashing = UserMetrics("sink", 0)
    clashing.gauge("orders").set(7)
    tasks = (
        make_task(user_series=(*own.series(), *other.series())),
        make_task(job="j2", user_series=clashing.series()),
    )
    text = worker_exposition(lambda: make_worker(tasks=tasks), "1.2.3").answer("")[0].decode()
    shown = [
        line
        for line in text.splitlines()
        if "minishuffle_user_" in line and "minishuffle_user_errors" not in line
    ]
    task = 'pipeline="wordcount",pipeline_id="j1",vertex="count",vertex_id="0",subtask="0"'
    task += ',operator="map",position="1"'
    second = task.replace('position="1"', 'position="2"')
    assert shown == [
        "# HELP minishuffle_user_orders_total Orders seen.",
        "# TYPE minishuffle_user_orders_total counter",
        f"minishuffle_user_orders_total{{{task}}} 3.0",
        f"minishuffle_user_orders_total{{{second}}} 1.0",
        "# HELP minishuffle_user_queue queue",
        "# TYPE minishuffle_user_queue gauge",
        f"minishuffle_user_queue{{{task}}} 2.5",
        "# HELP minishuffle_user_seconds seconds",
        "# TYPE minishuffle_user_seconds histogram",
        f'minishuffle_user_seconds_bucket{{{task},le="0.1"}} 0',
        f'minishuffle_user_seconds_bucket{{{task},le="1.0"}} 1',
        f'minishuffle_user_seconds_bucket{{{task},le="+Inf"}} 1',
        f"minishuffle_user_seconds_count{{{task}}} 1",
        f"minishuffle_user_seconds_sum{{{task}}} 0.5",
    ]


def test_a_coordinator_serves_exactly_the_families_of_the_table(make_coordinator: MakeCoordinator) -> None:
    exposition = coordinator_exposition(make_coordinator, "1.2.3")
    assert families(exposition) == listed("coordinator")


@pytest.mark.parametrize("process", ["worker", "coordinator"])
def test_promtool_finds_nothing_to_mend(
    process: str,
    make_worker: MakeWorker,
    make_task: MakeTask,
    make_coordinator: MakeCoordinator,
    prometheus_binaries: Path,
) -> None:
    if process == "worker":
        exposition = worker_exposition(lambda: make_worker(tasks=(make_task(latencies=LATENCIES),)), "1.2.3")
    else:
        exposition = coordinator_exposition(make_coordinator, "1.2.3")
    own = b"".join(_own_lines(exposition.answer("")[0]))
    assert own.count(b"# TYPE") == len([m for m in METRICS if m.process in (process, "both")])
    checked = subprocess.run(
        [prometheus_binaries / "promtool", "check", "metrics"],
        input=exposition.answer("")[0],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def _own_lines(text: bytes) -> list[bytes]:
    return [line for line in text.splitlines(keepends=True) if b"minishuffle_" in line]


def test_openmetrics_says_the_same(make_worker: MakeWorker, make_task: MakeTask) -> None:
    exposition = worker_exposition(lambda: make_worker(tasks=(make_task(latencies=LATENCIES),)), "1.2.3")
    parsed = parse_openmetrics(exposition.answer(OPENMETRICS)[0].decode())
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in parsed}
    assert names == {name for name, _, _ in listed("worker")}


def test_the_number_of_series_stays_within_the_budget(
    make_worker: MakeWorker, make_task: MakeTask, make_gate: Callable[..., GateSnapshot]
) -> None:
    """Of a job without options."""
    gates = (make_gate(debloated_bytes=None, in_flight_seconds=None),)
    counters = TaskCounters(watermark=1_000_000)
    empty = series(worker_exposition(make_worker, "1.2.3"))
    counts = []
    for subtasks in (1, 20):
        tasks = tuple(
            make_task(operator=i % 5, name=f"op{i % 5}", index=i // 5, gates=gates, counters=counters)
            for i in range(subtasks)
        )
        counts.append(series(worker_exposition(lambda tasks=tasks: make_worker(tasks=tasks), "1.2.3")))
    assert empty <= 200
    assert counts[0] - empty <= 50
    assert counts[1] - empty <= 50 * 20


def test_traffic_is_split_by_direction_and_path(make_worker: MakeWorker) -> None:
    remote = ConnectionCounters(
        bytes_in=10,
        bytes_out=20,
        buffers_in=1,
        buffers_out=2,
        frames_in={"buffer_response": 1, "hello": 1},
        frames_out={"add_credit": 7},
        credits_granted=30,
        credits_received=40,
    )
    worker = make_worker(remote=remote, local_bytes=5, local_buffers=3)
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    for what, remote_in, remote_out, local in (("bytes", 10, 20, 5), ("buffers", 1, 2, 3)):
        name = f"minishuffle_network_{what}_total"
        assert value(name, {"direction": "in", "path": "remote"}) == remote_in
        assert value(name, {"direction": "out", "path": "remote"}) == remote_out
        assert value(name, {"direction": "in", "path": "local"}) == local
        assert value(name, {"direction": "out", "path": "local"}) == local
    assert value("minishuffle_frames_total", {"type": "buffer_response", "direction": "in"}) == 1
    assert value("minishuffle_frames_total", {"type": "add_credit", "direction": "out"}) == 7
    assert value("minishuffle_frames_total", {"type": "add_credit", "direction": "in"}) == 0
    assert value("minishuffle_credits_total", {"direction": "granted"}) == 30
    assert value("minishuffle_credits_total", {"direction": "received"}) == 40


def test_memory_and_slots_of_a_worker(make_worker: MakeWorker) -> None:
    worker = make_worker(
        connections_refused={"secret": 2},
        abandoned_tasks=1,
        assembly_bytes=77,
        local_batch_bytes=78,
        blocking_bytes=79,
        retained_bytes=83,
        snapshot_bytes=89,
    )
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    assert value("minishuffle_network_segments", {"state": "used"}) == 4
    assert value("minishuffle_network_segments", {"state": "free"}) == 60
    assert value("minishuffle_network_segments_peak") == 9
    assert value("minishuffle_network_segments_extra") == 3
    assert value("minishuffle_network_memory_bytes") == 64 * 32768
    assert value("minishuffle_assembly_bytes") == 77
    assert value("minishuffle_local_batch_bytes") == 78
    assert value("minishuffle_blocking_bytes") == 79
    assert value("minishuffle_retained_bytes") == 83
    assert value("minishuffle_snapshots_held_bytes") == 89
    assert value("minishuffle_worker_slots", {"state": "used"}) == 1
    assert value("minishuffle_worker_slots", {"state": "free"}) == 3
    assert value("minishuffle_abandoned_tasks_total") == 1
    assert value("minishuffle_connections_refused_total", {"reason": "secret"}) == 2
    assert value("minishuffle_connections_refused_total", {"reason": "timeout"}) == 0


def test_counters_of_a_task(make_worker: MakeWorker, make_task: MakeTask) -> None:
    counters = TaskCounters(
        records_in=1,
        records_out=2,
        bytes_in=3,
        bytes_out=4,
        buffers_in=5,
        buffers_out=6,
        user_errors={"skip": 7},
        records_late=9,
        rows_skipped=13,
        state_rows=17,
        busy_seconds=0.5,
        idle_seconds=0.25,
        backpressured_seconds=0.125,
        cpu_seconds=0.375,
    )
    worker = make_worker(tasks=(make_task(counters=counters),))
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    for what, taken, emitted in (("records", 1, 2), ("bytes", 3, 4), ("buffers", 5, 6)):
        name = f"minishuffle_task_{what}_total"
        assert value(name, {**FIRST_TASK, "direction": "in"}) == taken
        assert value(name, {**FIRST_TASK, "direction": "out"}) == emitted
    for state, seconds in (("busy", 0.5), ("idle", 0.25), ("backpressured_hard", 0.125)):
        assert value("minishuffle_task_time_seconds_total", {**FIRST_TASK, "state": state}) == seconds
    assert value("minishuffle_task_cpu_seconds_total", FIRST_TASK) == 0.375
    assert value("minishuffle_user_errors_total", {**FIRST_TASK, "policy": "skip"}) == 7
    assert value("minishuffle_records_late_total", FIRST_TASK) == 9
    assert value("minishuffle_source_rows_skipped_total", FIRST_TASK) == 13
    assert value("minishuffle_state_rows", FIRST_TASK) == 17
    assert value("minishuffle_user_errors_total", {**FIRST_TASK, "policy": "dead_letter"}) == 0
    assert value("minishuffle_user_errors_total", {**FIRST_TASK, "policy": "side"}) == 0


def test_gates_have_figures_of_their_own_and_partitions_are_summed(
    make_worker: MakeWorker, make_task: MakeTask, make_gate: MakeGate
) -> None:
    gates = (
        make_gate(),
        make_gate(
            queue_buffers=1,
            exclusive_used=1,
            exclusive_capacity=2,
            floating_used=7,
            floating_capacity=8,
            channels_starved=0,
            credits_announced=4,
            credits_unannounced=3,
            debloated_bytes=None,
            in_flight_seconds=None,
        ),
    )
    partitions = (PartitionSnapshot(5, PoolSnapshot(2, 8)), PartitionSnapshot(1, PoolSnapshot(4, 8)))
    worker = make_worker(tasks=(make_task(gates=gates, partitions=partitions),))
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    second_gate = {**FIRST_TASK, "gate": "1"}
    for gate, queue, starved in ((FIRST_GATE, 3, 1), (second_gate, 1, 0)):
        assert value("minishuffle_input_queue_buffers", gate) == queue
        assert value("minishuffle_channels_starved", gate) == starved
    for name, exclusive, floating in (("", 1, 7), ("_capacity", 2, 8)):
        assert value(f"minishuffle_input_buffers{name}", {**second_gate, "kind": "exclusive"}) == exclusive
        assert value(f"minishuffle_input_buffers{name}", {**second_gate, "kind": "floating"}) == floating
    for name, given in (("debloated_buffer_bytes", 512), ("in_flight_seconds", 0.25)):
        assert value(f"minishuffle_{name}", FIRST_GATE) == given
        assert value(f"minishuffle_{name}", second_gate) is None, "it does not debloat"
    assert value("minishuffle_input_pool_usage_ratio", FIRST_GATE) == 3 / 12
    assert value("minishuffle_input_pool_usage_ratio", second_gate) == 8 / 10
    assert value("minishuffle_input_credits", {**second_gate, "state": "announced"}) == 4
    assert value("minishuffle_input_credits", {**second_gate, "state": "unannounced"}) == 3
    assert value("minishuffle_output_backlog_buffers", FIRST_TASK) == 6
    assert value("minishuffle_output_pool_buffers", FIRST_TASK) == 6
    assert value("minishuffle_output_pool_buffers_capacity", FIRST_TASK) == 16
    assert value("minishuffle_output_pool_usage_ratio", FIRST_TASK) == 6 / 16


def test_operators_of_a_chain_are_told_apart(make_worker: MakeWorker, make_task: MakeTask) -> None:
    operators = (OperatorCounters("map", 9, 8), OperatorCounters("map", 8, 4))
    worker = make_worker(tasks=(make_task(operators=operators),))
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    for position, taken, emitted in (("0", 9, 8), ("1", 8, 4)):
        labels = {**FIRST_TASK, "operator": "map", "position": position}
        assert value("minishuffle_operator_records_total", {**labels, "direction": "in"}) == taken
        assert value("minishuffle_operator_records_total", {**labels, "direction": "out"}) == emitted


def test_a_source_has_no_input_and_a_sink_no_output(make_worker: MakeWorker, make_task: MakeTask) -> None:
    source = make_task(operator=0, name="source", gates=())
    sink = make_task(operator=1, name="sink", partitions=())
    text = worker_exposition(lambda: make_worker(tasks=(source, sink)), "1.2.3").answer("")[0].decode()
    pools = [line for line in text.splitlines() if line.startswith(("minishuffle_input", "minishuffle_out"))]
    assert pools
    assert not [line for line in pools if 'vertex="source"' in line and "_input_" in line]
    assert not [line for line in pools if 'vertex="sink"' in line and "_output_" in line]


def test_a_histogram_is_cumulative(make_worker: MakeWorker, make_task: MakeTask) -> None:
    blocks = Histogram((0.5, 1.0, 30.0))
    for seconds in (0.25, 0.5, 0.75, 100.0):
        blocks.observe(seconds)
    worker = make_worker(tasks=(make_task(blocks=blocks),))
    value = Scraper(worker_exposition(lambda: worker, "1.2.3")).value
    name = "minishuffle_backpressure_block_seconds"
    buckets = [value(f"{name}_bucket", {**FIRST_TASK, "le": le}) for le in ("0.5", "1.0", "30.0", "+Inf")]
    assert buckets == [2, 3, 3, 4]
    assert value(f"{name}_sum", FIRST_TASK) == 101.5
    assert value(f"{name}_count", FIRST_TASK) == 4


def test_each_scrape_reads_anew(make_worker: MakeWorker, make_task: MakeTask) -> None:
    task = make_task()
    exposition = worker_exposition(lambda: make_worker(tasks=(task,)), "1.2.3")
    records = {**FIRST_TASK, "direction": "in"}
    assert Scraper(exposition).value("minishuffle_task_records_total", records) == 0
    task.counters.records_in = 42
    assert Scraper(exposition).value("minishuffle_task_records_total", records) == 42


def test_the_lag_of_a_watermark_is_told_once_there_is_one(
    make_worker: MakeWorker, make_task: MakeTask, make_gate: MakeGate
) -> None:
    for watermark, lag in ((990_500_000, 9.5), (None, None)):
        gate = make_gate(watermark=watermark)
        task = make_task(counters=TaskCounters(watermark=watermark), gates=(gate,))
        exposition = worker_exposition(lambda task=task: make_worker(tasks=(task,), wall=1_000.0), "1.2.3")
        assert Scraper(exposition).value("minishuffle_watermark_lag_seconds", FIRST_TASK) == lag
        assert Scraper(exposition).value("minishuffle_input_watermark_lag_seconds", FIRST_GATE) == lag


def test_a_job_has_the_same_labels_on_every_worker(make_worker: MakeWorker, make_task: MakeTask) -> None:
    """Whatever else runs there, and whichever of its vertices: sums over workers keep jobs apart."""
    first, second = make_task(job="j2"), make_task(job="j10")
    again = make_task(job="j10", operator=3)
    for number, task in enumerate((first, second, again)):
        task.counters.records_in = number + 1

    def records(*tasks: TaskSnapshot) -> dict[tuple[str, ...], float]:
        exposition = worker_exposition(lambda: make_worker(tasks=tasks), "1.2.3")
        labels = ("pipeline", "pipeline_id", "vertex", "vertex_id", "subtask", "direction")
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for family in scraped_families(exposition)
            if family.name == "minishuffle_task_records"
            for sample in family.samples
        }

    found = records(first, second, again)
    assert found["wordcount", "j2", "count", "0", "0", "in"] == 1
    assert found["wordcount", "j10", "count", "0", "0", "in"] == 2
    assert found["wordcount", "j10", "count", "3", "0", "in"] == 3
    for alone in (first, second, again):
        assert records(alone).items() <= found.items()


def test_the_newest_attempt_stands_for_its_subtask(make_worker: MakeWorker, make_task: MakeTask) -> None:
    abandoned, current = make_task(attempt=1, state="abandoned"), make_task(attempt=2)
    abandoned.counters.records_in, current.counters.records_in = 100, 1
    exposition = worker_exposition(lambda: make_worker(tasks=(current, abandoned)), "1.2.3")
    labels = {**FIRST_TASK, "direction": "in"}
    assert Scraper(exposition).value("minishuffle_task_records_total", labels) == 1


def test_any_name_makes_a_scrape_that_parses(make_worker: MakeWorker, make_task: MakeTask) -> None:
    odd = 'a "b" \\ \n{c="d"} é'
    tasks = (
        make_task(job="j1", job_name=odd),
        make_task(job="j2", job_name=odd),
        make_task(job="j3", job_name=f"{odd} (j2)"),
        make_task(job="j1", job_name=odd, operator=1),
    )
    exposition = worker_exposition(lambda: make_worker(tasks=tasks), "1.2.3")
    found = []
    for family in scraped_families(exposition):
        if family.name == "minishuffle_channels_starved":
            found = [(sample.labels["pipeline"], sample.labels["pipeline_id"]) for sample in family.samples]
    assert sorted(found) == sorted([(odd, "j1"), (odd, "j1"), (odd, "j2"), (f"{odd} (j2)", "j3")])


def test_a_coordinator_counts_by_state(make_coordinator: MakeCoordinator) -> None:
    workers = (
        WorkerEntry(1, "alive", "127.0.0.1", 9000, 0.25),
        WorkerEntry(2, "lost", "127.0.0.1", 9001, 30.0),
        WorkerEntry(3, "alive", "127.0.0.1", 9002, 0.5, suspicions=2),
    )
    snapshot = make_coordinator(workers=workers, connections_refused={"secret": 4})
    value = Scraper(coordinator_exposition(lambda: snapshot, "1.2.3")).value
    assert value("minishuffle_term") == 3
    for state, count in (("alive", 2), ("lost", 1), ("gone", 0)):
        assert value("minishuffle_workers", {"state": state}) == count
    assert value("minishuffle_worker_heartbeat_age_seconds", {"worker": "3"}) == 0.5
    assert value("minishuffle_worker_heartbeat_age_seconds", {"worker": "2"}) is None
    assert value("minishuffle_worker_suspected_total", {"worker": "3"}) == 2
    assert value("minishuffle_slots", {"state": "free"}) == 3
    assert value("minishuffle_jobs", {"state": "running"}) == 1
    assert value("minishuffle_jobs", {"state": "failed"}) == 0
    assert value("minishuffle_tasks", {"state": "running"}) == 2
    assert value("minishuffle_connections_refused_total", {"reason": "secret"}) == 4
    job = {"pipeline": "words", "pipeline_id": "j1"}
    assert value("minishuffle_task_restarts_total", {**job, "reason": "lost"}) == 2
    assert value("minishuffle_task_restarts_total", {**job, "reason": "failed"}) == 0
    assert value("minishuffle_records_dropped_total", {**job, "reason": "queue_discarded"}) == 7
    assert value("minishuffle_records_dropped_total", {**job, "reason": "failed_batch"}) == 0
    assert value("minishuffle_state_rows_lost_total", job) == 11
    assert value("minishuffle_recoveries_unfinished_total", job) == 4
    assert value("minishuffle_job_paused", job) == 0
    assert value("minishuffle_durable_snapshot_timestamp_seconds", job) == 5_000
    assert value("minishuffle_durable_snapshots_failed_total", job) == 2
    assert value("minishuffle_fallbacks_total", job) == 1
    assert value("minishuffle_job_paused", {"pipeline": "clicks", "pipeline_id": "j2"}) == 1
    reattach = {**job, "phase": "reattach"}
    assert value("minishuffle_recovery_duration_seconds_bucket", {**reattach, "le": "0.01"}) == 0
    assert value("minishuffle_recovery_duration_seconds_bucket", {**reattach, "le": "0.025"}) == 1


def test_latencies_are_served_by_source_if_a_job_has_markers(
    make_worker: MakeWorker, make_task: MakeTask
) -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.5, 5.0):
        histogram.observe(seconds)
    exposition = worker_exposition(
        lambda: make_worker(tasks=(make_task(latencies={"0.1": histogram}),), gc_seconds=1.5), "1.2.3"
    )
    labels = {**FIRST_TASK, "source": "0.1"}
    value = Scraper(exposition).value
    assert value("minishuffle_latency_seconds_count", labels) == 3
    assert value("minishuffle_latency_seconds_bucket", {**labels, "le": "1.0"}) == 2
    assert value("minishuffle_latency_seconds_sum", labels) == 5.55
    assert value("minishuffle_gc_seconds_total") == 1.5
    without = worker_exposition(lambda: make_worker(tasks=(make_task(),)), "1.2.3")
    assert Scraper(without).value("minishuffle_latency_seconds_count", labels) is None

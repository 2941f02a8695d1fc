import json
from dataclasses import replace
from datetime import UTC, datetime

import msgpack
import pyarrow as pa
import pytest

from minishuffle.cli import tables
from minishuffle.counters import TaskCounters
from minishuffle.wire.messages import ErrorInfo, PeerReport, WorkerReport
from minishuffle.wire.requests import (
    ClusterStatus,
    DeployWait,
    DurableInfo,
    EdgeInfo,
    GraphInfo,
    JobEvent,
    JobInfo,
    SavepointInfo,
    SlotWait,
    StageInfo,
    TaskInfo,
    VertexInfo,
    WorkerInfo,
)

TASK = TaskInfo(
    operator=1,
    name="count",
    index=0,
    attempt=1,
    state="finished",
    worker=2,
    counters=TaskCounters(
        records_in=1234567, busy_seconds=0.5, idle_seconds=1.5, backpressured_seconds=8.0, cpu_seconds=0.25
    ),
    result=msgpack.packb({"files": ["ä"], "rows": 200}),
)
JOB = JobInfo(
    job="j1",
    name="[bold]words[/bold]",
    state="failed",
    submitted_at=1.0,
    ended_at=3.5,
    tasks=[TASK],
    causes=[
        ErrorInfo(code=60, text="count[0]: ValueError: no", traceback="Traceback of f\n", task="count[0]"),
        ErrorInfo(code=40, text="a connection broke", task="map[1]"),
    ],
)
STATUS = ClusterStatus(
    cluster="blue",
    version="0.2.0",
    term=3,
    pid=41,
    web_port=8472,
    workers=[
        WorkerInfo(
            worker=1,
            epoch=1,
            state="alive",
            host="127.0.0.1",
            pid=42,
            data_port=5000,
            metrics_port=5001,
            slots=2,
            slots_free=1,
            heartbeat_age_seconds=0.25,
            report=WorkerReport(network_cap_bytes=1 << 20, network_peak_bytes=1536),
            peers=[PeerReport(worker=2, connections=1, local="a:1", remote="b:2")],
        )
    ],
    jobs=[JOB],
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (1 << 44, "16384.0 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert tables.byte_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.26, "1.3 s"), (75, "1 min 15 s"), (7260, "2 h 1 min")])
def test_seconds(seconds: float, text: str) -> None:
    assert tables.seconds_text(seconds) == text


def test_a_jobs_map_is_json_with_results_unpacked() -> None:
    found = json.loads(json.dumps(tables.job_map(JOB)))
    assert found["tasks"][0]["result"] == {"files": ["ä"], "rows": 200}
    assert found["tasks"][0]["counters"]["records_in"] == 1234567
    assert found["causes"][0]["task"] == "count[0]"
    status = json.loads(json.dumps(tables.status_map(STATUS)))
    assert status["jobs"] == [found]
    assert status["workers"][0]["peers"][0]["connections"] == 1


def test_status_shows_workers_connections_and_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_status(STATUS)
    out = capsys.readouterr().out
    assert "cluster 'blue': version 0.2.0, term 3, coordinator pid 41" in out
    row = next(line for line in out.splitlines() if line.startswith("1 "))
    for text in ("alive", "127.0.0.1:5000", "42", "1/2", "1.5 KiB of 1.0 MiB", "1 to 2"):
        assert text in row
    assert "[bold]words[/bold]" in out
    assert "it can be written" not in out
    tables.show_status(STATUS.model_copy(update={"journal_problem": "it is full [Errno 28]"}))
    assert "restarts wait, until it can be written: it is full [Errno 28]" in capsys.readouterr().out


def test_status_shows_what_workers_hold_of_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_status(STATUS)
    assert "snapshots held" not in capsys.readouterr().out
    (worker,) = STATUS.workers
    report = worker.report.model_copy(update={"snapshot_bytes": 2048, "snapshot_memory_bytes": 1 << 30})
    tables.show_status(STATUS.model_copy(update={"workers": [worker.model_copy(update={"report": report})]}))
    shown = capsys.readouterr().out
    assert "2.0 KiB" in shown and "snapshots held: of a worker's up to 1.0 GiB in memory" in shown


def test_status_says_who_can_connect_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    one = STATUS.workers[0].model_copy(update={"reachable": 1, "tried": 2, "host": "fd00::1"})
    two = one.model_copy(update={"worker": 2, "reachable": 2, "host": "127.0.0.1", "confined": True})
    lost = one.model_copy(update={"worker": 3, "state": "lost", "tried": 0})
    workers = [one, two, lost, one.model_copy(update={"worker": 4})]
    tables.show_status(STATUS.model_copy(update={"workers": workers, "unreached": ["no way from 1 to 4"]}))
    out = capsys.readouterr().out
    rows = {line[0]: line for line in out.splitlines() if line[:1].isdigit()}
    assert "1 of 2" in rows["1"] and "[fd00::1]:5000" in rows["1"]
    assert "2 of 2" in rows["2"] and " of 2" not in rows["3"]
    assert "no way from 1 to 4" in out and "other hosts cannot reach worker 2," in out
    tables.show_status(STATUS)
    out = capsys.readouterr().out
    assert "cannot reach" not in out and " of 0" not in out


@pytest.mark.parametrize(("state", "shown"), [("alive", "standby"), ("lost", "lost")])
def test_status_says_who_is_on_standby(capsys: pytest.CaptureFixture[str], state: str, shown: str) -> None:
    spare = STATUS.workers[0].model_copy(update={"standby": True, "state": state, "slots_free": 0})
    tables.show_status(STATUS.model_copy(update={"workers": [spare]}))
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1 "))
    assert row.split()[1] == shown
    assert "0/2" in row


def test_status_says_which_standby_worker_is_still_loading(capsys: pytest.CaptureFixture[str]) -> None:
    spare = STATUS.workers[0].model_copy(update={"standby": True, "state": "alive"})
    running = JOB.model_copy(update={"state": "running"})
    for loaded, shown in ((0, True), (1, False)):
        report = spare.report.model_copy(update={"jobs_loaded": loaded})
        workers = [spare.model_copy(update={"report": report})]
        tables.show_status(STATUS.model_copy(update={"workers": workers, "jobs": [running]}))
        assert ("standby, loading" in capsys.readouterr().out) == shown


def test_a_job_shows_its_first_cause_with_the_users_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_job(JOB)
    out = capsys.readouterr().out
    assert "1,234,567" in out
    assert "first cause: count[0]: ValueError: no (minishuffle explain MS-160)\nTraceback of f\n" in out
    assert "\nthen: map[1]: a connection broke\n" in out


def test_a_job_that_goes_on_shows_its_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    text = "map[0]: ValueError: late\nmore"
    failure = JobEvent(number=3, at=0.0, kind="task failed", text=text, traceback="Traceback of g\n")
    job = JOB.model_copy(update={"state": "running", "causes": [], "first_failure": failure})
    tables.show_job(job)
    assert f"first failure: {text}\nTraceback of g\n" in capsys.readouterr().out
    tables.show_jobs([job])
    assert "ValueError: late" in capsys.readouterr().out
    long = failure.model_copy(update={"text": "x" * 300})
    tables.show_jobs([job.model_copy(update={"first_failure": long})])
    assert capsys.readouterr().out.count("x") == 200, "the rest is in jobs show"
    tables.show_job(JOB.model_copy(update={"first_failure": failure}))
    assert "first failure" not in capsys.readouterr().out, "the first cause says the same"


def test_a_job_shows_what_its_tasks_spend_their_time_with(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_job(JOB)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("count[0] ")]
    assert row.split()[-9:] == ["0.5", "s", "5%", "1.5", "s", "15%", "8.0", "s", "80%"]
    tables.show_job(JOB.model_copy(update={"tasks": [TASK.model_copy(update={"counters": TaskCounters()})]}))
    assert "0.0 s   0%" in capsys.readouterr().out, "a task that has not begun"


def test_a_job_shows_for_which_slots_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    wait = SlotWait(worker=2, until=0.0, text="count[1] wait for a slot: worker 2 was lost")
    tables.show_job(JOB.model_copy(update={"slot_waits": [wait]}))
    assert f"{wait.text}; the job fails in 0.0 s if none comes\n" in capsys.readouterr().out


def test_a_job_shows_what_waits_to_be_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "stage 2 of 2 (count) waits for items => count (1 of 2 partitions are complete)"
    stages = [
        StageInfo(operators=[0], state="deployed", version=2),
        StageInfo(operators=[1], state="waiting"),
    ]
    waiting = TASK.model_copy(update={"state": "waiting", "attempt": 0, "worker": 0})
    waits = [DeployWait(operators=[1], text=text)]
    tables.show_job(JOB.model_copy(update={"stages": stages, "deploy_waits": waits, "tasks": [waiting]}))
    out = capsys.readouterr().out
    assert f"stages: 1 deployed (version 2), 2 waiting\n{text}\n" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("count[0] ")]
    assert row[:4] == ["count[0]", "waiting", "-", "-"]


def test_a_job_shows_what_stays_while_it_is_paused_and_why_a_pause_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables.show_job(JOB.model_copy(update={"state": "paused", "pause_left": ["3 rows of map_async[0]"]}))
    tables.show_job(JOB.model_copy(update={"pause_problem": "map[1] did not stop within 10.0 s"}))
    lines = capsys.readouterr().out.splitlines()
    assert "where it is stays 3 rows of map_async[0]" in lines
    assert "the last pause failed: map[1] did not stop within 10.0 s" in lines


def test_a_job_shows_its_restarts_and_what_they_cost(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_job(JOB)
    assert "restarts" not in capsys.readouterr().out
    dropped = {"failed_batch": 2, "queue_discarded": 1500}
    update = {"restarts": {"failed": 3, "lost": 1}, "rows_dropped": dropped, "rows_in_flight": 40}
    update["rows_again"] = 7
    tables.show_job(JOB.model_copy(update=update))
    assert (
        "restarts, by how the attempt before ended: 3 failed, 1 lost\n"
        "rows dropped (failed_batch): 2 in batches that failed\n"
        "rows dropped (queue_discarded): 1,500 on their way to a task that ended\n"
        "rows in flight through what died: up to 40\n"
        "rows that were emitted twice: up to 7\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("durable", "text"),
    [
        (DurableInfo(problem="disk full"), "no durable snapshot; the last one failed: disk full"),
        (
            DurableInfo(number=3, path="/s/j1", taken_at=100.0, bytes=4_000, seconds=0.25),
            "durable snapshot 3 (/s/j1): 4,000 bytes in 0.2 s, 7.0 s ago",
        ),
        (
            DurableInfo(number=3, path="/s/j1", taken_at=100.0, problem="disk full"),
            "durable snapshot 3 (/s/j1): 0 bytes in 0.0 s, 7.0 s ago; the last one failed: disk full",
        ),
        (
            DurableInfo(problem="disk full", awaited=True),
            "no durable snapshot; the last one failed: disk full; programs that write to the job wait for "
            "the next one",
        ),
    ],
)
def test_a_job_says_how_old_its_last_durable_snapshot_is(
    capsys: pytest.CaptureFixture[str], durable: DurableInfo, text: str
) -> None:
    tables.show_job(JOB.model_copy(update={"durable": durable, "at": 107.0, "fallbacks": 2}))
    shown = " ".join(capsys.readouterr().out.split())
    assert text in shown and "went back to a snapshot as a whole: 2 times" in shown


def test_a_job_shows_who_holds_snapshots_and_how_many_tasks_are_unprotected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables.show_job(JOB)
    shown = capsys.readouterr().out
    assert "held by" not in shown and "unprotected" not in shown
    assert "snapshots of" not in shown and "at least once" not in shown
    seen = {"age": 0.5, "bytes": 2048.0, "seconds": 0.0012, "taken": 1_500.0}
    counters = replace(TASK.counters, snapshot=seen)
    tasks = [
        TASK.model_copy(update={"holder": 7, "counters": counters, "state": "running"}),
        TASK.model_copy(update={"counters": replace(TASK.counters, snapshot=seen | {"taken": 1.0})}),
    ]
    tables.show_job(JOB.model_copy(update={"tasks": tasks, "unprotected": 1, "guarantee": "at_least_once"}))
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].endswith(": failed, 2.5 s, at least once")
    rows = [line.split() for line in shown.splitlines() if line.startswith("count[0]")]
    assert [" ".join(row) for row in rows[2:]] == [
        "count[0] 7 0.5 s 2.0 KiB 1.2 ms 1,500",
        "count[0] - - 2.0 KiB 1.2 ms 1",
    ]
    assert "unprotected: 1 task could not go on if the worker was lost now" in shown


def test_exchanges_that_are_not_as_most_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    vertices = [
        VertexInfo(name=name, parallelism=1, operators=[], is_source=False, bounded=True, stream="", sink="")
        for name in ("read", "count")
    ]
    edges = [
        EdgeInfo(source=0, target=1, input=0, partitioner="hash", kind=kind)
        for kind in ("blocking", "pipelined_bounded")
    ]
    graph = GraphInfo(
        job="j1", vertices=vertices, edges=edges, restart_strategy="individual", on_unavailable="wait"
    )
    tables.show_exchanges(graph)
    assert capsys.readouterr().out == "exchange read => count: hash, blocking\n"


def test_a_job_shows_the_state_that_was_lost_with_its_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [TASK.model_copy(update={"index": index, "state_rows_lost": index}) for index in range(8)]
    tables.show_job(JOB.model_copy(update={"tasks": tasks, "state_rows_lost": 28}))
    shown = "count[1] 1, count[2] 2, count[3] 3, count[4] 4, count[5] 5, ..."
    made = "made of earlier records that are not counted again"
    assert f"entries of state (keys) lost with tasks: 28 ({shown}), {made}\n" in capsys.readouterr().out


def test_no_jobs_names_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_jobs([])
    assert "minishuffle submit keyby" in capsys.readouterr().out


def test_a_preview_says_how_much_is_left_out() -> None:
    assert tables.shown_rows([("a", 1), ("b", 2)], 5) == "('a', 1)\n('b', 2)"
    assert tables.shown_rows(list(range(1500)), 1) == "0\n… and 1,499 more; --json prints them all"


def test_a_preview_of_a_table_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    at = [datetime(2026, 3, 28, 20, tzinfo=UTC), None]
    tables.show_columns(pa.table({"at": pa.array(at, pa.timestamp("us", "UTC")), "n": [1, 2]}), 1)
    head, kinds, row, more = capsys.readouterr().out.splitlines()
    assert (head.split(), kinds.split()) == (["at", "n"], ["timestamp[us,", "tz=UTC]", "int64"])
    assert (row.rstrip(), more) == ("2026-03-28 20:00:00+00:00  1", "… and 1 more; --json prints them all")


def test_limits_are_listed_in_the_order_in_which_they_were_hit() -> None:
    def task(name: str, hit: dict[str, float]) -> TaskInfo:
        return TASK.model_copy(update={"name": name, "counters": TaskCounters(limits_hit=hit)})

    tasks = [
        task("producer", {"writer": 3.5, "pool": 3.25}),
        task("consumer", {"credit": 2.0, "floating": 2.0}),
    ]
    assert tables.limits_hit(JOB.model_copy(update={"tasks": tasks})) == [
        {"limit": "floating", "task": "consumer[0]", "seconds": 1.0},
        {"limit": "credit", "task": "consumer[0]", "seconds": 1.0},
        {"limit": "pool", "task": "producer[0]", "seconds": 2.25},
        {"limit": "writer", "task": "producer[0]", "seconds": 2.5},
    ]


def test_latencies_are_shown_of_tasks_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    latency = {"count": 1234.0, "p50": 0.005, "p95": 0.02, "p99": 1.0, "max": 2.5}
    marked = TASK.model_copy(update={"index": 1, "counters": TaskCounters(latency=latency)})
    tables.show_job(JOB.model_copy(update={"tasks": [TASK, marked]}))
    shown = capsys.readouterr().out
    lines = shown[shown.index("latency of") :].splitlines()
    assert lines[1].split() == [
        "count[1]",
        "1,234",
        "5.0",
        "ms",
        "20.0",
        "ms",
        "1,000.0",
        "ms",
        "2,500.0",
        "ms",
    ]
    assert not lines[2].startswith("count[0]")
    tables.show_job(JOB)
    assert "latency of" not in capsys.readouterr().out


def test_a_submission_says_how_many_workers_are_lost() -> None:
    there = STATUS.workers[0]
    lost = [there.model_copy(update={"worker": number, "state": "lost"}) for number in (2, 3)]
    spare = there.model_copy(update={"worker": 4, "standby": True})
    earlier = lost[0].model_copy(update={"report": WorkerReport()})
    assert tables.lost_text(STATUS.model_copy(update={"workers": [there, earlier]})) == ""
    one = STATUS.model_copy(update={"workers": [there, lost[0], spare]})
    assert tables.lost_text(one) == " (1 of 2 workers is lost)"
    assert (
        tables.lost_text(one.model_copy(update={"workers": [there, *lost]})) == " (2 of 3 workers are lost)"
    )


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            SavepointInfo(number=1, bytes=12_000, seconds=3.25, stood_seconds=0.125),
            "12,000 bytes in 3.2 s, no task stood longer than 0.12 s",
        ),
        (SavepointInfo(number=1, phase="writing"), "writing, for now"),
        (SavepointInfo(number=1, problem="the disk is full"), "failed: the disk is full"),
    ],
)
def test_a_savepoint_says_what_it_took_or_how_far_it_is(found: SavepointInfo, text: str) -> None:
    assert tables.savepoint_text(found) == text

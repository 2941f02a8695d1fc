"""Failures of a job that runs already: what is watched, who is struck, and two on real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.api.stream import Stream
from minishuffle.bench import drill, running
from minishuffle.bench.numbered import Gap
from minishuffle.bench.running import JobWatch, drill_running, records_by_subtask, totals_problems, victims_of
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import JobInfo, TaskInfo

MILLISECOND = 1_000_000
LINE = 'minishuffle_task_records_total{{direction="{}",pipeline_id="{}",subtask="{}",vertex_id="1"}} {}'


def test_records_are_added_up_by_subtask_of_one_job() -> None:
    lines = [LINE.format("in", "j1", 0, 5), LINE.format("out", "j1", 0, 7), LINE.format("in", "j1", 3, 1)]
    text = "\n".join(["# HELP x", *lines, LINE.format("in", "j2", 0, 100), ""])
    assert records_by_subtask(text, "j1") == {(1, 0): 12.0, (1, 3): 1.0}


def watched(*seen: tuple[int, int, int]) -> JobWatch:
    """Subtasks 0[0] and 1[0]; number, milliseconds and worker of each time at which one had moved on."""
    watch = JobWatch("j1", [(0, 0), (1, 0)], "token")
    for number, at, worker in seen:
        watch._seen[number].append((at * MILLISECOND, worker))
    return watch


def test_a_victim_is_back_when_it_passes_something_on_elsewhere() -> None:
    watch = watched((1, 90, 2), (1, 101, 2), (1, 140, 3))
    assert watch.outage(100 * MILLISECOND, frozenset([1]), lost=2) == 40.0
    with pytest.raises(ShuffleError, match=r"subtask 1\[0\] has passed nothing on since it failed"):
        watch.outage(150 * MILLISECOND, frozenset([1]), lost=2)


def test_silences_are_those_of_subtasks_that_move() -> None:
    watch = watched((0, 10, 1), (0, 70, 1), (1, 200, 2))
    assert watch.moving(0, 100 * MILLISECOND) == {0}
    assert watch.gaps(0, 100 * MILLISECOND, frozenset([0])) == [Gap(60.0, 10 * MILLISECOND, 0)]


def task(operator: int, index: int, worker: int, records: int = 10, state: str = "running") -> TaskInfo:
    fields = {"operator": operator, "name": f"v{operator}", "index": index, "attempt": 1, "worker": worker}
    counters = {"records_in": records, "records_out": records}
    return TaskInfo.model_validate({**fields, "state": state, "counters": counters})


def test_a_worker_with_the_only_subtask_of_an_operator_is_no_victim() -> None:
    assert victims_of([task(0, 0, 1), task(1, 0, 1), task(1, 1, 2), task(1, 2, 3)]) == [2, 3]
    assert victims_of([task(0, 0, 1), task(1, 0, 2)]) == []


def job(*tasks: TaskInfo, dropped: int = 5, in_flight: int = 3) -> JobInfo:
    fields: dict[str, Any] = {"rows_dropped": {"suspected": dropped}, "rows_in_flight": in_flight}
    return JobInfo(job="j1", name="a", state="running", submitted_at=0.0, tasks=list(tasks), **fields)


def test_totals_that_fall_are_found() -> None:
    before = job(task(0, 0, 1), task(1, 0, 1))
    assert totals_problems("process", before, job(task(0, 0, 1), task(1, 0, 2, 11), in_flight=9)) == []
    assert totals_problems("link", before, job(task(0, 0, 1), task(1, 0, 2), in_flight=4)) == [
        "books: rows are counted as in flight, although no process died"
    ]
    assert totals_problems("stop", before, job(task(0, 0, 1, 9), task(1, 0, 2), dropped=4)) == [
        "books: the count of dropped records fell by 1",
        "books: records_in of v0[0] fell",
        "books: records_out of v0[0] fell",
    ]


@pytest.mark.parametrize("kind", ["task", "host"])
def test_what_cannot_be_caused_from_outside_is_refused(kind: Any) -> None:
    client: Any = None
    with pytest.raises(UsageError, match=f"{kind}: a running job can be drilled with process, link, stop"):
        drill_running(client, "j1", [kind], lambda worker, number: None, every=1.0, seed=0)


@pytest.mark.slow
def test_a_job_that_others_started_is_drilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed, and a connection broken; then nobody is left whom it would be fair to strike."""
    # Beside other tests anybody is silent for a while.
    monkeypatch.setattr(drill, "GAP_ALLOWANCE_MS", 60_000.0)

    def numbers(start: int, count: int) -> list[int]:
        return list(range(start, start + count))

    with LocalCluster(workers=3, slots=2, standby=1) as cluster:
        secret = ["--secret-file", str(cluster.state_dir / "secret"), "--cluster", "local"]
        where = ["--coordinator", str(cluster.client.address), *secret]
        source = Stream.generate(numbers, rate=3_000)
        handle = cluster.submit(source.key_by(lambda n: n % 100).count(emit="each").to_count(), parallelism=3)
        options = ["drill", "--job", handle.id, "--times", "2", "--every", "0.5", "--json", *where]
        result = CliRunner().invoke(cli, options)
        found = json.loads(result.stdout)
        assert (result.exit_code, found["failed_checks"]) == (0, []), result.output
        assert (found["times"], found["recovered"], found["others_restarted"]) == (2, 2, 0)
        assert found["subtasks_watched"] == len(handle.info().tasks)
        assert found["outage_ms"]["max"] > 0 and found["dropped"] > 0
        assert "missing" not in found, "there is no log to compare with"
        attempts = [task.attempt for task in handle.info().tasks]
        assert sorted(attempts) == [1, 1, 1, 1, 2, 2], "those of one worker of three"
        handle.cancel()
        lonely = cluster.submit(source.to_count(), parallelism=1)
        result = CliRunner().invoke(cli, ["drill", "--job", lonely.id, *where])
        assert (result.exit_code, "has the only subtask of an operator" in result.stderr) == (2, True)
        lonely.cancel()


def test_a_job_that_passes_nothing_on_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "QUIET_SECONDS", 0.0)
    info = job(task(0, 0, 1))

    class Client:
        read_token = "token"

        def job(self, job: str) -> JobInfo:
            return info

        def status(self) -> Any:
            return type("Status", (), {"workers": []})

    client: Any = Client()
    with pytest.raises(ShuffleError, match="job j1 has passed no records on within 0.01 s"):
        drill_running(client, "j1", ["stop"], lambda worker, number: None, every=0.01, seed=0)

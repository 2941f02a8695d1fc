"""Each cause is found from two looks at a job, and nothing is found in a healthy one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.observe.diagnosis import RULES, SHORT_OF_CPU, Diagnosis, Link, Look, diagnose_job
from minishuffle.wire.messages import PeerReport, WorkerReport
from minishuffle.wire.requests import BrokenLink, DeployWait, JobInfo, SlotWait, TaskInfo, WorkerInfo

SECONDS = 3.0
LOOKS = 30.0
SOURCE, MIDDLE, SINK = 0, 1, 2
NAMES = ("lines", "count", "to_files")
CHAIN = (Link(SOURCE, MIDDLE, "hash"), Link(MIDDLE, SINK, "rebalance"))


@dataclass
class Subtask:
    """What one did in the time: shares, rates, means of the looks."""

    operator: int
    index: int
    worker: int
    busy: float = 0.3
    backpressured: float = 0.0
    cpu: float | None = None
    """None: all of the time in which it is busy."""
    cpu_wait: float = 0.0
    records_in: float = 1_000.0
    records_out: float = 1_000.0
    flow: dict[str, float] = field(default_factory=dict)
    hot_keys: dict[str, float] = field(default_factory=dict)

    def counters(self, seconds: float) -> TaskCounters:
        """After so much time; everything has grown evenly before, too."""
        cpu = self.busy if self.cpu is None else self.cpu
        return TaskCounters(
            records_in=int(self.records_in * seconds),
            records_out=int(self.records_out * seconds),
            bytes_out=int(100 * self.records_out * seconds),
            buffers_out=int(self.records_out * seconds / 100),
            busy_seconds=self.busy * seconds,
            idle_seconds=(1 - self.busy - self.backpressured) * seconds,
            backpressured_seconds=self.backpressured * seconds,
            cpu_seconds=cpu * seconds,
            cpu_wait_seconds=self.cpu_wait * seconds,
            flow={"looks": seconds * 10, **{what: 10 * seconds * each for what, each in self.flow.items()}},
            hot_keys=self.hot_keys,
        )


@dataclass
class Case:
    """A job of three vertices with two subtasks each, on two workers."""

    tasks: dict[tuple[int, int], Subtask] = field(
        default_factory=lambda: {
            (operator, index): Subtask(operator, index, 1 + index, records_in=1_000.0 if operator else 0.0)
            for operator in (SOURCE, MIDDLE, SINK)
            for index in (0, 1)
        }
    )
    cpu: dict[int, float] = field(default_factory=lambda: {1: 0.4, 2: 0.4})
    gc: dict[int, float] = field(default_factory=lambda: {1: 0.0, 2: 0.0})
    round_trip: float = 0.0001
    smoothed: float = 0.0001
    in_flight: int = 0
    names: tuple[str, ...] = NAMES

    def change(self, operator: int, index: int | None = None, **fields: Any) -> Case:
        for (number, subtask), each in self.tasks.items():
            if number == operator and index in (None, subtask):
                for name, value in fields.items():
                    setattr(each, name, value)
        return self

    def look(self, seconds: float) -> Look:
        tasks = [
            TaskInfo(
                operator=each.operator,
                name=self.names[each.operator],
                index=each.index,
                attempt=1,
                state="running",
                worker=each.worker,
                counters=each.counters(seconds),
            )
            for each in self.tasks.values()
        ]
        job = JobInfo(job="j7", name="words", state="running", submitted_at=1.0, tasks=tasks)
        return Look(job, [self._worker(number, seconds) for number in (1, 2)])

    def _worker(self, number: int, seconds: float) -> WorkerInfo:
        report = WorkerReport(
            clock_seconds=1000.0 + seconds,
            cpu_seconds=self.cpu[number] * seconds,
            gc_seconds=self.gc[number] * seconds,
            segment_bytes=32_768,
        )
        peer = PeerReport(
            worker=3 - number,
            connections=1,
            local="a",
            remote="b",
            round_trip_seconds=self.round_trip,
            smoothed_round_trip_seconds=self.smoothed,
            in_flight_bytes=self.in_flight,
        )
        return WorkerInfo(
            worker=number,
            epoch=1,
            state="alive",
            host="h",
            pid=1,
            data_port=1,
            metrics_port=1,
            slots=2,
            slots_free=0,
            heartbeat_age_seconds=0.0,
            report=report,
            peers=[peer],
        )

    def diagnosis(self) -> Diagnosis:
        return diagnose_job(self.look(5.0), self.look(5.0 + SECONDS), CHAIN)


def test_a_job_that_waits_for_a_slot_does_nothing_else() -> None:
    case = Case().change(SOURCE, backpressured=0.7)
    before, after = case.look(5.0), case.look(5.0 + SECONDS)
    wait = SlotWait(worker=2, until=70.0, text="count[1] wait for a slot: worker 2 was lost")
    after = Look(after.job.model_copy(update={"slot_waits": [wait]}), after.workers)
    found = diagnose_job(before, after, CHAIN)
    assert (found.verdict, found.task, found.rule) == ("waiting", "", "waiting for a slot")
    assert found.evidence == {"why": [wait.text]}
    assert "start another worker" in found.advice


def test_a_job_of_which_nothing_runs_waits_for_what_is_to_be_deployed() -> None:
    case = Case()
    before, after = case.look(5.0), case.look(5.0 + SECONDS)
    wait = DeployWait(operators=[SINK], text="stage 2 of 2 (to_files) waits for 4 free slots")
    job = after.job.model_copy(update={"deploy_waits": [wait]})
    found = diagnose_job(before, Look(job, after.workers), CHAIN)
    assert (found.verdict, found.evidence["not_deployed"]) == ("healthy", [wait.text]), "the first stage runs"
    ended = [task.model_copy(update={"state": "finished"}) for task in job.tasks]
    found = diagnose_job(before, Look(job.model_copy(update={"tasks": ended}), after.workers), CHAIN)
    assert (found.verdict, found.task, found.rule) == ("waiting", "", "waiting to be deployed")
    assert found.evidence == {"why": [wait.text]} and "start another worker" in found.advice


@pytest.mark.parametrize("states", [("paused", "paused"), ("running", "paused"), ("paused", "running")])
def test_a_job_that_is_paused_does_nothing_else(states: tuple[str, str]) -> None:
    """Whatever its tasks did before that, and its links and slots do."""
    case = Case().change(SOURCE, backpressured=0.7)
    left = ["rows before input 0 of join, which is read later"]
    looks = [
        Look(look.job.model_copy(update={"state": state, "pause_left": left}), look.workers)
        for state, look in zip(states, (case.look(5.0), case.look(5.0 + SECONDS)), strict=True)
    ]
    found = diagnose_job(*looks, CHAIN)
    assert (found.verdict, found.task, found.rule, found.evidence) == ("paused", "", "paused", {"left": left})


def held_by_the_middle() -> Case:
    """Sources wait for a vertex that is busy all the time."""
    case = Case().change(SOURCE, backpressured=0.7, flow={"output": 1.0, "uncredited": 0.9})
    return case.change(MIDDLE, busy=0.98, flow={"queued": 1.0, "input": 1.0, "floating": 1.0})


def held_by_the_exchange() -> Case:
    """Sources wait, and nobody behind them is busy."""
    case = Case().change(SOURCE, backpressured=0.6, flow={"output": 1.0, "uncredited": 0.8})
    return case.change(MIDDLE, busy=0.2, flow={"queued": 0.1})


def skewed() -> Case:
    keys = {"0:1:'the'": 0.6, "0:0:'a'": 0.1}
    case = held_by_the_middle().change(SOURCE, hot_keys=keys)
    case.change(MIDDLE, 0, busy=0.3, records_in=300.0, flow={})
    return case.change(MIDDLE, 1, records_in=1_700.0)


SICK: dict[str, tuple[Case, str]] = {
    "garbage collection": (held_by_the_middle(), "count[0]"),
    "a worker short of CPU": (held_by_the_middle().change(MIDDLE, cpu=0.45, cpu_wait=0.45), "count[0]"),
    "interpreter lock": (
        held_by_the_middle()
        .change(MIDDLE, cpu=0.3, cpu_wait=0.6)
        .change(SINK, busy=0.9, cpu=0.3)
        .change(SOURCE, cpu=0.25),
        "count[0]",
    ),
    "skewed key": (skewed(), "count[1]"),
    "one slow channel": (
        held_by_the_middle().change(MIDDLE, 0, busy=0.2, flow={}).change(MIDDLE, 1, busy=1.0),
        "count[1]",
    ),
    "slow sink": (
        held_by_the_middle()
        .change(MIDDLE, busy=0.2, backpressured=0.75)
        .change(SINK, busy=0.99, cpu=0.02, flow={"queued": 1.0}),
        "to_files[0]",
    ),
    "slow function or sink": (
        held_by_the_middle()
        .change(MIDDLE, busy=0.2, backpressured=0.75)
        .change(SINK, busy=0.99, cpu=0.02, flow={"queued": 1.0}),
        "map -> to_files[0]",
    ),
    "slow function": (held_by_the_middle(), "count[0]"),
    "network": (held_by_the_exchange().change(SOURCE, flow={"output": 1.0, "unsent": 0.7}), "lines[0]"),
    "credit round trip too long": (held_by_the_exchange(), "lines[0]"),
    "too few buffers": (held_by_the_exchange(), "lines[0]"),
    "unknown": (held_by_the_exchange().change(SOURCE, flow={}), "lines[0]"),
}
SICK["slow function or sink"][0].names = (*NAMES[:SINK], "map -> to_files")
SICK["garbage collection"][0].gc = {1: 0.4, 2: 0.0}
SICK["interpreter lock"][0].cpu = {1: 0.97, 2: 0.97}
SICK["credit round trip too long"][0].round_trip = 0.05
SICK["credit round trip too long"][0].smoothed = 0.06
SICK["credit round trip too long"][0].in_flight = 1 << 20


ON_ITS_OWN = (
    ". On a processor of its own it would take about 1,887 records/s in place of 1,000: where that is "
    "too few, make its code cheaper"
)


def test_there_is_a_case_for_each_rule() -> None:
    assert list(dict.fromkeys(rule.name for rule in RULES)) == list(SICK)


@pytest.mark.parametrize("rule", SICK)
def test_each_cause_is_named_with_its_task_and_its_numbers(rule: str) -> None:
    case, task = SICK[rule]
    found = case.diagnosis()
    assert (found.job, found.verdict, found.rule) == ("j7", "throttled", rule)
    assert found.task.partition("[")[0] == task.partition("[")[0]
    if rule in ("skewed key", "one slow channel"):
        assert found.task == task
    (advice,) = {each.advice for each in RULES if each.name == rule}
    assert found.advice.removesuffix(ON_ITS_OWN if rule == SHORT_OF_CPU else "") == advice
    assert found.evidence["busy"] == pytest.approx(found.evidence["busy"]) and found.evidence["worker"] in (
        1,
        2,
    )
    own = {
        "garbage collection": ("gc_seconds_per_second", 0.4),
        "a worker short of CPU": ("cpu_wait", 0.45),
        "interpreter lock": ("worker_cpu", 0.97),
        "skewed key": ("hot_keys", [{"key": "'the'", "share": 0.6}]),
        "one slow channel": ("times_slower_per_record", 5.0),
        "slow sink": ("cpu_share_of_busy", pytest.approx(0.0202, abs=1e-4)),
        "slow function or sink": ("cpu_share_of_busy", pytest.approx(0.0202, abs=1e-4)),
        "slow function": ("cpu_share_of_busy", 1.0),
        "network": ("unsent", 0.7),
        "credit round trip too long": ("round_trip_seconds", 0.05),
        "too few buffers": ("uncredited", 0.8),
        "unknown": ("uncredited", 0.0),
    }
    name, value = own[rule]
    assert found.evidence[name] == value
    slow = (
        "one slow channel",
        "slow sink",
        "slow function or sink",
        "slow function",
        "a worker short of CPU",
    )
    assert found.own_code is (rule in slow)
    assert found.evidence["bytes_per_record"] == 100.0
    assert found.evidence["buffer_fill"] == pytest.approx(100 * 100 / 32_768, rel=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_wrong_with_a_job_in_which_nobody_waits(seed: int) -> None:
    random = Random(seed)
    case = Case()
    for (operator, index), _ in list(case.tasks.items()):
        busy = 0.94 * random.random()
        rate = random.uniform(1, 1e5)
        case.change(
            operator,
            index,
            busy=busy,
            cpu=busy * random.random(),
            backpressured=min(0.09 * random.random(), 1 - busy),
            records_in=rate if operator else 0.0,
            records_out=rate,
            flow={"output": random.random(), "queued": random.random(), "uncredited": random.random()},
        )
    case.cpu = {1: random.random(), 2: random.random()}
    found = case.diagnosis()
    assert (found.verdict, found.rule, found.task) == ("healthy", "none", "")
    assert found.advice.startswith("nothing is wrong")
    assert found.evidence["most_backpressured"] < 0.1


@pytest.mark.parametrize(("busy", "is_told"), [(0.9, False), (0.99, True)])
def test_a_task_that_keeps_up_at_its_limit_is_named(busy: float, is_told: bool) -> None:
    found = Case().change(SINK, 1, busy=busy, backpressured=0.0).diagnosis()
    assert found.verdict == "healthy"
    assert (f", but {NAMES[SINK]}[1] is at its limit: it takes" in found.advice) is is_told


def test_a_task_that_is_busy_all_the_time_falls_behind_before_anybody_waits_for_it() -> None:
    """Small rows fit into buffers for a minute."""
    found = Case().change(MIDDLE, busy=0.98, cpu=0.01, records_in=225.0).diagnosis()
    assert (found.verdict, found.task, found.rule) == ("throttled", "count[0]", "slow function")
    assert found.evidence["falls_behind"] == "450 of 2,000 records/s, the rest waits in buffers"
    for keeps_up in ({"busy": 0.98}, {"busy": 0.9, "records_in": 225.0}):
        assert Case().change(MIDDLE, **keeps_up).diagnosis().verdict == "healthy"


@pytest.mark.parametrize(
    ("sink", "sink_is_busy", "text"),
    [
        (1_500.0, False, ""),
        (1_000.0, False, "1,000 of 2,000 records/s, the rest waits in buffers"),
        (1_000.0, True, "1,000 of up to 2,000 records/s, the rest waits in buffers"),
    ],
)
def test_of_vertices_with_producers_in_common_those_with_time_left_take_what_is_sent_to_them(
    sink: float, sink_is_busy: bool, text: str
) -> None:
    case = Case().change(MIDDLE, busy=0.98, cpu=0.01, records_in=500.0)
    case.change(SINK, busy=0.97 if sink_is_busy else 0.3, records_in=sink)
    twice = (*CHAIN, Link(SOURCE, SINK, "rebalance"))
    found = diagnose_job(case.look(5.0), case.look(8.0), twice)
    assert found.evidence.get("falls_behind", "") == text
    assert found.task == ("count[0]" if text else "")


@pytest.mark.parametrize(("cpu_wait", "rule"), [(0.45, "slow function"), (0.9, "a worker short of CPU")])
def test_a_processor_is_missed_only_if_a_whole_one_would_do(cpu_wait: float, rule: str) -> None:
    """For what is sent to the task; while its producers wait, for twice of what it takes."""
    busy = {"busy": 0.98, "cpu": 0.96 - cpu_wait, "cpu_wait": cpu_wait}
    waited_for = held_by_the_middle().change(MIDDLE, **busy)
    for case in (waited_for, Case().change(MIDDLE, **busy, records_in=225.0)):
        found = case.diagnosis()
        assert (found.rule, found.evidence["cpu_wait"]) == (rule, cpu_wait)
        assert ("a whole one would not do" in found.advice) is (rule == "slow function")
        assert ("it would take about" in found.advice) is (rule == "a worker short of CPU")


def test_workers_without_a_connection_explain_whatever_else_there_is_to_see() -> None:
    text = "no connection between worker 1 (a:1) and worker 3 (b:2) for 10 s: no route"
    for case, _ in SICK.values():
        before, after = case.look(5.0), case.look(5.0 + SECONDS)
        links = [BrokenLink(workers=[1, 3], text=text)]
        after = Look(after.job.model_copy(update={"links_broken": links}), after.workers)
        found = diagnose_job(before, after, CHAIN)
        assert (found.verdict, found.rule, found.task) == ("waiting", "waiting for a connection", "")
        assert found.evidence == {"workers": [1, 3], "why": [text]}
        assert "firewalls" in found.advice
        links = [BrokenLink(workers=[1, 3], text=text, excluded=3)]
        after = Look(after.job.model_copy(update={"links_broken": links}), after.workers)
        found = diagnose_job(before, after, CHAIN)
        assert (found.verdict, found.evidence["excluded"]) == ("throttled", [text])
        found = diagnose_job(before, Look(after.job.model_copy(update={"tasks": []}), after.workers), CHAIN)
        assert (found.verdict, found.rule) == ("waiting", "running without a worker")
        assert found.evidence == {"workers": [1, 3], "why": [text]}


def test_a_producer_without_a_processor_is_named_if_nobody_behind_it_is_busy() -> None:
    case = held_by_the_exchange().change(SOURCE, flow={}, backpressured=0.12, cpu=0.1, cpu_wait=0.7)
    found = case.diagnosis()
    assert (found.task.partition("[")[0], found.rule) == ("lines", "a worker short of CPU")
    assert (found.evidence["cpu_wait"], found.evidence["worker_cpu"]) == (0.7, 0.4)


@pytest.mark.parametrize("starved", [0.1, 0.9])
def test_without_credit_it_says_who_stops_a_connection_and_nothing_of_credit(starved: float) -> None:
    cases = {
        "slow function": held_by_the_middle().change(MIDDLE, flow={"queued": 1.0, "starved": starved}),
        "unknown": held_by_the_exchange().change(SOURCE, flow={}).change(MIDDLE, flow={"starved": starved}),
    }
    for rule, case in cases.items():
        before, after = case.look(5.0), case.look(5.0 + SECONDS)
        after = Look(after.job.model_copy(update={"flow_control": "tcp"}), after.workers)
        found = diagnose_job(before, after, CHAIN)
        assert found.rule == rule and found.evidence["stops_connection"] == starved
        assert "uncredited" not in found.evidence
        assert ("stops the connection" in found.advice) == (starved > 0.3)


def test_a_connection_is_full_if_what_is_in_flight_takes_longer_than_it_has_to() -> None:
    case = held_by_the_exchange()
    case.round_trip, case.smoothed, case.in_flight = 0.003, 0.27, 200_000
    found = case.diagnosis()
    assert (found.rule, found.evidence["queued_bytes"]) == ("network", 200_000)
    case.in_flight = 2_000
    assert case.diagnosis().rule == "credit round trip too long"


def test_of_producers_that_wait_one_whose_channels_show_why_is_looked_at() -> None:
    case = held_by_the_exchange().change(SOURCE, 0, backpressured=0.99, flow={})
    assert (case.diagnosis().task, case.diagnosis().rule) == ("lines[1]", "too few buffers")


def test_the_bottleneck_is_behind_those_that_wait_however_many_they_are() -> None:
    case = held_by_the_middle().change(MIDDLE, busy=0.1, backpressured=0.85)
    case.change(SINK, busy=0.95, flow={"queued": 1.0})
    found = case.diagnosis()
    assert (found.task.partition("[")[0], found.rule) == ("to_files", "slow function")


def test_a_sink_that_waits_for_the_coordinator_is_slow() -> None:
    case = held_by_the_middle().change(MIDDLE, busy=0.2, backpressured=0.7)
    case.change(SINK, busy=0.05, backpressured=0.9, cpu=0.05)
    found = case.diagnosis()
    assert (found.task.partition("[")[0], found.rule) == ("to_files", "slow sink")


def test_a_sink_that_is_in_line_for_a_processor_waits_for_no_other_system() -> None:
    case = held_by_the_middle().change(MIDDLE, busy=0.2, backpressured=0.75)
    case.change(SINK, busy=0.95, cpu=0.45, cpu_wait=0.5, flow={"queued": 1.0})
    assert case.diagnosis().rule == SHORT_OF_CPU
    case.cpu = {1: 0.8, 2: 0.8}
    assert case.diagnosis().rule == "interpreter lock"


def test_what_a_bottleneck_does_at_most_is_its_rate_by_its_busy_time() -> None:
    found = held_by_the_middle().diagnosis()
    assert found.evidence["records_per_second"] == 1000.0
    assert found.evidence["records_per_second_if_always_busy"] == pytest.approx(1000 / 0.98, rel=1e-3)


def test_a_subtask_that_has_reported_nothing_is_left_out() -> None:
    look = Case().look(5.0)
    found = diagnose_job(look, look, CHAIN)
    assert (found.verdict, found.evidence) == ("healthy", {"records_per_second": 0})

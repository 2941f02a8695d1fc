"""Which stage is deployed when, which slots a job holds for it, and that none waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.subtasks import first_attempts
from minishuffle.coordinator.scheduling.stageprogress import StageProgress, stage_slots
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.plan.stages import slots_needed


def graph(
    widths: list[int], *edges: str, start_when: Any = "all", endless: Any = (), groups: str = ""
) -> JobGraph:
    """Blocking edges as ``0=1``, those that are read first as ``0!1``, pipelined ones as ``0-1``."""
    return JobGraph(
        vertices=[
            Vertex(
                name=f"v{n}",
                parallelism=width,
                operators=[],
                is_source=False,
                program=b"",
                bounded=n not in endless,
                slot_group=groups[n] if groups else "",
            )
            for n, width in enumerate(widths)
        ],
        edges=[
            Edge(
                source=int(edge[0]),
                target=int(edge[2]),
                input=int(edge[1] == "!"),
                partitioner="broadcast" if edge[1] == "!" else "hash",
                kind="pipelined_bounded" if edge[1] == "-" else "blocking",
            )
            for edge in edges
        ],
        settings=JobSettings(schedule="stages", start_when=start_when),
    )


class Tasks:
    """The states of a job's subtasks, as its stages hear of them."""

    def __init__(self, given: JobGraph) -> None:
        self.graph, self.progress = given, StageProgress(given)
        self.tasks = first_attempts(given, (0,) * given.slots_needed, waiting=True)
        self.again: list[tuple[int, int]] = []

    def move(self, vertex: int, state: str, index: int | None = None) -> None:
        for key, task in self.tasks.items():
            if key[0] == vertex and index in (None, key[1]) and task.state != state:
                before, task.state = task.state, state
                if self.progress.moved(key, before, state):
                    self.again.append(key)
                recalled = StageProgress(self.graph)
                recalled.recall(self.progress.record(), self.tasks)
                assert recalled.record() == self.progress.record()
        self.progress.changed = True

    def stage(self, stage: int, state: str) -> None:
        for vertex in self.progress.order[stage].vertices:
            self.move(vertex, state)

    @property
    def states(self) -> list[str]:
        return [self.progress.state(stage) for stage in range(len(self.progress.order))]

    def due(self) -> list[int]:
        return [due.stage for due in self.progress.due()]


def test_a_stage_is_due_when_every_partition_that_it_reads_is_complete() -> None:
    tasks = Tasks(graph([2, 3], "0=1"))
    assert tasks.due() == [0] and tasks.progress.inputs_left(1) == [0]
    tasks.stage(0, "created")
    assert tasks.due() == [] and tasks.states == ["deployed", "waiting"]
    tasks.move(0, "finished", 1)
    assert tasks.due() == [] and tasks.progress.partitions(0) == (1, 2)
    tasks.move(0, "finished", 0)
    (due,) = tasks.progress.due()
    assert (due.stage, due.slots, due.early) == (1, {0, 1, 2}, False)
    assert tasks.states == ["complete", "waiting"]
    tasks.stage(1, "created")
    tasks.stage(1, "finished")
    assert tasks.states == ["complete", "complete"] and tasks.due() == []


def test_a_producer_may_be_complete_before_its_stage_is() -> None:
    tasks = Tasks(graph([1, 1, 1], "0-1", "0=2"))
    tasks.stage(0, "running")
    tasks.move(0, "finished")
    assert tasks.states == ["deployed", "waiting"] and tasks.due() == [1]
    assert tasks.progress.slots_wanted() == {0}


def test_slots_are_given_back_when_no_stage_runs_in_them() -> None:
    tasks = Tasks(graph([3, 1, 2], "0=2", "1=2", groups="aab"))
    assert stage_slots(tasks.graph) == [{0, 1, 2}, {0}, {3, 4}]
    tasks.stage(0, "created")
    tasks.stage(1, "created")
    tasks.move(0, "finished", 2)
    assert tasks.progress.take_idle(range(5)) == [3, 4], "a stage gives its slots back as a whole"
    tasks.move(0, "finished")
    assert tasks.progress.take_idle([0, 1, 2]) == [1, 2]
    assert not tasks.progress.changed
    tasks.stage(1, "finished")
    assert tasks.progress.take_idle([0]) == [0]


def test_a_complete_stage_runs_again_in_its_next_version() -> None:
    tasks = Tasks(graph([2, 1, 1], "0=1", "1=2"))
    tasks.stage(0, "created")
    tasks.stage(0, "finished")
    assert tasks.due() == [1]
    tasks.move(0, "lost", 1)
    assert tasks.again == [(0, 1)] and tasks.due() == [] and tasks.states[0] == "deployed"
    tasks.move(0, "restarting", 1)
    tasks.move(0, "lost", 0)
    assert [tasks.progress.version(stage) for stage in range(3)] == [2, 1, 1], "once for both"
    tasks.move(0, "created", 1)
    tasks.move(0, "finished")
    assert tasks.due() == [1] and tasks.progress.record() == (("complete", 2), ("waiting", 1), ("waiting", 1))


@pytest.mark.parametrize(
    ("edges", "start_when", "early"),
    [
        (["0=3", "1=2", "2=3"], "any", {0, 1, 2}),
        (["0=3", "1=2", "2=3"], "all", None),
        (["0=3", "1=2", "2!3"], "any", None),
        (["0!3", "1=2", "2=3"], "any", {0, 1, 2}),
        (["0=3", "1=2", "1=3", "2=3"], "any", {0, 1, 2}),
        (["0=3", "1=3"], "any", {0, 1}),
    ],
)
def test_with_any_a_stage_goes_early_with_slots_for_what_it_waits_for(
    edges: list[str], start_when: str, early: set[int] | None
) -> None:
    """0 is complete, 1 runs, 2 waits for it and is 3 wide, and 3 reads 0 and others."""
    tasks = Tasks(graph([1, 1, 3, 2], *edges, start_when=start_when))
    tasks.stage(0, "created")
    tasks.stage(1, "created")
    if "1=2" not in edges:
        tasks.stage(2, "created")
        tasks.stage(2, "finished")
    tasks.stage(0, "finished")
    found = {due.stage: due for due in tasks.progress.due() if due.early}
    assert (found[3].slots if early else found) == (early or {})
    if early is None:
        return
    tasks.stage(3, "created")
    assert tasks.progress.slots_wanted() == early
    tasks.stage(1, "finished")
    assert "1=2" not in edges or tasks.due() == [2]
    tasks.stage(2, "created")
    tasks.stage(2, "finished")
    assert tasks.progress.slots_wanted() == {0, 1}, "its own alone: its inputs are complete"


def test_what_has_no_end_keeps_its_slots_beside_the_widest_that_has_one() -> None:
    assert slots_needed(graph([2, 4, 1], "1=2", endless={0})) == 4
    assert slots_needed(graph([2, 4, 1], "1=2", endless={0}, groups="abb")) == 6
    assert slots_needed(graph([2, 4, 1], "1=2", groups="abb")) == 4


def random_graph(draw: random.Random) -> JobGraph:
    count = draw.randint(2, 7)
    pairs = [(a, b) for b in range(count) for a in range(b) if draw.random() < 0.4] or [(0, 1)]
    inner = {a for a, _ in pairs}
    endless = {n for n in range(count) if n not in inner and draw.random() < 0.2}
    edges = [f"{a}{draw.choice('===!')}{b}" for a, b in pairs]
    groups = "".join(draw.choice("ab") for _ in range(count)) if draw.random() < 0.5 else ""
    widths = [draw.randint(1, 4) for _ in range(count)]
    return graph(widths, *edges, start_when=draw.choice(["any", "all"]), endless=endless, groups=groups)


@pytest.mark.parametrize("seed", range(60))
def test_every_stage_runs_with_the_slots_that_the_job_needs_at_the_least(seed: int) -> None:
    """As the coordinator deploys them: in order, all or none, and one that does not fit holds others back."""
    draw = random.Random(seed)
    given = random_graph(draw)
    tasks, total = Tasks(given), slots_needed(given) + draw.choice([0, 0, 1, 3])
    held: set[int] = set()
    losses = draw.choice([0, 3]) if len({vertex.slot_group for vertex in given.vertices}) == 1 else 0
    while True:
        held_back = False
        for due in tasks.progress.due():
            wanted = due.slots - held
            if wanted and (held_back or len(held | wanted) > total):
                held_back |= not due.early
                continue
            held |= wanted
            tasks.stage(due.stage, "created")
        assert held == tasks.progress.slots_wanted(), "nothing is held for nothing"
        able = [n for n, state in enumerate(tasks.states) if state == "deployed" and ends(tasks, n)]
        if not able:
            break
        stage = draw.choice(able)
        tasks.stage(stage, "finished")
        complete = [
            edge.source
            for edge in given.edges
            if tasks.tasks[edge.source, 0].state == "finished"
            and tasks.tasks[edge.target, 0].state == WAITING
        ]
        if losses and complete:
            losses -= 1
            tasks.move(draw.choice(complete), "lost", 0)
        held = tasks.progress.slots_wanted()
        assert len(held) <= total, "what runs again finds slots, in those of who waits for it"
    assert all(tasks.states[n] in ("complete", "deployed") for n in range(len(tasks.states)))
    assert all(not ends(tasks, n) or state == "complete" for n, state in enumerate(tasks.states))


def ends(tasks: Tasks, stage: int) -> bool:
    """Whether it can end now: nothing that it reads is missing."""
    vertices = tasks.progress.order[stage].vertices
    bounded = all(tasks.graph.vertices[vertex].bounded for vertex in vertices)
    return bounded and not tasks.progress.inputs_left(stage)

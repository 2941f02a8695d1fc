"""Faults of a simulated run: which, when, and how each is brought about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from random import Random
from typing import Literal, TypeAlias

from minishuffle.wire.messages import Heartbeat
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.requests import DrainWorker
from support.simulated_jobs import Plan
from support.simulation import Cluster, SimulatedWorker

__all__ = [
    "APART",
    "CLOCKS_SET",
    "DRAINING",
    "DURING_RECOVERY",
    "FORGETFUL",
    "GUARDED",
    "HEADLESS",
    "KINDS",
    "PAUSING",
    "SAVING",
    "Fault",
    "FaultKind",
    "draw_faults",
    "inject",
]

FaultKind: TypeAlias = Literal[
    "raise",
    "raise in open",
    "stick",
    "kill",
    "lose",
    "isolate",
    "cut",
    "cut for good",
    "cut control",
    "cut return",
    "kill return",
    "swallow",
    "delay",
    "stop",
    "stop for long",
    "worker",
    "cancel",
    "raise again",
    "raise on both sides",
    "kill twice",
    "stop coordinator",
    "kill coordinator",
    "replace coordinator",
    "hand over",
    "full disk",
    "set clock",
    "term",
    "drain",
    "pause",
    "savepoint",
]
"""A task raises, or does not react; a worker is killed, its machine is gone, or it is cut off from the
coordinator alone; a link between two workers breaks, loses all that is sent from now on, or is slow for a
while; two workers cannot reach each other any more, as long as they live; a control link breaks; as its
worker comes back, the next one breaks, or the worker or the coordinator is killed, at any point between the
facts that it says and the first thing that it does as desired; a worker
is stopped for less or more than its heartbeats may be late; a further worker comes; the user cancels the
job. What fails while something recovers: a task raises and its next attempt raises when it opens; a
producer and a consumer raise at one time; a worker is killed, and then the one that gets the next attempt
of anything; the coordinator does nothing for a while. The coordinator is killed, and started again with its
journal; or it is stopped, another takes its place, and it goes on; or it hands over to the next one. Its
journal cannot be written for a while, at whose end it is killed more often than not. Somebody sets the
system clock of all hosts, by an hour at most. A worker is sent SIGTERM, or a client asks it to leave.
The user pauses the job, and has it go on a while later, or takes a savepoint of it."""
KINDS: tuple[FaultKind, ...] = (
    "raise",
    "raise",
    "raise",
    "raise in open",
    "stick",
    "kill",
    "kill",
    "lose",
    "isolate",
    "cut",
    "cut",
    "cut for good",
    "cut control",
    "swallow",
    "delay",
    "stop",
    "stop for long",
    "worker",
)
DURING_RECOVERY: tuple[FaultKind, ...] = (
    "raise again",
    "raise again",
    "raise on both sides",
    "raise on both sides",
    "kill twice",
    "kill twice",
    "stop coordinator",
    "stop coordinator",
    "kill",
    "raise",
    "stop for long",
    "worker",
    "cut for good",
    "cut control",
)
"""What hits a recovery, and what begins one."""
HEADLESS: tuple[FaultKind, ...] = (
    "kill coordinator",
    "kill coordinator",
    "kill coordinator",
    "hand over",
    "replace coordinator",
    "replace coordinator",
    "stop coordinator",
    "kill",
    "kill",
    "lose",
    "raise",
    "raise",
    "raise again",
    "kill twice",
    "cut",
    "cut for good",
    "stop",
    "stop for long",
    "worker",
    "cut return",
    "cut return",
    "kill return",
    "kill return",
)
"""What happens to a coordinator, and while it is away."""
FORGETFUL: tuple[FaultKind, ...] = ("full disk", "full disk", "full disk", "cancel", *HEADLESS[4:])
"""The same, and what the journal did not take."""
CLOCKS_SET: tuple[FaultKind, ...] = (
    "set clock",
    "set clock",
    "set clock",
    "kill coordinator",
    "raise again",
    "kill",
)
"""What goes on, or is recalled, when somebody sets the system clock."""
APART: tuple[FaultKind, ...] = (
    "cut for good",
    "cut for good",
    "cut for good",
    "worker",
    "kill",
    "raise",
    "cut",
    "stop",
    "stop for long",
    "term",
    "kill coordinator",
)
"""Two workers cannot reach each other, and what else befalls them meanwhile."""
HOUR = 3600.0
DRAINING: tuple[FaultKind, ...] = (
    "term",
    "term",
    "term",
    "drain",
    "drain",
    "drain",
    "worker",
    "worker",
    "kill",
    "kill twice",
    "raise",
    "stick",
    "cut",
    "cut control",
    "kill coordinator",
    "hand over",
    "stop",
)
"""Workers are to leave, and what befalls them, and others, meanwhile."""
PAUSING: tuple[FaultKind, ...] = (
    *(("pause",) * 12),
    "raise",
    "raise again",
    "kill",
    "lose",
    "cut",
    "stop",
    "stop for long",
    "stop coordinator",
    "kill coordinator",
    "hand over",
    "drain",
    "worker",
)
"""The job is paused, and what befalls it before that, meanwhile, and when it goes on."""
SAVING: tuple[FaultKind, ...] = (*(("savepoint",) * 16), *PAUSING)
"""Savepoints are taken, and what befalls the job meanwhile."""
GUARDED: tuple[FaultKind, ...] = (
    *("raise", "raise", "raise in open", "raise again", "raise on both sides", "stick"),
    *("kill", "kill", "kill", "lose", "kill twice", "worker", "worker"),
    *("cut", "cut", "swallow", "delay", "stop", "stop for long", "isolate"),
    *("kill coordinator", "hand over", "replace coordinator", "stop coordinator", "cut control"),
    *("term", "drain"),
)
"""Which a job that loses nothing is to take."""
PAUSED_SECONDS = (0.01, 2.0)
CANCEL_SHARE = 0.1
"""Of the runs, those with a cancel somewhere."""
FAULT_SECONDS_MAX = 1.5
"""Of the job's life, the time in which faults come."""
SOON_SECONDS = 0.01
"""After which a second fault follows at times."""
STOP_SECONDS = (0.05, 1.0)
LONG_STOP_SECONDS = (2.0, 4.0)
DELAY_SECONDS = (0.05, 2.0)
COORDINATOR_STOP_SECONDS = (0.05, 4.0)
DISK_FULL_SECONDS = (0.05, 2.0)
LOST_WITH_DISK_SHARE = 0.6
RETURN_POINTS = (Register, Registered, Heartbeat)
"""The last that was said before a return fails: the facts, what is desired, or that the worker goes on."""
RETURN_SECONDS = (1e-6, 0.0005, 0.005)
"""How much later it fails: before that arrives, at the same time, or after."""
COORDINATOR_AWAY_SECONDS = (0.001, 3.0)
"""Between the loss of a coordinator and the start of the next one."""


@dataclass(frozen=True)
class Fault:
    """``at``: seconds since the job was submitted."""

    at: float
    kind: FaultKind


def draw_faults(random: Random, kinds: tuple[FaultKind, ...] = KINDS) -> list[Fault]:
    """One to four faults; now and then two that follow each other at once."""
    faults: list[Fault] = []
    for _ in range(random.choice([1, 1, 1, 2, 2, 3, 4])):
        soon = bool(faults) and random.random() < 0.4
        at = faults[-1].at + SOON_SECONDS if soon else FAULT_SECONDS_MAX * random.random() ** 2
        faults.append(Fault(at, random.choice(kinds)))
    if random.random() < CANCEL_SHARE:
        faults.append(Fault(FAULT_SECONDS_MAX * random.random(), "cancel"))
    return sorted(faults, key=lambda fault: fault.at)


def inject(cluster: Cluster, plan: Plan, fault: Fault) -> None:
    """Bring the fault about, unless it is a worker or a cancel; of no effect where nothing is left that it
    could befall."""
    world, random = cluster.world, cluster.world.random
    living = cluster.living
    if fault.kind in ("raise", "raise in open", "stick"):
        operator, index = random.choice(plan.subtasks)
        world.note(f"fault: {operator}[{index}]: {fault.kind}")
        cluster.audit.mischief.append((operator, index, fault.kind))
    elif fault.kind in ("raise again", "raise on both sides"):
        _raise_twice(cluster, plan, fault.kind)
    elif fault.kind == "stop coordinator":
        cluster.coordinator_host.stop()
        world.at(world.now + random.uniform(*COORDINATOR_STOP_SECONDS), cluster.coordinator_host.go_on)
    elif fault.kind == "set clock":
        world.clock_ahead = random.choice([0.0, -HOUR, HOUR, random.uniform(-HOUR, HOUR)])
        world.note(f"fault: the system clock is {world.clock_ahead:.1f} s ahead")
    elif fault.kind == "full disk":
        _fill_disk(cluster)
    elif fault.kind in ("kill coordinator", "replace coordinator", "hand over"):
        _lose_coordinator(cluster, fault.kind)
    elif fault.kind in ("cut", "swallow", "delay"):
        _harm_link(cluster, fault.kind)
    elif fault.kind == "cut for good":
        _cut_for_good(cluster)
    elif living:
        _harm_worker(cluster, random.choice(living), fault.kind)


def _lose_coordinator(cluster: Cluster, kind: FaultKind) -> None:
    """Another starts after a while, unless one is about to start already."""
    world, random, host = cluster.world, cluster.world.random, cluster.coordinator_host
    if cluster.coordinator_due or cluster.place.term < cluster.journal.term:
        return
    cluster.coordinator_due = True
    world.note(f"fault: {kind}")
    back = world.now + random.uniform(*COORDINATOR_AWAY_SECONDS)
    port = cluster.place.address.port
    if kind == "kill coordinator":
        host.kill()
        world.at(back, partial(cluster.start_coordinator, random.choice([port, port + 1])))
    elif kind == "hand over":
        host.run(cluster.hand_over(), "hand over")
        world.at(back, partial(cluster.start_coordinator, port + 1))
        world.at(back, cluster.client.reconnect)
    else:
        host.stop()
        world.at(back, partial(cluster.start_coordinator, port + 1))
        world.at(back, cluster.client.reconnect)
        world.at(back + random.uniform(*COORDINATOR_STOP_SECONDS), host.go_on)


def _fill_disk(cluster: Cluster) -> None:
    """There is room again when the next coordinator starts: else it would not."""
    world, random, journal = cluster.world, cluster.world.random, cluster.journal
    world.note("fault: full disk")
    journal.full = True

    def over() -> None:
        if journal.full and random.random() < LOST_WITH_DISK_SHARE:
            _lose_coordinator(cluster, "kill coordinator")
        else:
            world.note("there is room on the disk again")
            journal.full = False

    world.at(world.now + random.uniform(*DISK_FULL_SECONDS), over)


def _raise_twice(cluster: Cluster, plan: Plan, kind: FaultKind) -> None:
    world, random, mischief = cluster.world, cluster.world.random, cluster.audit.mischief
    if kind == "raise again" or not plan.graph.edges:
        operator, index = random.choice(plan.subtasks)
        mischief += [(operator, index, "raise"), (operator, index, "raise in open")]
    else:
        number = random.randrange(len(plan.graph.edges))
        edge = plan.graph.edges[number]
        consumer = random.randrange(plan.graph.vertices[edge.target].parallelism)
        producer = random.choice(plan.graph.producers_of(number, consumer))
        mischief += [(edge.source, producer, "raise"), (edge.target, consumer, "raise")]
    world.note(f"fault: {kind}: {mischief[-2:]}")


def _harm_worker(cluster: Cluster, worker: SimulatedWorker, kind: FaultKind) -> None:
    world = cluster.world
    world.note(f"fault: {kind} worker {worker.number}")
    if kind in ("kill", "lose", "kill twice"):
        cluster.kills_next += kind == "kill twice"
        worker.host.kill(silent=kind == "lose")
        return
    if kind == "term":
        worker.host.loop.call_soon(worker.worker.leave)
        return
    if kind == "drain":
        limit = world.random.choice([None, 0.5, 3.0])
        cluster.client.ask(DrainWorker(worker=worker.number, seconds=limit))
        return
    if kind == "isolate":
        worker.host.cut_off = True
        for ends in cluster.network.between(worker.host, cluster.coordinator_host):
            for end in ends:
                end.hole = True
        return
    if kind in ("cut control", "cut return", "kill return"):
        if kind != "cut control":
            _break_return(cluster, worker, kind)
        _cut_control(cluster, worker, world.random.choice([0.001, 0.1]))
        return
    least, most = STOP_SECONDS if kind == "stop" else LONG_STOP_SECONDS
    worker.host.stop()
    world.at(world.now + world.random.uniform(least, most), worker.host.go_on)


def _cut_control(cluster: Cluster, worker: SimulatedWorker, within: float) -> None:
    for ends in cluster.network.between(worker.host, cluster.coordinator_host):
        for end in ends:
            cluster.world.within(within, partial(end.ended, "reset"))


def _break_return(cluster: Cluster, worker: SimulatedWorker, kind: FaultKind) -> None:
    """When it comes back next, once it has said the facts, once it has its answer, or a moment later."""
    world, random = cluster.world, cluster.world.random
    if kind == "cut return":
        fails = partial(_cut_control, cluster, worker, 0.0005)
    elif random.random() < 0.5:
        fails = partial(worker.host.kill)
    else:
        fails = partial(_lose_coordinator, cluster, "kill coordinator")
    point = random.choice(RETURN_POINTS)
    seconds = random.choice(RETURN_SECONDS)

    def reached() -> None:
        world.note(f"fault: {kind} of worker {worker.number}: {point.__name__} was sent")
        world.within(seconds, fails)

    cluster.returns[worker.number] = point, reached


def _harm_link(cluster: Cluster, kind: FaultKind) -> None:
    world, random = cluster.world, cluster.world.random
    hosts = {worker.host: worker.number for worker in cluster.living}
    found = [
        ends
        for ends in cluster.network.links
        if ends[0].host in hosts and ends[1].host in hosts and ends[0].protocol and ends[1].protocol
    ]
    if not found:
        return
    ends = random.choice(found)
    numbers = " and ".join(str(hosts[end.host]) for end in ends)
    world.note(f"fault: {kind} the link of workers {numbers}")
    for end in ends:
        if kind == "cut":
            world.within(random.choice([0.001, 0.1]), partial(end.ended, "reset"))
        elif kind == "swallow":
            end.hole = True
            if getattr(end.protocol, "one_way", None) is not None:  # no Ping finds out, but the kernel does
                world.within(random.choice([1.0, 10.0]), partial(end.ended, "reset"))
        else:
            end.held_until = world.now + random.uniform(*DELAY_SECONDS)


def _cut_for_good(cluster: Cluster) -> None:
    """Preferably two that have a link."""
    world, random = cluster.world, cluster.world.random
    pairs = list(combinations(cluster.living, 2))
    linked = [pair for pair in pairs if cluster.network.between(pair[0].host, pair[1].host)]
    if pairs:
        one, other = random.choice(linked or pairs)
        world.note(f"fault: workers {one.number} and {other.number} cannot reach each other")
        cluster.network.cut_off(one.host, other.host, told=random.random() < 0.5)

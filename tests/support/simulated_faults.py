"""Faults of a simulated run: which, when, and how each is brought about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal, TypeAlias

from support.simulated_jobs import Plan
from support.simulation import Cluster, SimulatedWorker

__all__ = ["Fault", "FaultKind", "draw_faults", "inject"]

FaultKind: TypeAlias = Literal[
    "raise",
    "raise in open",
    "stick",
    "kill",
    "lose",
    "isolate",
    "cut",
    "swallow",
    "delay",
    "stop",
    "stop for long",
    "worker",
    "cancel",
]
"""A task raises, or does not react; a worker is killed, its machine is gone, or it is cut off from the
coordinator alone; a link between two workers breaks, loses all that is sent from now on, or is slow for a
while; a worker is stopped for less or more than its heartbeats may be late; a further worker comes; the user
cancels the job."""
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
    "swallow",
    "delay",
    "stop",
    "stop for long",
    "worker",
)
CANCEL_SHARE = 0.1
"""Of the runs, those with a cancel somewhere."""
FAULT_SECONDS_MAX = 1.5
"""Of the job's life, the time in which faults come."""
SOON_SECONDS = 0.01
"""After which a second fault follows at times."""
STOP_SECONDS = (0.05, 1.0)
LONG_STOP_SECONDS = (2.0, 4.0)
DELAY_SECONDS = (0.05, 2.0)


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
    elif fault.kind in ("cut", "swallow", "delay"):
        _harm_link(cluster, fault.kind)
    elif living:
        _harm_worker(cluster, random.choice(living), fault.kind)


def _harm_worker(cluster: Cluster, worker: SimulatedWorker, kind: FaultKind) -> None:
    world = cluster.world
    world.note(f"fault: {kind} worker {worker.number}")
    if kind in ("kill", "lose"):
        worker.host.kill(silent=kind == "lose")
        return
    if kind == "isolate":
        worker.host.cut_off = True
        for ends in cluster.network.between(worker.host, cluster.coordinator_host):
            for end in ends:
                end.hole = True
        return
    least, most = STOP_SECONDS if kind == "stop" else LONG_STOP_SECONDS
    worker.host.stop()
    world.at(world.now + world.random.uniform(least, most), worker.host.go_on)


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
        else:
            end.held_until = world.now + random.uniform(*DELAY_SECONDS)

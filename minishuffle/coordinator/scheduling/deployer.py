"""Sends tasks to workers: all when a job starts, then the next attempts of restarting tasks, and
cancellations. Pure.

:mod:`~minishuffle.coordinator.scheduling.placement` decides the places of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.journal.writeahead import WriteAhead
from minishuffle.coordinator.scheduling.holding import holder_messages, holder_releases, name_holders
from minishuffle.coordinator.scheduling.isolation import Isolation
from minishuffle.coordinator.scheduling.placement import (
    cancellations,
    consumer_ends,
    current_attempts,
    deployments,
    move_slots,
    redeployments,
    releases,
    take_slots,
    takers,
)
from minishuffle.coordinator.scheduling.standby import Preparations
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import WorkerRegistry
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    DivideTasks,
    RecoveryStep,
    RecoverySteps,
    ReleaseJob,
)

__all__ = ["Deployer"]


@dataclass(frozen=True, slots=True)
class Deployer:
    """The deployment of jobs.

    Args:
        slot_timeout: seconds for which a lost slot waits for a worker.
        send: sends a message to a worker, if it is alive.
        write_ahead: holds messages back while the journal cannot be written.
        drain_timeout: seconds for which moving tasks may process the rows already sent to them.
    """

    term: int
    slot_timeout: float
    workers: WorkerRegistry
    preparations: Preparations
    send: Callable[[int, ControlMessage], bool]
    write_ahead: WriteAhead
    isolation: Isolation
    drain_timeout: float = 0.0

    def deploy(self, job: Job, held: Holdings, at: float) -> None:
        """Deploy all tasks of a starting job, except waiting ones, and prepare standby workers to take over
        from it; ``held``: see :meth:`restart`."""
        there, workers = job.slots.held(), self.workers.alive()
        addresses = [worker.address for worker in workers if worker.worker in there]
        graph, term, placement = job.graph, self.term, job.slots.placement
        tasks = [task for task in job.subtasks.values() if task.state != WAITING]
        name_holders(job, tasks, workers, held.holders, at)
        for task in tasks:
            task.begin_from(job.holders.for_first(task.key, task.resumption))
        messages = deployments(
            graph,
            placement,
            addresses,
            term=term,
            job=job.id,
            name=job.name,
            tasks=[task.key for task in tasks],
            resumptions={task.key: task.resumption for task in tasks if task.resumption != Resumption()},
        )
        for number, message in messages.items():
            self.send(number, message)
        self._send_holders(job)
        for number, ahead in self.preparations.job_started(job, workers):
            self.send(number, ahead)

    def restart(self, job: Job, held: Holdings, at: float, called: set[int]) -> list[Subtask]:
        """Deploy the next attempts of due tasks, and the first attempts of due waiting ones, as far as they
        have slots. Returns the deployed tasks.

        Args:
            held: slots and segments of all jobs that have not ended.
            called: standby workers already called up for the same loss; newly called ones are added.
        """
        self._send_late_ends(job, at)
        self._send_barriers(job)
        for saving in (job.savepoint, job.cut):
            for number, ask in saving.take_unsent(self.term, job.id):
                self.send(number, ask)
        for number, message in [*releases(job, term=self.term), *cancellations(job, term=self.term)]:
            self.send(number, message)
        ready = self._restarted(job, held, at, called)
        ready += self._first(job, held, at) + self._first_readers(job, held, at, called)
        name_holders(job, ready, self.workers.alive(), held.holders, at)
        if ready:
            addresses = {worker.worker: worker.address for worker in self.workers.alive()}
            for number, message in redeployments(job, ready, addresses, term=self.term, at=at):
                self.send(number, self.preparations.shortened(number, message))
        self._send_holders(job)
        return ready

    def _send_holders(self, job: Job) -> None:
        """Deploy newly named holders, and release replaced ones."""
        addresses = {worker.worker: worker.address for worker in self.workers.alive()}
        for number, message in holder_messages(job, addresses, term=self.term):
            self.send(number, message)
        for number, release in holder_releases(job, term=self.term):
            self.send(number, release)

    def _restarted(self, job: Job, held: Holdings, at: float, called: set[int]) -> list[Subtask]:
        """Due restarting tasks that have slots now; the others wait for a slot."""
        due = job.due(at)
        if not due:
            return []
        lost = job.vacant_slots(due)
        waits, is_awaited = self._move(job, lost, held, at, called), bool(self.workers.awaited())
        for task in due:
            if (slot := job.slot_of(task.key)) in job.slots.vacant:
                may_come = is_awaited or self.isolation.blocks(job, slot)
                job.wait_for_slot(task, at + waits[slot], at, may_come=may_come)
        if job.stopping or job.terminal:
            return []
        return [task for task in due if job.slot_of(task.key) not in job.slots.vacant]

    def _first(self, job: Job, held: Holdings, at: float) -> list[Subtask]:
        """Tasks of due stages that have all their slots now. Standby workers are not used for stages, and a
        stage waits while one of its slots moves. Lost slots that are kept for a waiting stage are taken
        again."""
        found: list[Subtask] = []
        if lost := job.kept_slots_lost():
            self._give_slots(job, lost, held)
        is_held_back = False
        for due in job.stages_due():
            wanted = sorted(due.slots & job.slots.vacant)
            if due.slots & job.slots.moving.keys():
                continue
            if wanted and not is_held_back:
                why = self._give_slots(job, wanted, held)
                if why and not due.early:
                    job.stage_short(due.stage, why, at)
                    is_held_back = True
            if not due.slots & job.slots.vacant:
                job.stage_starts(due.stage, at)
                found += job.tasks_of(due.stage)
        return found

    def _first_readers(self, job: Job, held: Holdings, at: float, called: set[int]) -> list[Subtask]:
        """Waiting tasks with a ready input whose slots have workers; lost slots are moved to other workers
        first."""
        due = job.first_due()
        slots = {task.key: job.slot_of(task.key) for task in due}
        if lost := sorted(job.slots.vacant.intersection(slots.values())):
            self._move(job, lost, held, at, called)
        gone = job.slots.vacant | job.slots.moving.keys()
        return [task for task in due if slots[task.key] not in gone]

    def _give_slots(self, job: Job, slots: list[int], held: Holdings) -> str:
        """Give all of these vacant slots to workers, or none. Returns why not, else an empty text."""
        closed = self.isolation.closed(job, slots[0], list(self.workers), held)
        why = take_slots(job, slots, self.workers.alive(), held, {**closed, **job.links.closed()})
        held.note(job)
        return why

    def _move(
        self, job: Job, lost: list[int], held: Holdings, at: float, called: set[int]
    ) -> dict[int, float]:
        """Give lost slots to workers, as far as possible. Returns the seconds that each slot may wait."""
        waits: dict[int, float] = {}
        workers = self.workers.alive()
        for slots in [[slot] for slot in lost] if self.isolation.suspects(job) else [lost]:
            free = {each.worker: each.slots - held.slots[each.worker] for each in workers}
            closed = self.isolation.closed(job, slots[0], list(self.workers), held) if slots else {}
            shut = {**closed, **job.links.closed()}
            # A stage without running tasks waits as a whole: else two jobs could wait for each other's
            # halves.
            whole = bool(job.stages.order) and not job.subtasks.open_workers()
            move_slots(job, slots, workers, held, called, closed=shut, all_or_none=whole)
            held.note(job)
            for slot in slots:
                waits[slot] = self.isolation.tried(job, slot, closed, free)
                if slot not in job.slots.vacant and closed and self.isolation.suspects(job, slot):
                    worker = job.slots.placement[slot]
                    text = f"worker {worker} takes no slots of other jobs while slot {slot} is suspected"
                    job.history.note(at, "worker isolated", text, worker=worker)
        return waits

    def move(self, job: Job, leaving: Collection[int], held: Holdings, at: float, called: set[int]) -> bool:
        """Move the slots of draining workers, as far as others have free ones; False if none moves now. The
        arguments are those of :meth:`restart`."""
        made_again = self._make_again(job, leaving, held, at)
        if job.can_move and job.deploys_ahead(leaving):
            return True
        there = job.movable(job.slots.on(leaving))
        free = any(each.slots > held.slots[each.worker] for each in takers(self.workers.alive()))
        if not there or not free or not job.can_move or job.pause.phase == "aligning" or job.moves:
            return made_again
        one_by_one = self.isolation.suspects(job) and not job.moves_as_a_whole
        for slots in [[slot] for slot in there] if one_by_one else [there]:
            closed = {**self.isolation.closed(job, slots[0], list(self.workers), held), **job.links.closed()}
            whole = job.moves_as_a_whole
            move_slots(job, slots, self.workers.alive(), held, called, closed=closed, all_or_none=whole)
            held.note(job)
        moving = [slot for slot in there if slot in job.slots.moving]
        job.slots_move(moving, at, self.drain_timeout)
        return bool(moving) or made_again

    def _make_again(self, job: Job, leaving: Collection[int], held: Holdings, at: float) -> bool:
        """Run stages again elsewhere whose stored partitions are on draining workers, once there are slots.
        False if there is nothing to run again, or there are no slots."""
        can_run = job.stages.order and job.can_move and job.pause.phase != "aligning"
        stored = job.stored_on(leaving) if can_run else []
        if not stored:
            return False
        stages = {job.stages.stage_of(task.operator) for task in stored}
        wanted = sorted(job.stages.slots(stages) & job.slots.vacant)
        if wanted and self._give_slots(job, wanted, held):
            return False
        job.make_again(stored, at)
        return True

    def _send_late_ends(self, job: Job, at: float) -> None:
        """Tell producers about late ends (``Ends.take_late_ends``), except over kept edges: these consumers
        will not attach to the producers' current attempts. In a recovery, the ended channels count as
        attached."""
        found = job.ends.take_late_ends()
        waiting = [each for each in found if not job.ends.is_kept(each[1])]
        for number, message in consumer_ends(job.id, waiting, term=self.term):
            self.send(number, message)
        if found:
            steps = [_as_attached(task, len(consumers)) for task, _, consumers in found]
            job.recovered(RecoverySteps(term=self.term, job=job.id, steps=steps), at)

    def _send_barriers(self, job: Job) -> None:
        """Send the workers a new barrier of a pause or a move, or its end."""
        message = job.pause.message(self.term, job.id) if job.pause.take_unsent() else None
        if message is not None:
            for number in sorted({task.worker for task in job.subtasks.values() if task.on_worker}):
                self.send(number, message)
        if job.move.take_unsent():
            moving = current_attempts(filter(job.cancellations.is_to_end, job.subtasks.values()))
            divide = DivideTasks(term=self.term, job=job.id, barrier=job.move.barrier, moving=moving)
            for number in sorted({task.worker for task in job.subtasks.values() if task.on_worker}):
                self.send(number, divide)

    def release(self, job: Job, workers: Iterable[int], at: float) -> None:
        """Release an ended job on these workers. Late ends are sent first, so that rows that no consumer
        needs do not count as lost."""
        self._send_late_ends(job, at)
        for number in sorted(workers):
            self.send(number, ReleaseJob(term=self.term, job=job.id))

    def stop(self, job: Job, at: float) -> None:
        """End a failing or cancelled job. Attempts whose deployment is still held back end at once, since no
        worker would report their end."""
        for number, message in self.write_ahead.give_up(job.id):
            job.undeployed(number, message, None, at)
        if job.take_stop():
            for number in job.subtasks.open_workers():
                self.send(number, CancelTasks(term=self.term, job=job.id))


def _as_attached(task: Subtask, channels: int) -> RecoveryStep:
    return RecoveryStep(
        operator=task.operator, index=task.index, attempt=task.attempt, step="outputs", channels=channels
    )

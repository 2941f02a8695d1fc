"""Who sends the tasks of jobs to workers: all when a job starts, then the next attempts of what restarts, and
whoever has to end with the job.

Pure. Where tasks go is decided by :mod:`~minishuffle.coordinator.scheduling.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.journal.writeahead import WriteAhead
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
    """
    Args:
        slot_timeout: seconds for which a lost slot waits for a worker.
        send: a message to a worker, if it is alive.
        write_ahead: what was sent may be held back there.
        drain_timeout: seconds for which what moves may take what was emitted for it.
    """

    term: int
    slot_timeout: float
    workers: WorkerRegistry
    preparations: Preparations
    send: Callable[[int, ControlMessage], bool]
    write_ahead: WriteAhead
    isolation: Isolation
    drain_timeout: float = 0.0

    def deploy(self, job: Job) -> None:
        """Every task of a job that starts, unless they wait for their time, and to standby workers what they
        need to take over from it."""
        held = job.slots.held()
        workers = self.workers.alive()
        addresses = [worker.address for worker in workers if worker.worker in held]
        graph, term, placement = job.graph, self.term, job.slots.placement
        tasks = [task.key for task in job.subtasks.values() if task.state != WAITING]
        messages = deployments(graph, placement, addresses, term=term, job=job.id, name=job.name, tasks=tasks)
        for number, message in messages.items():
            self.send(number, message)
        for number, ahead in self.preparations.job_started(job, workers):
            self.send(number, ahead)

    def restart(self, job: Job, held: Holdings, at: float, called: set[int]) -> list[Subtask]:
        """The next attempts of tasks whose time has come, and the first ones of those that waited, as far as
        there are slots for them; gives these.

        Args:
            held: by all jobs that have not ended.
            called: standby workers that have been called upon for the same loss; more may be added.
        """
        self._send_late_ends(job, at)
        self._send_barriers(job)
        for number, message in [*releases(job, term=self.term), *cancellations(job, term=self.term)]:
            self.send(number, message)
        ready = self._restarted(job, held, at, called)
        ready += self._first(job, held, at) + self._first_readers(job, held, at, called)
        if ready:
            addresses = {worker.worker: worker.address for worker in self.workers.alive()}
            for number, message in redeployments(job, ready, addresses, term=self.term, at=at):
                self.send(number, self.preparations.shortened(number, message))
        return ready

    def _restarted(self, job: Job, held: Holdings, at: float, called: set[int]) -> list[Subtask]:
        """Tasks whose next attempt is to be deployed now, in slots that they have got."""
        due = job.due(at)
        if not due:
            return []
        lost = sorted({slot for task in due if (slot := job.slot_of(task.key)) in job.slots.vacant})
        waits, is_awaited = self._move(job, lost, held, at, called), bool(self.workers.awaited())
        for task in due:
            if (slot := job.slot_of(task.key)) in job.slots.vacant:
                may_come = is_awaited or self.isolation.blocks(job, slot)
                job.wait_for_slot(task, at + waits[slot], at, may_come=may_come)
        if job.stopping or job.terminal:
            return []
        return [task for task in due if job.slot_of(task.key) not in job.slots.vacant]

    def _first(self, job: Job, held: Holdings, at: float) -> list[Subtask]:
        """Tasks of stages whose time has come, in slots that they have got: all of a stage, or none. Standby
        workers are not for them, and slots that move are there later. Slots that are kept for others and were
        lost are taken again."""
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
        """Tasks that have something to read now, as far as their slots are there: of those that were lost,
        others take the place if there are some."""
        due = job.first_due()
        slots = {task.key: job.slot_of(task.key) for task in due}
        if lost := sorted(job.slots.vacant.intersection(slots.values())):
            self._move(job, lost, held, at, called)
        gone = job.slots.vacant | job.slots.moving.keys()
        return [task for task in due if slots[task.key] not in gone]

    def _give_slots(self, job: Job, slots: list[int], held: Holdings) -> str:
        """Have workers take all of these vacant slots, or none; gives why they do not."""
        closed = self.isolation.closed(job, slots[0], list(self.workers), held)
        why = take_slots(job, slots, self.workers.alive(), held, {**closed, **job.links.closed()})
        held.note(job)
        return why

    def _move(
        self, job: Job, lost: list[int], held: Holdings, at: float, called: set[int]
    ) -> dict[int, float]:
        """Give lost slots to workers, as far as there are some for them; gives how long each that is left
        waits."""
        waits: dict[int, float] = {}
        workers = self.workers.alive()
        for slots in [[slot] for slot in lost] if self.isolation.suspects(job) else [lost]:
            free = {each.worker: each.slots - held.slots[each.worker] for each in workers}
            closed = self.isolation.closed(job, slots[0], list(self.workers), held) if slots else {}
            shut = {**closed, **job.links.closed()}
            # A stage of which nothing runs waits whole here too: two jobs would wait for each other's halves.
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
        """Have the slots of workers that are to leave move, as far as others have free ones; False if none
        moves now. The arguments are those of :meth:`restart`."""
        made_again = self._make_again(job, leaving, held, at)
        if job.can_move and job.deploys_ahead(leaving):
            return True
        there = job.movable(job.slots.on(leaving))
        free = any(each.slots > held.slots[each.worker] for each in takers(self.workers.alive()))
        if not there or not free or not job.can_move or job.pause.phase == "aligning" or job.move.is_aligning:
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
        """Have what stages have stored on workers that are to leave made anew elsewhere, as soon as there are
        slots for that; False if there is nothing of it, or are none."""
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
        """Consumers have read all, as attempts are to know that were deployed before that was heard of, but
        for what they keep. They will not attach to these: to have ended is as good."""
        found = job.ends.take_late_ends()
        waiting = [each for each in found if not job.ends.is_kept(each[1])]
        for number, message in consumer_ends(job.id, waiting, term=self.term):
            self.send(number, message)
        if found:
            steps = [_as_attached(task, len(consumers)) for task, _, consumers in found]
            job.recovered(RecoverySteps(term=self.term, job=job.id, steps=steps), at)

    def _send_barriers(self, job: Job) -> None:
        """All that runs is to stop behind a barrier, or to go on."""
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
        """A job that has ended, on these workers. What nobody wanted of it is known not to be lost first."""
        self._send_late_ends(job, at)
        for number in sorted(workers):
            self.send(number, ReleaseJob(term=self.term, job=job.id))

    def stop(self, job: Job, at: float) -> None:
        """Have a job end that fails or was cancelled. Attempts whose deployment is held back do so at once:
        nobody else would say that they have ended."""
        for number, message in self.write_ahead.give_up(job.id):
            job.undeployed(number, message, None, at)
        if job.take_stop():
            for number in job.subtasks.open_workers():
                self.send(number, CancelTasks(term=self.term, job=job.id))


def _as_attached(task: Subtask, channels: int) -> RecoveryStep:
    return RecoveryStep(
        operator=task.operator, index=task.index, attempt=task.attempt, step="outputs", channels=channels
    )

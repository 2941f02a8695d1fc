"""How clients look into a worker: the answers to their questions, and the looks at its tasks' buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection

from minishuffle.transport.tcp import DataLink
from minishuffle.wire.inquiries import WorkerAnswered, WorkerAsked
from minishuffle.worker.introspection.dumps import DumpedWorker, worker_dump
from minishuffle.worker.introspection.edgetaps import EdgeTaps
from minishuffle.worker.introspection.profiling import TaskProfiles
from minishuffle.worker.introspection.tracing import ChannelTraces
from minishuffle.worker.reports.attemptreports import AttemptReports
from minishuffle.worker.reports.outbox import OutboxSender
from minishuffle.worker.state import WorkerState
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.handoff import LoopInbox

__all__ = ["Inspection"]


class Inspection:
    """The inspection of one worker. (Loop.)

    Args:
        its parts, and connected: whether there is a coordinator.
        clock: the loop's, in seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        state: WorkerState,
        deployment: Deployment,
        links: Collection[DataLink],
        inbox: LoopInbox,
        *,
        outgoing: OutboxSender,
        reports: AttemptReports,
        connected: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._state = state
        self._deployment = deployment
        self._traces = ChannelTraces(state, deployment, clock, wall)
        self._taps = EdgeTaps(deployment, clock, wall)
        self.profiles = TaskProfiles(deployment, clock)
        self._dumped = DumpedWorker(
            state,
            deployment,
            links,
            inbox,
            outgoing=outgoing,
            reports=reports,
            connected=connected,
            clock=clock,
        )

    def answer(self, question: WorkerAsked) -> WorkerAnswered:
        """The answer to a client's question."""
        if question.trace is not None:
            answer = self._traces.answer(question.job, question.trace)
        elif question.tap is not None:
            answer = self._taps.answer(question.job, question.tap)
        elif question.profile is not None:
            answer = self.profiles.answer(question.job, question.profile)
        else:
            answer = worker_dump(self._dumped, question.job)
        return WorkerAnswered(term=self._state.term, ticket=question.ticket, answer=answer)

    def look(self) -> None:
        """Now and then: see how full buffers are, and whether anybody still asks for traces, taps and
        profiles."""
        self._deployment.look()
        self._traces.expire()
        self._taps.expire()
        self.profiles.expire()

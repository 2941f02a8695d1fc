"""How a job and its tasks may change: two tables of moves.

A job::

    created --all run--> running --all finished--> finished, or finished_with_loss
       |                    |
       +--a task failed for good, too many rows-----------> failing  --all ended-> failed
       +--the user asks-----------------------------------> canceling --all ended-> canceled

A task. Its attempt may end in five ways. If it did not finish, and the job goes on, the next attempt takes
its place: in the same slot after the delay of :mod:`~minishuffle.coordinator.failover`, or in another slot if
its worker is lost, which it may have to wait for::

    created --> running --> finished | failed | canceled | abandoned | lost
       ^                       |          |         |           |        |
       |                       +--lost---(its worker, while consumers need what it wrote)
       |                       +----------+---------+-----------+--------+
       |                                            v
       +--deployed------------- restarting <--------+
       +--deployed-- waiting for a slot <---+

With the strategies ``region`` and ``full`` others are cancelled then and restart with it, once all of them
have ended. Of those that have finished, the ones restart that a consumer which restarts reads from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["ENDED", "JOB_MOVES", "JOB_OVER", "PENDING", "TASK_MOVES"]

ENDED: Final = frozenset({"finished", "failed", "canceled", "abandoned", "lost"})
PENDING: Final = frozenset({"restarting", "waiting for a slot"})
"""States of a task whose next attempt is not deployed yet."""
TASK_MOVES: Final[Mapping[str, frozenset[str]]] = {
    "created": ENDED | {"running"},
    "running": ENDED,
    "finished": frozenset({"lost", "restarting"}),
    "failed": frozenset({"restarting"}),
    "canceled": frozenset({"restarting"}),
    "abandoned": frozenset({"restarting"}),
    "lost": frozenset({"restarting"}),
    "restarting": frozenset({"waiting for a slot", "created", "canceled"}),
    "waiting for a slot": frozenset({"created", "canceled"}),
}
"""What is not here cannot happen to a task."""
JOB_MOVES: Final[Mapping[str, frozenset[str]]] = {
    "created": frozenset({"running", "failing", "canceling"}),
    "running": frozenset({"finished", "finished_with_loss", "failing", "canceling"}),
    "failing": frozenset({"failed"}),
    "canceling": frozenset({"canceled"}),
}
JOB_OVER: Final = frozenset({"finished", "finished_with_loss", "failed", "canceled"})

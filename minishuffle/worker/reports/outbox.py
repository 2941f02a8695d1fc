"""Rows for the client and lines of the log, on their way from the tasks to the coordinator.

A task waits, as for a segment, while too much of what it said is unsent. The loop sends one message of each
task in turn, and only while the control link takes it: heartbeats and the ends of tasks never stand behind
more than one of them.

Small record batches of a table go out together, since each alone would carry its schema: the first at once,
batches of the next ``REST_SECONDS`` follow together. They are put together here and not in the sink, whose
thread may be in user code for any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from minishuffle import limits
from minishuffle.errors import clipped
from minishuffle.exchange.collected import pack_gathered
from minishuffle.ids import AttemptId
from minishuffle.wire.messages import LogLines
from minishuffle.wire.reports import Collected
from minishuffle.worker.tasks.handoff import TaskPaths

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["REST_SECONDS", "Outbox", "OutboxSender"]

LINE_BYTES: Final = 64
"""Overhead of a line in bytes, besides its characters."""
REST_SECONDS: Final = 0.05
"""Shortest time between two messages with small record batches of a task; batches wait for it together."""


@dataclass(slots=True)
class _Rows:
    """Collected rows: packed, or columns that are yet to be."""

    payload: bytes | pa.RecordBatch
    rows: int
    size: int


class Outbox:
    """Lines and rows of one attempt that the loop has not sent yet.

    Args:
        notify: called on the loop when there is something to send.
        away: whether there is no coordinator to send it to; the bell rings when that begins.
        known: as many rows of the subtask the client has, the same that this attempt begins with.
    """

    __slots__ = (
        "_attempt_id",
        "_away",
        "_hurried",
        "_items",
        "_known",
        "_lines_dropped",
        "_notified",
        "_notify",
        "_paths",
        "_put",
        "_rests",
        "_rows_acknowledged",
        "_rows_put",
        "_rows_taken",
        "_taken",
        "_took_columns",
    )

    def __init__(
        self,
        attempt_id: AttemptId,
        paths: TaskPaths,
        notify: Callable[[Outbox], None],
        away: Callable[[], bool] = lambda: False,
        *,
        known: int = 0,
    ) -> None:
        self._notified = False
        """Set with each notice, cleared by the loop before it looks."""
        self._rests = False
        """(Loop.) New batches wait for more, unless they are :attr:`due`."""
        self._took_columns = False
        """Whether the loop took record batches last that were put together."""
        self._attempt_id = attempt_id
        self._paths = paths
        self._notify = notify
        self._items: deque[str | _Rows] = deque()
        """Lines and rows."""
        self._away = away
        self._lines_dropped = 0
        """Since the last line that was kept; the task's."""
        self._put = self._taken = 0
        """Bytes; the first is the task's, the second the loop's. So are the next."""
        self._rows_put = self._rows_taken = self._rows_acknowledged = 0
        """Rows are counted from the beginning of the subtask, where the attempt has a snapshot."""
        self._known = known
        self._hurried = 0
        """Bytes up to which nothing waits for more; the task's."""

    # --- task ------------------------------------------------------------------------------------

    def log(self, line: str) -> None:
        """Wait for room, or drop the line while there is no coordinator to make any."""
        line = clipped(line, limits.LOG_LINE_CHARS_MAX)
        size = len(line) + LINE_BYTES

        def ready() -> bool:
            return self._has_room(size) or self._away()

        if not ready():
            self._paths.wait_until(ready)
        if not self._has_room(size):
            self._lines_dropped += 1
            return
        self._tell_dropped()
        self._append(line, size)

    def collect(self, payload: bytes, rows: int) -> None:
        """Add ``rows`` packed rows; waits for room."""
        self._put_rows(_Rows(payload, rows, len(payload)))

    def gather(self, columns: pa.RecordBatch, size: int) -> None:
        """Wait for room for a small record batch, which goes out with others; see ``gatherable``."""
        self._put_rows(_Rows(columns, len(columns), size))

    def begin_at(self, rows: int) -> None:
        """(Before the first row.) The subtask has collected so many before."""
        self._rows_put = self._rows_taken = self._rows_acknowledged = rows

    @property
    def rows_collected(self) -> int:
        """How many rows the subtask has collected."""
        return self._rows_put

    def leave_out(self, rows: int) -> int:
        """How many of the next rows, ``rows`` of them, the client has, from an earlier attempt: they are
        counted, and not to be collected again."""
        left_out = max(0, min(rows, self._known - self._rows_put))
        if left_out:  # There is nothing on its way that the loop counts.
            self.begin_at(self._rows_put + left_out)
        return left_out

    def settle(self) -> None:
        """Wait until the coordinator has all of it."""
        self.drain()
        if self._rows_acknowledged < self._rows_put:
            self._paths.wait_until(lambda: self._rows_acknowledged >= self._rows_put)

    def hurry(self) -> None:
        """Nothing that is there waits for more."""
        self._hurried = self._put
        self._give_notice()

    def drain(self) -> None:
        """Wait until all of it is sent."""
        self._tell_dropped()
        if self._put > self._taken:
            self.hurry()
            self._paths.wait_until(lambda: self._put == self._taken)

    def _put_rows(self, rows: _Rows) -> None:
        if not self._has_room(rows.size):
            self.hurry()
            self._paths.wait_until(lambda: self._has_room(rows.size))
        self._rows_put += rows.rows
        self._append(rows, rows.size)

    def _has_room(self, size: int) -> bool:
        unsent = self._put - self._taken
        return not unsent or unsent + size <= limits.TASK_UNSENT_BYTES_MAX

    def _tell_dropped(self) -> None:
        """Write a line with the number of dropped lines."""
        if self._lines_dropped:
            line = f"{self._lines_dropped} lines were dropped here while there was no coordinator"
            self._lines_dropped = 0
            self._append(line, len(line) + LINE_BYTES)

    def _append(self, item: str | _Rows, size: int) -> None:
        self._put += size
        self._items.append(item)
        self._give_notice()

    def _give_notice(self) -> None:
        if self.claim_notice():
            self._paths.post(self._notify, self)

    # --- loop ------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._items)

    def claim_notice(self) -> bool:
        """(Any thread.) Whether the loop is to look and has no notice yet: the caller gives it."""
        if self._notified or not self.due:
            return False
        self._notified = True
        return True

    def take_notice(self) -> None:
        """The loop has had its notice, and is about to look."""
        self._notified = False

    def rest(self) -> bool:
        """After record batches were taken, what comes waits for more; gives whether that begins now."""
        if self._rests or not self._took_columns:
            return False
        self._rests = True
        return True

    def end_rest(self) -> None:
        """New batches no longer wait for others."""
        self._rests = False

    @property
    def due(self) -> bool:
        """(Any thread.) Whether there is something that does not wait for more."""
        if not self._items:
            return False
        return not self._rests or self._taken < self._hurried or self.unsent_bytes >= limits.GATHERED_BYTES

    @property
    def unsent_bytes(self) -> int:
        """Bytes of what was not taken yet."""
        return self._put - self._taken

    @property
    def unsent_rows(self) -> int:
        """Rows among it."""
        return self._rows_put - self._rows_taken

    def take(self, term: int) -> Collected | LogLines | None:
        """The next message, or None; the task may go on."""
        self._took_columns = False
        if not self._items:
            return None
        if isinstance(self._items[0], str):
            lines, size = self._take_lines()
            message: Collected | LogLines = LogLines(term=term, job=self._attempt_id.subtask.job, lines=lines)
        else:
            found = self._take_rows()
            size = found.size
            message = Collected(
                attempt=self._attempt_id,
                payload=found.payload,
                rows=found.rows,
                first_row=self._rows_taken,
            )
            self._rows_taken += found.rows
        self._taken += size
        self._paths.bell.ring()
        return message

    def acknowledge(self, rows: int) -> None:
        """The coordinator has the next rows."""
        self._rows_acknowledged += rows
        self._paths.bell.ring()

    def _take_rows(self) -> _Rows:
        """The first, packed; small record batches together."""
        found, size = list[_Rows](), 0
        while self._items and size < limits.GATHERED_BYTES:
            item = self._items[0]
            if isinstance(item, str) or found and not _go_together(found[0].payload, item.payload):
                break
            self._items.popleft()
            found.append(item)
            size += item.size
            if isinstance(item.payload, bytes):
                return item
        payload, count = pack_gathered([each.payload for each in found])
        self._items.extendleft(reversed(found[count:]))
        self._took_columns = True
        return _Rows(
            payload, sum(each.rows for each in found[:count]), sum(each.size for each in found[:count])
        )

    def _take_lines(self) -> tuple[list[str], int]:
        lines: list[str] = []
        size = 0
        while self._items and size < limits.LOG_MESSAGE_BYTES:
            line = self._items[0]
            if not isinstance(line, str):
                break
            self._items.popleft()
            lines.append(line)
            size += len(line) + LINE_BYTES
        return lines, size


def _go_together(first: bytes | pa.RecordBatch, other: bytes | pa.RecordBatch) -> bool:
    """Whether both are columns, and of one schema."""
    return not isinstance(first, bytes) and not isinstance(other, bytes) and first.schema.equals(other.schema)


class OutboxSender:
    """The loop's half of the outboxes, for all tasks of a worker.

    Args:
        term: returns the coordinator's term, which may rise.
        send: sends rows or lines to the coordinator.
        writable: whether the control link takes more; :meth:`pump` must be called when it does again.
        soon: makes a call in the next turn of the loop.
        later: makes a call after the given seconds.
    """

    def __init__(
        self,
        term: Callable[[], int],
        send: Callable[[Collected | LogLines], None],
        writable: Callable[[], bool],
        soon: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._term = term
        self._send = send
        self._writable = writable
        self._soon = soon
        self._later = later
        self._ready: deque[Outbox] = deque()
        self._scheduled = False

    def notify(self, outbox: Outbox) -> None:
        """There is something in it."""
        self._ready.append(outbox)
        self.pump()

    def __len__(self) -> int:
        """Tasks whose rows or lines wait for the control link."""
        return len(self._ready)

    def pump(self) -> None:
        """Send one message of each task, while the link takes them; the rest in later turns of the loop."""
        for _ in range(len(self._ready)):
            if not self._writable():
                return
            outbox = self._ready.popleft()
            outbox.take_notice()
            message = outbox.take(self._term())
            if message is not None:
                self._send(message)
            if outbox.rest():
                self._later(REST_SECONDS, partial(self._end_rest, outbox))
            self._look_again(outbox)
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._soon(self._pump_again)

    def _look_again(self, outbox: Outbox) -> None:
        if outbox.claim_notice():
            self._ready.append(outbox)

    def _end_rest(self, outbox: Outbox) -> None:
        outbox.end_rest()  # before the look
        self._look_again(outbox)
        self.pump()

    def _pump_again(self) -> None:
        self._scheduled = False
        self.pump()

    def end(self, outbox: Outbox, *, rows: bool) -> None:
        """The attempt has ended: its last lines go out in front of its report.

        Args:
            rows: what it has collected goes out too, at most TASK_UNSENT_BYTES_MAX: the attempt did not
                finish, and the next attempt continues after these rows. A finished attempt has already sent
                all its rows.
        """
        while (message := outbox.take(self._term())) is not None:
            if rows or isinstance(message, LogLines):
                self._send(message)

"""When a source's task rests before it reads on, so that rows which come one by one go on together.

To pass a batch on takes the processors about as long for one row as for ten: in this task, on the wire, in
the tasks behind. Where processors are short, rows wait for one anyway. A task that rests for a few times as
long finds many rows at its next read. What it has read is passed on before it rests.
"""

from __future__ import annotations

from typing import Final

__all__ = ["REST_SECONDS_MAX", "SourceRest"]

REST_SECONDS_MAX: Final = 0.012
REST_SECONDS_MIN: Final = 0.003
"""A shorter one is not worth it: a thread that sleeps may get its processor back so much later."""
SHORT_SHARE: Final = 0.2
SHORT_LOOKS: Final = 4
"""Processors are short where the thread has waited for one for so much of its time at so many looks in a row:
one that comes late once is no reason to rest."""
RESTS_PER_DELAY: Final = 32
"""How much longer a rest may be than the thread waits for a processor each time that it reads."""
CONSUMER_ROWS: Final = 4
"""A rest is no longer than it takes until each consumer gets so many rows; more together save little."""
REST_ROWS_MIN: Final = 4
"""A rest has to bring so many rows in all."""
READ_ROWS_MAX: Final = 64
"""A source that gives more at once needs no rest."""
PLAIN_SECONDS: Final = 0.008
PLAIN_ROWS: Final = 8
RESTED_SECONDS: Final = 2.0
"""To see what comes without rests, they are left out for so long, and until so many rows have come, after so
long."""
PAYS_SECONDS: Final = 0.05
"""Rests have to pay in each time so long."""
REFUSED_SECONDS_MAX: Final = 1.0
"""For how long there is none after rests that did not pay, at most; each time in a row twice as long."""


class SourceRest:
    """Decides for one source's task, by how many rows come and how long its thread waits for a processor. No
    clock: ``now`` is in seconds of any origin.

    Nobody must be held up: neither a source that has more than is taken, nor one that its consumers hold up.
    The first gives fewer rows a second with rests than without, or suddenly many more than before; the second
    does not give more at each read. Then the task reads on at once.

    Args:
        waited: for how long its thread has been ready to run and had no processor, in seconds.
        consumers: how many its rows are divided among.
    """

    def __init__(self, now: float, waited: float, consumers: int) -> None:
        self.seconds = 0.0
        """How long it rests after this read; 0: it does not."""
        self._wanted_rows = CONSUMER_ROWS * consumers
        self._rate = self._at_once = 0.0
        """Rows a second, and at each read, without rests."""
        self._delay = 0.0
        """How long the thread waits for a processor at each of them, at worst of late."""
        self._short = 0
        """Looks in a row that found processors short."""
        self._measures = True
        """They are measured; else rests are only left out."""
        self._refused = PLAIN_SECONDS
        """For how long there was none the last time."""
        self._until = now + PLAIN_SECONDS
        self._begin(now, waited)

    def _begin(self, now: float, waited: float) -> None:
        self._since = self._read_at = now
        self._waited = waited
        self._reads = self._rows = 0

    def read(self, rows: int, now: float) -> bool:
        """So many rows were read and passed on. Whether :meth:`look` is due."""
        self._reads += 1
        self._rows += rows
        before, self._read_at = self._read_at, now
        if not self.seconds:
            return now >= self._until and (self._rows >= PLAIN_ROWS or not self._measures)
        if now >= self._until or not self._pays(now) or rows > 2 * self._expected(before, now):
            return True
        if now - self._since > PAYS_SECONDS:
            self._since, self._reads, self._rows = now, 0, 0
        return False

    def look(self, now: float, waited: float) -> None:
        """Rest from now on, or do not."""
        rested, lasts = self.seconds > 0.0, PLAIN_SECONDS
        self.seconds = 0.0
        if rested and not self._pays(now):
            lasts = self._refused = min(REFUSED_SECONDS_MAX, 2 * self._refused)
            self._measures = False
        elif rested or not self._measures:
            self._refused = PLAIN_SECONDS if rested else self._refused
            self._measures = True
        else:
            self._rate, self._at_once = self._rows / max(now - self._since, 1e-6), self._rows / self._reads
            self._delay = max((waited - self._waited) / self._reads, self._delay / 2)
            self._short = self._short + 1 if waited - self._waited >= SHORT_SHARE * (now - self._since) else 0
            self.seconds = self._wanted()
            lasts = RESTED_SECONDS if self.seconds else PLAIN_SECONDS
        self._until = now + lasts
        self._begin(now, waited)

    def _pays(self, now: float) -> bool:
        """As many rows come as without rests, and more at each read, of late."""
        more = self._rows >= 1.5 * self._at_once * self._reads
        return more and self._rows >= self._expected(self._since, now) / 2

    def _expected(self, since: float, now: float) -> float:
        return self._rate * (now - since)

    def _wanted(self) -> float:
        """How long a rest should be."""
        if self._short < SHORT_LOOKS:
            return 0.0
        seconds = min(REST_SECONDS_MAX, RESTS_PER_DELAY * self._delay, self._wanted_rows / self._rate)
        pays = seconds >= REST_SECONDS_MIN and self._rate * seconds >= REST_ROWS_MIN
        return seconds if pays and self._at_once <= READ_ROWS_MAX else 0.0

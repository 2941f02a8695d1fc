"""A coordinator's manifest, as file sinks in tests see it."""

from __future__ import annotations

from collections.abc import Sequence

from minishuffle.operators.base import CompleteFile

__all__ = ["Listing"]


class Listing:
    """A coordinator that lists what it hears of, at once or when the test says so."""

    def __init__(
        self,
        *,
        at_once: bool = True,
        listed: dict[int, int] | None = None,
        committable: bytes = b"",
        held: bool = False,
        adopted: Sequence[CompleteFile] = (),
        is_complete: bool = False,
        sink_state: bytes = b"",
    ) -> None:
        self.listed = listed or {}
        self.committable = committable
        self.held, self.adopted, self.is_complete = held, adopted, is_complete
        self.sink_state = sink_state
        self.acknowledged = 0
        self.heard: list[CompleteFile] = []
        self.lingered = 0
        self.gives_up = False
        """Its job ends, and what it has not listed never will be."""
        self._at_once = at_once

    @property
    def may_be_listed(self) -> int:
        return self.acknowledged if self.gives_up else len(self.heard)

    def complete(self, file: CompleteFile) -> None:
        assert file.number == len(self.heard)
        self.heard.append(file)
        self.acknowledged += self._at_once

    def keep(self, state: bytes) -> None:
        self.sink_state = state

    def wait(self) -> None:
        self.acknowledged = len(self.heard)

    def finish(self) -> None:
        self.wait()
        for file in self.adopted:
            self.listed[file.attempt] = file.number + 1

    def linger(self) -> None:
        self.lingered += 1

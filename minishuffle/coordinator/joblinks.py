"""The links between workers that one job needs, and does not have. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from minishuffle.coordinator.history import History
from minishuffle.coordinator.links import PairKey
from minishuffle.wire.requests import BrokenLink

__all__ = ["JobLinks"]


class JobLinks:
    """Which are broken; workers say so again to the next coordinator.

    Args:
        history: of the job.
    """

    def __init__(self, history: History) -> None:
        self.broken: dict[PairKey, str] = {}
        """Texts by pair of workers between which tasks need a link that there has not been for
        ``link_timeout``."""
        self._history = history

    def hear(self, links: Mapping[PairKey, str], at: float) -> bool:
        """These links are broken, and no others; True: that is new."""
        gone, new = self.broken.keys() - links.keys(), links.keys() - self.broken.keys()
        for pair in sorted(new):
            self._history.note(at, "link broken", links[pair])
        for one, other in sorted(gone):
            text = f"worker {one} and worker {other} are connected again, or need no connection any more"
            self._history.note(at, "link restored", text)
        kept = {pair: text for pair, text in self.broken.items() if pair not in gone}
        self.broken = kept | {pair: links[pair] for pair in new}
        return bool(gone or new)

    def forget(self, worker: int) -> None:
        """That worker is lost or has left: its links are no matter."""
        self.broken = {pair: text for pair, text in self.broken.items() if worker not in pair}

    def infos(self) -> list[BrokenLink]:
        """As clients see them."""
        return [BrokenLink(workers=list(pair), text=text) for pair, text in self.broken.items()]

"""What stands in a plan behind a step of unknown columns, while ``minishuffle schema`` loads it to find
them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minishuffle.api.stream_base import StreamBase
from minishuffle.plan.nodes import Relation

__all__ = ["Draft", "draft_in"]


class Draft(StreamBase):
    """Placeholder for a table of unknown columns and for all that is made of it: every method gives the
    placeholder again and checks no argument. It ends with the step of unknown columns."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Draft:
            if name.startswith("_"):
                raise AttributeError(name)
            return self

    def __call__(self, *args: Any, **options: Any) -> Draft:
        return self

    def _side(self, name: str) -> Relation:
        return self.plan


def draft_in(streams: Iterable[Any]) -> Any:
    """The first placeholder among the arguments of a method; None: there is none."""
    return next((stream for stream in streams if isinstance(stream, Draft)), None)

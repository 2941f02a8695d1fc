"""Runs a plan in this process on the first rows of each source, up to one of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted, ShuffleError, TaskFailed, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.operators.base import END_OF_TIME, Output, Program, TaskContext, Watermark
from minishuffle.operators.row_copies import own_rows
from minishuffle.plan.end_steps import ScanStep
from minishuffle.plan.nodes import Feed, Node, inputs_first, running
from minishuffle.plan.planner import operator_of
from minishuffle.runtime.asynccalls import LoopCalls
from minishuffle.runtime.chain import Chain
from minishuffle.runtime.reader import SourceReader
from minishuffle.runtime.usererrors import describe_failure

__all__ = ["FirstRows"]

WAIT_SECONDS: Final = 10.0
"""How long a source that has rows now and then is asked for the next."""


class _Kept:
    """A partition of one consumer, which holds what is handed over."""

    def __init__(self) -> None:
        self.subpartitions = [None]
        self.hot_keys = HotKeys()
        self.taps = ()
        self.batches: list[Batch] = []

    def skips(self, position: int, rows: int) -> bool:
        return False

    def hand_over(self, position: int, batch: Batch) -> bool:
        self.batches.append(batch)
        return True

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Without watermarks nothing is late: each step gets the end of time alone."""


class FirstRows:
    """What the steps of a plan give for the first rows of each source, each run once.

    Args:
        count: of rows of each source.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._given: dict[tuple[Node, str | None], list[Batch]] = {}
        self.read = 0
        """The rows that were read of the source that gave most."""

    def given_to(self, step: Node) -> list[Batch]:
        """What comes to a step.

        Raises:
            UsageError: what Spark writes would come to it.
            TaskFailed: a function of the plan raised; names the step and has the user's traceback.
        """
        nodes = running(inputs_first([step]))
        feeds = [feed for node in nodes for feed in node.feeds]
        for node in nodes[:-1]:
            sides = {feed.side for feed in feeds if feed.node is node and feed.side is not None}
            try:
                if node.is_source:
                    self._read(node)
                else:
                    self._run(node, sorted(sides))
            except ShuffleError:
                raise
            except Exception as error:
                told = describe_failure(error, node.label)
                raise TaskFailed(f"{told.text}\n{told.traceback.rstrip()}") from error
        return [batch for feed in step.feeds for batch in self._of(feed)]

    def _of(self, feed: Feed) -> list[Batch]:
        return self._given[feed.node, feed.side]

    def _read(self, node: Node) -> None:
        if not isinstance(node.step, ScanStep):
            raise UsageError(
                f"{node.label} gives rows while a job runs alone: declare the schemas behind it by hand"
            )
        reader = SourceReader(node.step.source, 0, 1, time.monotonic())
        batches: list[Batch] = []
        left, give_up = self._count, time.monotonic() + WAIT_SECONDS
        while left and (found := reader.poll(time.monotonic())) is not None:
            if len(found):
                batches.append(Batch(found).slice(0, min(left, len(found))))
                left -= len(batches[-1])
            elif time.monotonic() > give_up:
                break
            else:
                time.sleep(0.001)
        reader.close()
        self.read = max(self.read, self._count - left)
        self._given[node, None] = batches

    def _run(self, node: Node, sides: Sequence[str]) -> None:
        edges: dict[int, str | None] = dict(enumerate([None, *sides]))
        kept = {edge: _Kept() for edge in edges}
        outputs = [Output(edge, "forward", side=side, times=True) for edge, side in edges.items()]
        operator = operator_of(node, {name: name for name in node.step.sides})
        chain = Chain(Program(None, [operator], outputs), kept, 0, TaskCounters())  # type: ignore[arg-type]
        context = TaskContext(
            job="draft",
            name=node.label,
            index=0,
            parallelism=1,
            attempt=1,
            now=time.monotonic,
            wall=time.time,
            wait_until=_wait_until,
            put_aside=chain.put_aside,
            async_calls=lambda: LoopCalls("first rows", lambda: None),
        )
        with ExitStack() as opened:
            operator.open(context)
            opened.callback(operator.close)
            for number, batches in self._inputs(node):
                enter = chain.entrance(number)
                for batch in batches:
                    enter(own_rows(batch))
                enter(Watermark(END_OF_TIME))
            chain.finish(lambda: None)
        for edge, side in edges.items():
            self._given[node, side] = kept[edge].batches

    def _inputs(self, node: Node) -> Iterator[tuple[int, list[Batch]]]:
        """By the number of the input what comes there; that which is read to its end first is the first."""
        first = node.step.first_input
        numbers = sorted({feed.input for feed in node.feeds}, key=lambda number: (number != first, number))
        for number in numbers:
            yield number, [batch for feed in node.feeds if feed.input == number for batch in self._of(feed)]


def _wait_until(ready: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not ready():
        if time.monotonic() > give_up:
            raise ResourceExhausted(
                f"a function has not ended after {WAIT_SECONDS:.0f} s: see what it waits for"
            )
        time.sleep(0.001)

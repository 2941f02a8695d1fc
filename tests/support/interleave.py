"""Two threads that take turns where a test wants it, one bytecode instruction at a time.

An instruction that moves what only its own thread sees, between its local variables and its stack, is none of
those before which the other thread acts: that comes to the same as to act before the next instruction.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

SECONDS_MAX = 20.0
OWN = {
    *(
        "CACHE",
        "COPY",
        "COPY_FREE_VARS",
        "EXTENDED_ARG",
        "IS_OP",
        "JUMP_BACKWARD",
        "JUMP_FORWARD",
        "KW_NAMES",
    ),
    *("LOAD_CONST", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_GLOBAL", "NOP", "PRECALL"),
    *("PUSH_NULL", "RESUME", "SWAP"),
}
"""Instructions that neither read nor write what two threads share; globals stay as they are. What drops a
reference is none of them, as an object may end with it, nor is a test of a truth value, perhaps a length."""


_shared: dict[int, tuple[CodeType, frozenset[int]]] = {}
"""By the number of the code, which is kept, as another one may get its number; to hash one takes long."""


def stops(frame: FrameType) -> bool:
    """Whether another thread may make a difference if it acts before the instruction that comes next."""
    code = frame.f_code
    if (found := _shared.get(id(code))) is None:
        offsets = frozenset(each.offset for each in dis.get_instructions(code) if each.opname not in OWN)
        found = _shared[id(code)] = code, offsets
    return frame.f_lasti in found[1]


class Stepped:
    """A call in a thread of its own that stops before any instruction of the package."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        """Instructions before which it does not stop."""
        self._steps = True
        """Nobody has let it run to its end."""
        self.done = False
        self.error: BaseException | None = None
        self._tracer = self._trace
        """Kept: the interpreter does not hold what it calls while that ends the tracing."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wait(self._go)
        sys.settrace(self._tracer)
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self.done = True
            self._stopped.release()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._steps:
            sys.settrace(None)
            return None
        if "/minishuffle/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and stops(frame):
            self._left -= 1
            if not self._left:
                self._stopped.release()
                self._wait(self._go)
        return self._tracer

    @staticmethod
    def _wait(semaphore: threading.Semaphore) -> None:
        assert semaphore.acquire(timeout=SECONDS_MAX)

    def step(self, count: int) -> int:
        """Run that many instructions, or to the end; gives how many there were."""
        if self.done or not count:
            return 0
        self._left = count
        self._go.release()
        self._wait(self._stopped)
        return count - self._left + 1 if self.done else count

    def finish(self) -> None:
        self._steps = False
        self.step(1_000_000)
        self._thread.join(SECONDS_MAX)
        if self.error is not None:
            raise self.error


def interleaved(make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> Iterator[None]:
    """Run the two calls that ``make`` gives anew in every order with at most two changes of thread.

    The first runs up to some instruction, then the second up to some, then the first to its end, and the
    second. Look at the outcome after each step of this iterator.
    """
    before = 0
    while True:
        between, ended = 0, False
        while not ended:
            first, second = (Stepped(call) for call in make())
            taken = first.step(before)
            ended = second.step(between) < between
            first.finish()
            second.finish()
            yield
            between += 1
        if taken < before:
            return
        before += 1


def nested(make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> Iterator[None]:
    """Run the two calls that ``make`` gives anew for each instruction of the first: in front of it, the whole
    second; at last behind them all.

    Look at the outcome after each step of this iterator.
    """
    before, interrupted = 0, True
    while interrupted:
        interrupted = _interrupt(*make(), before)
        yield
        before += 1


def _interrupt(call: Callable[[], object], inside: Callable[[], object], before: int) -> bool:
    """Run ``call``, and ``inside`` behind that many of its instructions; False if there are no more. It needs
    no second thread: the trace function runs it."""
    left = before + 1

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "/minishuffle/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and stops(frame):
            left -= 1
            if not left:
                sys.settrace(None)
                inside()
                return None
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    if left:
        inside()
    return not left

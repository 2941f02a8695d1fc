"""The one sentence in what Spark throws: minishuffle's own if it raised it inside a task, else Spark's."""

from __future__ import annotations

import re
from typing import Final

from minishuffle.errors import ShuffleError

__all__ = ["SparkFailed", "spark_error"]

OWN: Final = re.compile(r"minishuffle\.errors\.(\w+): (.+)")
"""The last line of a Python traceback, as Spark carries it inside its own text."""
HANDSHAKE: Final = re.compile(r"minishuffle\.wire\.handshake\.HandshakeRefused: (.+)")
OTHER: Final = re.compile(r"^(?:Caused by: |: )?(?:[\w.$]*\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
"""The last line of a Python traceback, or a line that begins a Java stack; the last is the first cause."""


class SparkFailed(ShuffleError):
    """Spark could not do what it was asked for; the cause has its stack."""

    code = 70


def spark_error(error: BaseException, what: str) -> ShuffleError:
    """``error`` in one sentence, behind ``what`` failed. The caller raises it from ``error``."""
    if isinstance(error, ShuffleError):
        return error
    text = _all_text(error)
    own = [found[-1] for found in (HANDSHAKE.findall(text), OWN.findall(text)) if found]
    if own:
        sentence = own[0] if isinstance(own[0], str) else own[0][1]
        return SparkFailed(f"{what}: {sentence.strip()}")
    found = OTHER.findall(text)
    sentence = f"{found[-1][0]}: {found[-1][1]}" if found else text.strip().splitlines()[0]
    return SparkFailed(f"{what}: {sentence.strip()[:2000]}")


def _all_text(error: BaseException) -> str:
    """What the error and those that it hides say."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__module__}.{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)

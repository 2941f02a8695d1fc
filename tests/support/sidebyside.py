"""How several processes share the tests (``pytest -n``): by file, and what shares a session of Spark, or the
sources as they were parsed, as one.

A JVM takes seconds to start and a minute to become quick. One process has the tests that can do with any
session, from the beginning on, and the others start none for them.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

__all__ = ["SideBySide", "shares_spark"]

SHARED = (
    "tests/spark/",
    "tests/pipelines/",
    "tests/bench/test_spark.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_pipeline.py",
)
"""Where tests take the session that is there (see ``support.spark``)."""
OWN = ("tests/spark/test_cluster.py", "tests/spark/test_session.py", "tests/pipelines/test_interrupt.py")
"""Files among them that start sessions, or whose processes do."""
RULES = ("tests/test_architecture.py", "tests/test_house.py")
"""Files that read all sources, which takes longer than most of what they look for."""


def shares_spark(file: str) -> bool:
    """Whether the tests of that file, a path from the top level, share a session with those of others."""
    return file.startswith(SHARED) and file not in OWN


class SideBySide(LoadFileScheduling):
    """Gives each process whole files, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "Spark" if shares_spark(file) else "rules" if file in RULES else file

"""One sentence out of what Spark throws."""

from __future__ import annotations

import pytest

from minishuffle.errors import UnknownName
from minishuffle.spark.session import SparkFailed, spark_error

STACK = "\tat org.apache.spark.scheduler.Task.run(Task.scala:147)\n\tat java.base/java.lang.Thread.run"
TASK = f"""\
An error occurred while calling o51.save.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing. SQLSTATE: 58030
{STACK}
Caused by: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An error in Python:
Traceback (most recent call last):
  File "/x/minishuffle/remote/writer.py", line 155, in write
    raise UsageError("inner")
%s
{STACK}
"""


@pytest.mark.parametrize(
    "line, said",
    [
        ("minishuffle.errors.UsageError: cast it in the job", "save: cast it in the job"),
        ("minishuffle.errors.UnknownName: there is no stream 'x'", "save: there is no stream 'x'"),
        ("minishuffle.wire.handshake.HandshakeRefused: the secret is another", "save: the secret is another"),
        ("ValueError: seven is too much", "save: ValueError: seven is too much"),
    ],
)
def test_the_sentence_is_dug_out_of_the_stack(line: str, said: str) -> None:
    found = spark_error(RuntimeError(TASK % line), "save")
    assert isinstance(found, SparkFailed)
    assert str(found) == said


def test_the_last_of_our_sentences_wins() -> None:
    text = TASK % "minishuffle.errors.PeerLost: the first\nminishuffle.errors.UsageError: the last"
    assert str(spark_error(RuntimeError(text), "save")) == "save: the last"


def test_a_cause_is_looked_into() -> None:
    error = RuntimeError("Spark says nothing")
    error.__cause__ = RuntimeError("minishuffle.errors.UsageError: here it is")
    assert str(spark_error(error, "read")) == "read: here it is"


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = UnknownName("there is no job 'x'")
    assert spark_error(error, "read") is error


def test_what_is_very_long_is_cut() -> None:
    assert len(str(spark_error(ValueError("x" * 10_000), "read"))) < 2_100


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("\n\n")])
def test_an_error_without_words_has_its_name(error: BaseException) -> None:
    assert type(error).__name__ in str(spark_error(error, "read"))

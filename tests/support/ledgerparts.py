"""How an entry of each part of the ledger is played: from what is given to the value that comes of it."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from minishuffle.api.stream import Stream, Table
from minishuffle.operators.base import Aside
from support.cutjobs import Cut, run
from support.ledger import ROOT, Value, digest, unplain
from support.pipelines import (
    APART,
    FLOAT_KEYS,
    KEYED,
    SCHEMA,
    STEPS,
    TABLES,
    answer,
    declared,
    source,
)
from support.plainanswers import Row, Rows

STEP = {step.name: step for step in STEPS}
KEYED_STEP = {
    f"{kind}:{each.name}": each for kind, some in (("", KEYED + TABLES), ("apart", APART)) for each in some
}
PROGRAM_SECONDS_MAX = 120
REFUSALS_SECONDS_MAX = 3_000
TESTED = (
    "tests/api",
    "tests/api",
    "tests/plan",
    "tests/connectors",
    "tests/operators",
    "tests/worker/test_reader.py",
    "tests/worker/sources/test_leaseledger.py",
)
"""Where the quick tests are whose refusals are recorded."""


def failure(error: BaseException) -> list[str]:
    """Class and text of an error, without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+|/tmp/\S+|127\.0\.0\.1:\d+", "...", str(error))
    return [type(error).__name__, text[:500]]


# --- pipelines ------------------------------------------------------------------------------------------


def schema_of(text: dict[str, str] | None) -> pa.Schema | None:
    """A schema by names of types."""
    return (
        None if text is None else pa.schema([(name, pa.type_for_alias(each)) for name, each in text.items()])
    )


def play_pipeline(given: Any) -> Value:
    """By form in which the rows come the hash of the answer, a list of them if cuts differ; class and text of
    what fails."""
    return {form: pipeline_in_form(given, form, schema_of(given.get("schema"))) for form in given["forms"]}


def pipeline_in_form(given: Any, form: str, schema: pa.Schema | None) -> Value:
    """The same in one form; ``schema`` is declared where the pipeline does not say another."""
    keyed = KEYED_STEP[given["keyed"]]
    apart = given["keyed"].startswith("apart")
    rows, others = unplain(given["rows"]), unplain(given["others"])
    stream = source(rows, given["splits"], form, SCHEMA)
    other = source(others, 1, form, FLOAT_KEYS if apart else SCHEMA)
    for name in given["steps"]:
        stream = STEP[name].add(stream)
    try:
        with declared(schema):
            job = keyed.add(stream, other).collect()
        answers = [answer(run(job, Cut(*cut)).rows, keyed.last) for cut in given["cuts"]]
    except Exception as error:
        return failure(error)
    digests = list(dict.fromkeys(digest(sorted(each.items(), key=repr)) for each in answers))
    return digests[0] if len(digests) == 1 else digests


# --- types ----------------------------------------------------------------------------------------------


def rounded(value: Any) -> str:
    """A value as text: sums of floats are added up in any order, and times are shown in any time zone."""
    from api.test_type_matrix import as_text

    return f"{value:.12g}" if isinstance(value, float) else as_text(value)


def play_cell(given: Any) -> Value:
    """The hash of what one operator makes of one column, or class and text where it is refused."""
    from api.test_type_matrix import CUTS, NARROW, WIDE, Column, small_of, timed

    operator, nesting, kind = given
    column = Column(kind, nesting)
    try:
        table = timed([column])
        if operator in WIDE:
            each = WIDE[operator]
            *_, rows = each.rows(table, [column.name], CUTS[1])
            shown = [(row[each.key], rounded(row[each.result.format(column.name)])) for row in rows]
            found = sorted(shown, key=repr)
        else:
            narrow = NARROW[operator]
            rows = run(narrow.build(table, column.name, small_of(column)).collect(), CUTS[1]).rows
            found = sorted(narrow.found(rows, column.name).items())
    except Exception as error:
        return failure(error)
    return digest(found)


# --- counts ---------------------------------------------------------------------------------------------


class Splits:
    """Rows in splits, in batches of some."""

    bounded = True

    def __init__(self, splits: list[Rows], form: str) -> None:
        self.rows, self.format = splits, "rows" if form == "rows" else "arrow"

    def splits(self) -> range:
        return range(len(self.rows))

    def read(self, split: int, offset: int) -> Iterator[Any]:
        rows = copy.deepcopy(self.rows[split][offset:])
        for at in range(0, len(rows), 5):
            piece = rows[at : at + 5]
            yield piece if self.format == "rows" else pa.RecordBatch.from_pylist(piece, schema=SCHEMA)


def checked(row: Row) -> Any:
    """Raises for some rows, and puts others aside."""
    if row["v"] % 7 == 0:
        raise ValueError(f"v is {row['v']}")
    return Aside("odd", row) if row["v"] % 5 == 0 else row


def tagged(tag: str) -> Any:
    return lambda row: tag


def play_counts(given: Any) -> Value:
    """How many rows came out, were late, went to each side output, were skipped or became dead letters."""
    found = [counts(given, Cut(*cut)) for cut in given["cuts"]]
    return found[0] if all(each == found[0] for each in found) else found


def timed_side(given: Any, name: str) -> Any:
    splits = Splits(unplain(given[name]), given["form"])
    make: Any = Stream.source(splits) if given["form"] == "rows" else Table.source(splits, SCHEMA)
    return make.parallel(len(splits.rows)).event_time(
        "t",
        out_of_order=timedelta(seconds=given["delay"]),
        watermarks="each",
        on_error=given["on_error"],
    )


def counts(given: Any, cut: Cut) -> Value:
    """Those of one cut."""
    stream, late, ends = timed_side(given, "rows"), given["late"], []
    if given["form"] == "rows":
        stream = stream.map(checked, sides=["odd"], on_error=given["on_error_of_map"])
        ends.append(("odd", stream.side("odd")))
        if given["on_error_of_map"] == "side":
            ends.append(("errors", stream.errors))
    keyed, seconds = stream.key_by("k"), timedelta(seconds=given["seconds"])
    match given["operator"]:
        case "window":
            more = timedelta(seconds=given["lateness"])
            made = keyed.window(seconds, late=late, allowed_lateness=more).count()
            if more:
                ends.append(("panes", made.panes))
        case "sliding":
            made = keyed.window(seconds, slide=seconds / 2, late=late).count()
        case "session":
            made = keyed.session_window(seconds, late=late).count()
        case "count_window":
            made = keyed.count_window(3, late=late).count()
        case "join":
            other = timed_side(given, "others").key_by("k")
            made = keyed.join(other, given["how"], within=seconds, late=late)
            if late == "side":
                ends.append(("late_right", made.late_right))
    ends.append(("made", made))
    if late == "side":
        ends.append(("late", made.late))
    jobs = [
        (each if isinstance(each, Stream) else each.to_rows()).map(tagged(tag)).collect(tag)
        for tag, each in ends
    ]
    outcome = run(jobs[0] if len(jobs) == 1 else Stream.together(*jobs), cut)
    rows = {tag: outcome.rows.count(tag) for tag, _ in ends}
    return {
        "rows": rows,
        "late": outcome.counters.records_late,
        "errors": dict(sorted(outcome.counters.user_errors.items())),
        "letters": sum(line.startswith("dead letter") for line in outcome.log),
    }


# --- deaths ---------------------------------------------------------------------------------------------


def play_deaths(given: Any) -> Value:
    """How a simulated job ends, all of whose books balance; else what did not hold."""
    from support.simulated_runs import Run, Scenario

    played = Run(
        given["seed"], Scenario(faults=True, bounded_share=given["bounded"], strategy=given["strategy"])
    )
    try:
        played.play()
    except AssertionError as error:
        return f"does not hold: {str(error).splitlines()[0]:.200}"
    return "finishes" if played.end in ("finished", "finished_with_loss") else played.end


# --- documents ------------------------------------------------------------------------------------------


def play_document(given: Any) -> Value:
    """What a program of a document prints, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(given["code"])
        for name, text in given["files"].items():
            Path(folder, name).write_text(text)
        ran = subprocess.run(
            [sys.executable, path.name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS_MAX,
            check=False,
        )
    printed = ran.stdout if not given["sorted"] else "\n".join(sorted(ran.stdout.splitlines()))
    return printed if ran.returncode == 0 else ["error", *ran.stderr.splitlines()[-1:]]


# --- refusals -------------------------------------------------------------------------------------------


@cache
def refusals_now() -> frozenset[tuple[str, str]]:
    """Class and text of each refusal that quick tests of jobs and operators expect, in a run of them."""
    environment = {name: value for name, value in os.environ.items() if name != "MINISHUFFLE_SOAK"}
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as file:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not alone", *TESTED]
        command += [
            "-p",
            "support.refusals",
            f"--refusals={file.name}",
            "--ignore=tests/api/test_ledger.py",
        ]
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "CI": "true", "PYTHONPATH": "tests"},
            capture_output=True,
            text=True,
            timeout=REFUSALS_SECONDS_MAX,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout[-2_000:]
        return frozenset((error, _without_modules(text)) for error, text in map(json.loads, file))


def _without_modules(text: str) -> str:
    """Without those of the tests' own classes: tests move."""
    return re.sub(r"\btests(\.\w+)+\.(?=[A-Z])", "", text)


def play_refusal(given: Any) -> Value:
    """Class and text if a test still expects them, else nothing."""
    error, text = given
    return given if (error, _without_modules(text)) in refusals_now() else None


PLAY = {
    "pipelines": play_pipeline,
    "widened": play_pipeline,
    "types": play_cell,
    "counts": play_counts,
    "deaths": play_deaths,
    "refusals": play_refusal,
    "documents": play_document,
}

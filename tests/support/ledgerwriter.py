"""Writes parts of the ledger: ``PYTHONPATH=tests python -m support.ledgerwriter SCRATCH [KIND...]``.

What is given is drawn by number and kept as data: what comes of it does not depend on how it was drawn. The
folder ``SCRATCH`` has what was drawn so far; all of it that is new comes into the ledger, without a kind that
too.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import pyarrow as pa

from minishuffle.operators.row_conversion import ToArrow
from support.ledger import Ledger, plain
from support.ledgerparts import KEYED_STEP, PLAY, STEP, pipeline_in_form, refusals_now
from support.pipelines import SCHEMA, TABLES
from support.plainanswers import SECOND, Rows

Entry: TypeAlias = tuple[str, str, Any, Any]
"""Part, name, what is given, and its value."""
PIPELINES, JOBS, DEATHS = 5_000, 500, 500
ODD_KEYS = (0, 1, True, 1.0, "a", None, (1, "b"), 0.5)
WHOLE_KEYS = (None, 0, 1, 2)
KEYS_APART = ((None, 0, 1, 2, 2**53 + 1), (None, 0.0, 1.0, 2.5, 2.0**53))

# --- pipelines ------------------------------------------------------------------------------------------


def draw_rows(dice: random.Random, keys: tuple[Any, ...], *, optional: bool) -> Rows:
    """Rows that all have the columns of SCHEMA, or that lack some and have others, and other types."""
    rows = []
    for _ in range(dice.choice([0, 1, 2, *range(3, 25)])):
        row = {
            "k": dice.choice(keys),
            "g": dice.choice("pqr"),
            "t": dice.randint(0, 60) * SECOND,
            "v": dice.randint(-100, 100),
            "x": dice.choice([None, dice.randint(-40, 40) / 4]),
        }
        if optional:
            if dice.random() < 0.15:
                row["t"] = None
            if dice.random() < 0.2:
                row["v"] = dice.random() < 0.5
            others = {"o": dice.randint(0, 5), "u": dice.choice([0, 1, "", "é"]), "l": [1]}
            row |= {name: value for name, value in others.items() if dice.random() < 0.5}
        rows.append(row)
    return rows


def draw_pipeline(number: int) -> dict[str, Any]:
    dice = random.Random(f"pipeline {number}")
    only_rows = dice.random() < 0.5
    apart = not only_rows and dice.random() < 0.1
    names = [name for name in KEYED_STEP if name.startswith("apart:") == apart]
    if only_rows:
        names = [name for name in names if KEYED_STEP[name] not in TABLES]
    keys = KEYS_APART if apart else (ODD_KEYS if only_rows else WHOLE_KEYS,) * 2
    wide = dice.choice([2, 4])
    return {
        "forms": ["rows"] if only_rows else ["rows", "arrow"],
        "rows": plain(draw_rows(dice, keys[0], optional=only_rows)),
        "others": plain(draw_rows(dice, keys[1], optional=only_rows)),
        "steps": [dice.choice(list(STEP)) for _ in range(dice.randint(0, 3))],
        "keyed": dice.choice(names),
        "splits": dice.randint(1, 3),
        "cuts": [
            [1, dice.randint(0, 99), dice.choice([None, 1, 2, 4]), True],
            [wide, dice.randint(0, 99), dice.choice([None, 1, 3, 9]), dice.random() < 0.5],
        ],
    }


def found_schemas(given: dict[str, Any]) -> tuple[dict[str, Any], list[pa.Schema]]:
    """What comes of a pipeline that declares nothing, and the schemas that it finds."""
    schemas: list[pa.Schema] = []
    process = ToArrow.process

    def watched(self: ToArrow, batch: Any, input: int, emit: Any) -> None:
        def noted(item: Any) -> None:
            if isinstance(item, pa.RecordBatch):
                fields = [field for field in item.schema if field.name in "gtvxo"]
                schemas.append(pa.schema([(field.name, field.type) for field in fields]))
            emit(item)

        process(self, batch, input, noted)

    with mock.patch.object(ToArrow, "process", watched):
        values = {form: pipeline_in_form(given, form, None) for form in given["forms"]}
    return values, schemas


def widest(schemas: list[pa.Schema]) -> dict[str, str]:
    """The types that hold all values that were found: those of SCHEMA where there were none."""
    found = {}
    for name in "gtvxo":
        kinds = {schema.field(name).type for schema in schemas if name in schema.names} - {pa.null()}
        if len(kinds) > 1:
            kinds -= {pa.bool_()}
        if len(kinds) > 1:
            kinds -= {pa.int64()}
        found[name] = str(kinds.pop() if kinds else SCHEMA.field(name).type)
    return found


def pipeline(number: int) -> Entry:
    """Part of its own: those whose types widened while they ran."""
    given = draw_pipeline(number)
    if "aggregate" not in given["keyed"]:
        return "pipelines", str(number), given, PLAY["pipelines"](given)
    found, schemas = found_schemas(given)
    given["schema"] = widest(schemas)
    value = PLAY["pipelines"](given)
    if len(set(map(str, schemas))) <= 1 and value == found:
        return "pipelines", str(number), given, value
    given["undeclared"] = found
    return "widened", str(number), given, value


# --- the others -----------------------------------------------------------------------------------------


@cache
def cells() -> list[list[str]]:
    from api.test_type_matrix import COLUMNS, NARROW, WIDE

    return [[name, column.nesting, column.kind] for name in (*WIDE, *NARROW) for column in COLUMNS]


def cell(number: int) -> Entry:
    given = cells()[number]
    return "types", "|".join(given), given, PLAY["types"](given)


def draw_counts(number: int) -> dict[str, Any]:
    dice = random.Random(f"counts {number}")
    form = dice.choice(["rows", "columns"])

    def splits() -> list[Rows]:
        found = []
        for _ in range(dice.choice([1, 2])):
            rows = draw_rows(dice, WHOLE_KEYS, optional=False)
            for at, row in enumerate(rows):  # Most are nearly in order.
                row["t"] = None if dice.random() < 0.1 else max(0, at + dice.randint(-9, 3)) * SECOND
                row["o"] = None
            found.append(rows)
        return found

    operator = dice.choice(["window", "sliding", "session", "count_window", "join"])
    rows = splits()
    others = [draw[:] for draw in splits()]
    others = (others * 2)[: len(rows)]
    return {
        "form": form,
        "rows": plain(rows),
        "others": plain(others),
        "operator": operator,
        "how": dice.choice(["inner", "left", "right", "full", "semi", "anti"]),
        "late": dice.choice(["drop", "side"]),
        "lateness": dice.choice([0, 0, 3]),
        "delay": dice.randint(0, 4),
        "seconds": dice.choice([2, 4, 10]),
        "on_error": dice.choice(["skip", "dead_letter"]),
        "on_error_of_map": dice.choice(["skip", "dead_letter", "side"]),
        "cuts": [[len(rows), 0, None, True], [len(rows), number, 3, False], [4, number, 2, True]],
    }


def counted(number: int) -> Entry | None:
    """None for a job whose counts depend on the cut."""
    given = draw_counts(number)
    value = PLAY["counts"](given)
    return ("counts", str(number), given, value) if isinstance(value, dict) else None


def death(number: int) -> Entry | None:
    """None for a simulated job of which no process is killed."""
    from support.simulated_runs import Run, Scenario

    strategy: Any = ("individual", "individual", "region", "full")[number % 4]
    given = {"seed": number, "strategy": strategy, "bounded": 0.6}
    drawn = Run(number, Scenario(faults=True, bounded_share=0.6, strategy=strategy))
    if not any("kill" in fault.kind for fault in drawn.faults):
        return None
    return "deaths", str(number), given, PLAY["deaths"](given)


def refusal(number: int) -> Entry:
    error, text = sorted(refusals_now())[number]
    return "refusals", f"{error}: {text}", [error, text], [error, text]


@cache
def programs() -> list[tuple[str, dict[str, Any]]]:
    from e2e.test_readme import AS_PRINTED, DATAFLOW, TEXT, blocks
    from minishuffle.examples.wordcount import SHIPPED_TEXT

    (first,) = blocks("README.md", "Word count")
    found = [("Word count", {"code": first.code, "files": {TEXT: SHIPPED_TEXT.read_text()}, "sorted": True})]
    for title in AS_PRINTED:
        for block in blocks(DATAFLOW, title):
            found.append((title, {"code": block.code, "files": {}, "sorted": False}))
    return found


def program(number: int) -> Entry:
    title, given = programs()[number]
    return "documents", f"{number} {title}", given, PLAY["documents"](given)


# --- writing ------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """``entry`` by number, of which there are ``numbers``; the first ``wanted`` that are some are kept."""

    entry: Callable[[int], Entry | None]
    numbers: Callable[[], int]
    wanted: int | None = None
    parts: tuple[str, ...] = ()


KINDS = {
    "pipelines": Kind(pipeline, lambda: PIPELINES, parts=("pipelines", "widened")),
    "types": Kind(cell, lambda: len(cells())),
    "counts": Kind(counted, lambda: 2 * JOBS, JOBS),
    "deaths": Kind(death, lambda: 5 * DEATHS, DEATHS),
    "documents": Kind(program, lambda: len(programs())),
    "refusals": Kind(refusal, lambda: len(refusals_now())),
}


def drawn(kind: str, scratch: Path) -> dict[int, Any]:
    """By number what the scratch file has; None: nothing came of it."""
    file = scratch / f"{kind}.jsonl"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


def draw(kind: str, scratch: Path) -> None:
    """Draw all entries that are not in the scratch file."""
    each, found = KINDS[kind], drawn(kind, scratch)
    some = sum(entry is not None for entry in found.values())
    with (scratch / f"{kind}.jsonl").open("a", buffering=1) as out:
        for number in range(each.numbers()):
            if each.wanted is not None and some >= each.wanted:
                break
            if number not in found:
                entry = each.entry(number)
                some += entry is not None
                out.write(json.dumps([number, entry]) + "\n")


def pack(scratch: Path) -> None:
    """Add to the ledger what was drawn."""
    ledger = Ledger()
    for kind, each in KINDS.items():
        entries = [entry for _, entry in sorted(drawn(kind, scratch).items()) if entry is not None]
        for part in each.parts or (kind,):
            mine = {name: (given, value) for its, name, given, value in entries if its == part}
            print(part, ledger.write(part, mine), "of", len(mine), "are new", flush=True)


def main(scratch: Path, kinds: list[str]) -> None:
    """Draw these kinds, or go on with them, then add to the ledger what was drawn."""
    logging.disable(logging.CRITICAL)
    scratch.mkdir(exist_ok=True)
    for kind in kinds:
        draw(kind, scratch)
    pack(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

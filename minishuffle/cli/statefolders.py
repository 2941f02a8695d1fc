"""``minishuffle state list|show|rm``: the snapshots of a directory, and the state in one as a table."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Container, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from minishuffle.cli import tables
from minishuffle.cli.session import Session, json_option, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo
from minishuffle.config import read_secret
from minishuffle.console import console, new_table
from minishuffle.errors import UnknownName, UnreadableSnapshot, UsageError
from minishuffle.limits import UNFINISHED_SNAPSHOT_SECONDS
from minishuffle.snapshots.catalog import Listed, expendable, list_snapshots, newest_whole, verify
from minishuffle.snapshots.sealedmanifest import MANIFEST
from minishuffle.snapshots.storage import Folder, folder_above, folder_at

if TYPE_CHECKING:
    from minishuffle.snapshots.statetable import OperatorState, SavedState

__all__ = ["keys_meant", "saved_state", "snapshot_use"]

ROWS_SHOWN: Final = 20

trust_option = click.option(
    "--trust-snapshot",
    "trust",
    is_flag=True,
    help="Read snapshots that are not signed under the secret of this cluster, too.",
)


@click.group("state")
def saved_state() -> None:
    """Look at the state of jobs in snapshots, and remove snapshots. Needs no cluster."""


def _secret(session: Session) -> bytes:
    """The secret of the cluster; empty: there is none here."""
    return read_secret(session.secret_path()) if session.secret_path().exists() else b""


def _is_place(given: str) -> bool:
    return "://" in given or "/" in given or Path(given).exists()


def _folder_named(session: Session, given: str) -> str:
    """The path or URI of a snapshot, which may be given by its name in the cluster's ``snapshot_dir``, as
    ``state list`` shows it."""
    named = None if _is_place(given) else folder_at(session.snapshot_dir()).child(given)
    return named.where if named is not None and named.entries() else given


def _place(session: Session, given: str, *, trust: bool) -> str:
    """The path or URI of a snapshot, which may be given by its name, or by the id of its job: the newest
    whole one then."""
    directory = folder_at(session.snapshot_dir())
    place = _folder_named(session, given)
    if _is_place(place):
        return place
    try:
        folder, _, passed = newest_whole(directory, _secret(session), job=given, trust=trust)
    except UnknownName:
        raise UnknownName(
            f"there is no directory {given}, and no snapshot {given} or of a job {given} in "
            f"{directory.where}: 'minishuffle state list' shows those there"
        ) from None
    _tell_passed(passed)
    return folder.where


def _tell_passed(passed: Sequence[str]) -> None:
    for problem in passed:
        echo(f"passed over: {problem}", err=True)


def snapshot_use(session: Session, running: Container[str]) -> dict[str, Any]:
    """How many snapshots the cluster has in a directory of this machine, with their bytes, and how many of
    these are of jobs that do not run; nothing if there are none.

    Args:
        running: ids of the jobs that run.
    """
    where = session.snapshot_dir()
    if "://" in where or not Path(where).is_dir():
        return {}
    listed = list_snapshots(folder_at(where), _secret(session), trust=True)
    ended = [each for each in listed if each.manifest is not None and each.manifest.job not in running]
    if not listed:
        return {}
    found = {"directory": where, "count": len(listed), "bytes": sum(each.bytes for each in listed)}
    return {**found, "ended_count": len(ended), "ended_bytes": sum(each.bytes for each in ended)}


# --- list -------------------------------------------------------------------------------------------------


@saved_state.command("list")
@click.argument("path", required=False)
@trust_option
@json_option
@late_global_options
@click.pass_context
def list_states(context: click.Context, path: str | None, trust: bool, as_json: bool) -> None:
    """List the snapshots in a directory or at s3://bucket/folder, oldest first.

    Without PATH: in snapshot_dir, by default 'snapshots' in the cluster's state directory.
    """
    session = session_of(context)
    directory = folder_at(path or session.snapshot_dir())
    listed = list_snapshots(directory, _secret(session), trust=trust)
    if as_json:
        print_json({"directory": directory.where, "snapshots": [_listed_map(each) for each in listed]})
        return
    if not listed:
        is_one = any(entry.name == MANIFEST for entry in directory.entries())
        echo(
            f"{directory.where} is a snapshot: 'minishuffle state show' shows what it holds"
            if is_one
            else f"there are no snapshots in {directory.where}"
        )
        return
    numbers = ("tasks", "bytes", "age")
    table = new_table(["snapshot", "state", "job", "name", "kind", *numbers], numbers)
    for each in listed:
        made = each.manifest
        about = (
            ("-", "-", "-", "-") if made is None else (made.job, made.name, made.kind, str(len(made.tasks)))
        )
        age = tables.seconds_text(max(0.0, time.time() - each.taken_at))
        table.add_row(each.folder.name(), _state_of(each), *about, tables.byte_text(each.bytes), age)
    console().print(table)
    for each in listed:
        if each.problem:
            echo(f"{each.folder.name()}: {each.problem}")
    echo(f"in {directory.where}")


def _state_of(each: Listed) -> str:
    if each.is_unfinished:
        return "unfinished"
    return "whole" if not each.problem else "broken" if each.trusted else "not trusted"


def _listed_map(each: Listed) -> dict[str, Any]:
    found = {
        "path": each.folder.where,
        "state": _state_of(each),
        "problem": each.problem,
        "bytes": each.bytes,
        "taken_at": each.taken_at,
    }
    if each.manifest is not None:
        made = each.manifest
        found |= {"job": made.job, "name": made.name, "cluster": made.cluster, "number": made.number}
        found |= {"kind": made.kind, "release": made.release, "tasks": len(made.tasks)}
    return found


# --- show -------------------------------------------------------------------------------------------------


@saved_state.command("show")
@click.argument("snapshot")
@click.option("--operator", help="Show the state of this operator, by its name or id: a row for each key.")
@click.option("--part", default="", help="Which of its kinds of state, if it has several.")
@click.option("--key", help="Only the rows of this key; of several columns ('ann', 3).")
@trust_option
@json_option
@late_global_options
@click.pass_context
def show_state(
    context: click.Context,
    snapshot: str,
    operator: str | None,
    part: str,
    key: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Show which operators have state in a snapshot, or the state of one as a table.

    SNAPSHOT is its folder or URI, its name in the list, a directory of snapshots for the newest in it, or the
    id of a job.
    """
    from minishuffle.snapshots.savedstate import open_snapshot
    from minishuffle.snapshots.statetable import SavedState  # They need pyarrow, and other commands do not.

    if operator is None and (part or key is not None):
        raise UsageError("--part and --key are of an operator: name it with --operator")
    session = session_of(context)
    place = _place(session, snapshot, trust=trust)
    found = SavedState(open_snapshot(place, _secret(session), trust=trust))
    _tell_passed(found.passed_over)
    if operator is None:
        _show_operators(found, as_json)
        return
    keys = None if key is None else keys_meant(key)
    table = found.table(operator, part, keys=keys)
    if as_json:
        print_json({"operator": operator, "rows": table.to_pylist()})
    elif table.num_rows:
        tables.show_columns(table, ROWS_SHOWN)
    else:
        echo(f"operator {operator} has no state{'' if key is None else f' of the key {key}'}")


def _show_operators(found: SavedState, as_json: bool) -> None:
    operators, made = found.operators(), found.manifest
    if as_json:
        about = {"path": found.path, "job": made.job, "name": made.name, "taken_at": made.taken_at}
        print_json({**about, "operators": [_operator_map(each) for each in operators]})
        return
    age = tables.seconds_text(max(0.0, time.time() - made.taken_at))
    kind = "savepoint" if made.kind == "savepoint" else "durable snapshot"
    echo(f"{kind} {made.number} of job {made.job} ({made.name}), taken {age} ago: {found.path}")
    numbers = ("subtasks", "rows", "bytes")
    table = new_table(["operator", "id", "part", *numbers, "columns"], numbers)
    for each in operators:
        first = (each.name, each.id)
        if not each.parts:
            table.add_row(*first, "-", str(each.parallelism), "0", "-", "-")
        for part in each.parts:
            columns = ", ".join(f"{column.name} {column.type}" for column in part.schema)
            size = (f"{part.rows:,}", tables.byte_text(part.bytes))
            table.add_row(*first, part.name, str(each.parallelism), *size, columns)
    console().print(table)


def _operator_map(each: OperatorState) -> dict[str, Any]:
    parts = [
        {
            "name": part.name,
            "by_key": part.by_key,
            "rows": part.rows,
            "bytes": part.bytes,
            "columns": {column.name: str(column.type) for column in part.schema},
        }
        for part in each.parts
    ]
    about = {"name": each.name, "id": each.id, "kind": each.kind, "vertex": each.vertex}
    return {**about, "parallelism": each.parallelism, "rows": each.rows, "bytes": each.bytes, "parts": parts}


_READ_AS: Final[tuple[Callable[[str], Any], ...]] = (
    ast.literal_eval,
    float,
    Decimal,
    datetime.fromisoformat,
    date.fromisoformat,
    UUID,
)


def keys_meant(text: str) -> list[Any]:
    """The keys that somebody may mean who writes that text: itself, and what it is as a number (also a
    Decimal: 0.1 is two keys), a tuple, a time or a UUID."""
    found: list[Any] = [text]
    for read in _READ_AS:
        try:
            value = read(text)
        except (ValueError, ArithmeticError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        signals = isinstance(value, Decimal) and value.is_snan()
        if not isinstance(value, dict | list | set) and not signals:
            found.append(value)
    return found


# --- rm ---------------------------------------------------------------------------------------------------


@saved_state.command("rm")
@click.argument("path")
@click.option(
    "--keep",
    type=click.IntRange(1),
    help="PATH is a directory: of each job keep so many, the newest; and remove what is unfinished.",
)
@click.option("--force", is_flag=True, help="Also the last whole snapshot of its job, or one being written.")
@json_option
@late_global_options
@click.pass_context
def remove_state(context: click.Context, path: str, keep: int | None, force: bool, as_json: bool) -> None:
    """Remove a snapshot, or with --keep those of a directory that are not the newest of their job.

    PATH is its folder or URI, or its name in the list. The last snapshot of a job whose files have all their
    checksums is refused without --force.
    """
    session = session_of(context)
    secret = _secret(session)
    if keep is None:
        folders = [_removable(_folder_named(session, path), secret, force=force)]
    else:
        listed = list_snapshots(folder_at(path), secret, trust=True)
        found = expendable(listed, keep, time.time())
        for each in listed:
            if each.manifest is not None and each not in found:
                verify(each.folder, each.manifest)
        folders = [each.folder for each in found]
    for folder in folders:
        folder.remove()
    if as_json:
        print_json({"removed": [folder.where for folder in folders]})
    else:
        for folder in folders:
            echo(f"removed {folder.where}")
        if not folders:
            echo(f"nothing to remove in {path}")


def _removable(path: str, secret: bytes, *, force: bool) -> Folder:
    """The folder of a snapshot that may be removed.

    Raises:
        UnknownName: there is no snapshot.
        UsageError: it is the last whole one of its job, or it is being written.
    """
    folder = folder_at(path)
    listed = list_snapshots(folder_above(path), secret, trust=True)
    this = next((each for each in listed if each.folder.where == folder.where), None)
    if this is None:
        raise UnknownName(
            f"{folder.where} is no snapshot: 'minishuffle state list' shows those of a directory"
        )
    if force or this.problem:
        return folder
    if this.manifest is None:
        age = time.time() - this.touched
        if age < UNFINISHED_SNAPSHOT_SECONDS:
            ago = tables.seconds_text(max(0.0, age))
            raise UsageError(
                f"{folder.where} is unfinished, and was written to {ago} ago: somebody may be writing it; "
                "--force removes it"
            )
        return folder
    made = this.manifest
    of_job = [each for each in listed if _is_of(each, made.cluster, made.job) and each is not this]
    if not any(map(_is_whole, reversed(of_job))):
        raise UsageError(
            f"{folder.where} is the last whole snapshot of job {made.job} ({made.name}) there: --force "
            "removes it"
        )
    return folder


def _is_of(each: Listed, cluster: str, job: str) -> bool:
    return each.manifest is not None and (each.manifest.cluster, each.manifest.job) == (cluster, job)


def _is_whole(each: Listed) -> bool:
    assert each.manifest is not None
    try:
        verify(each.folder, each.manifest)
    except UnreadableSnapshot:
        return False
    return True

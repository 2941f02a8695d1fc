"""``minishuffle schema JOB``: the schema of the first step of a job whose columns nobody knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from minishuffle.cli.completion import complete_set, complete_spec
from minishuffle.cli.session import late_global_options
from minishuffle.cli.terminal import echo
from minishuffle.errors import UsageError
from minishuffle.limits import DRAFT_ROWS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["schema"]


@click.command()
@click.argument("job", shell_complete=complete_spec)
@click.option(
    "--set",
    "given",
    metavar="KEY=VALUE",
    multiple=True,
    shell_complete=complete_set,
    help="A parameter of the job.",
)
@late_global_options
def schema(job: str, given: tuple[str, ...]) -> None:
    """Show the schema to write at the first step of JOB that has none and needs one.

    JOB is what submit takes, such as file.py:attribute. The steps before that one run in this process on the
    first 1,000 rows of each source; no sink is opened. Write the schema there, and see the next one.
    """
    from minishuffle.cli.loading import load_job
    from minishuffle.plan.unknownschemas import drafting

    with drafting():
        stream = load_job(job).build(given)
    for line in schema_lines(stream.plan.ends):
        echo(line)


def schema_lines(ends: Sequence[Any]) -> Iterator[str]:
    """What is shown of a plan that ends so.

    Raises:
        UsageError: no rows come to the step, or they make no columns.
    """
    from minishuffle.api.firstrows import rows_before
    from minishuffle.plan.column_steps import UnknownStep
    from minishuffle.plan.nodes import inputs_first

    for node in inputs_first(ends):
        if isinstance(node.step, UnknownStep):
            step = node.step.unknown
            batches, read = rows_before(node, DRAFT_ROWS)
            found = step.columns_of(batches)
            if found is None:
                raise UsageError(
                    f"{step.step} at {step.place} got none of the first {read:,} rows of each source: "
                    "write its schema by hand"
                )
            yield f"# {step.step} at {step.place}"
            yield f"# from {read:,} rows"
            if not found.are_named:
                yield "# the rows are tuples or lists, whose values have no names: choose names"
            before, _, after = step.form.partition("{}")
            yield f"{before}{{"
            yield from (f"    {line}" for line in _column_lines(found.schema))
            yield f"}}{after}"
            return
    yield "# every step has a schema, or needs none"


def _column_lines(schema: pa.Schema) -> Iterator[str]:
    import pyarrow as pa

    for field in schema:
        comment = "  # no row had a value: choose its type" if pa.types.is_null(field.type) else ""
        yield f"{_quoted(field.name)}: {_written(field.type)},{comment}"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


_NAMES = {
    "double": "float64",
    "float": "float32",
    "halffloat": "float16",
    "date32[day]": "date32",
    "date64[ms]": "date64",
    "extension<arrow.uuid>": "uuid",
    "extension<arrow.json>": "json_",
    "extension<arrow.bool8>": "bool8",
}
"""Names of types that pyarrow does not print as it calls them."""


def _written(kind: pa.DataType) -> str:
    """A type as ``schema=`` takes it: its name, or what makes it."""
    import pyarrow as pa

    name = _NAMES.get(str(kind), str(kind))
    is_plain = name.isidentifier() and not kind.num_fields and not isinstance(kind, pa.BaseExtensionType)
    return json.dumps(name) if is_plain and pa.type_for_alias(name) == kind else _made(kind)


def _made(kind: pa.DataType) -> str:
    """An expression that makes the type."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        name = str(kind).partition("[")[0]
        zone = f", {json.dumps(kind.tz)}" if getattr(kind, "tz", None) else ""
        return f'pa.{name}("{kind.unit}"{zone})'
    if pa.types.is_decimal(kind):
        return f"pa.decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    if pa.types.is_fixed_size_binary(kind):
        return f"pa.binary({kind.byte_width})"
    if pa.types.is_struct(kind):
        fields = list(kind)
        if len({field.name for field in fields}) < len(fields) or not all(field.nullable for field in fields):
            return f"pa.struct([{', '.join(map(_made_field, fields))}])"
        return (
            f"pa.struct({{{', '.join(f'{_quoted(field.name)}: {_made(field.type)}' for field in fields)}}})"
        )
    if pa.types.is_map(kind):
        order = ", keys_sorted=True" if kind.keys_sorted else ""
        return f"pa.map_({_made(kind.key_type)}, {_item_of(kind.item_field, 'value')}{order})"
    if isinstance(kind, _lists()):
        length = f", {kind.list_size}" if pa.types.is_fixed_size_list(kind) else ""
        name = "list_" if length or pa.types.is_list(kind) else str(kind).partition("<")[0]
        return f"pa.{name}({_item_of(kind.value_field, 'item')}{length})"
    if pa.types.is_dictionary(kind):
        order = ", ordered=True" if kind.ordered else ""
        return f"pa.dictionary({_made(kind.index_type)}, {_made(kind.value_type)}{order})"
    name = _NAMES.get(str(kind), str(kind))
    return f"pa.{name}{'_' if name == 'bool' else ''}()"


def _lists() -> tuple[type[Any], ...]:
    import pyarrow as pa

    return pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType


def _item_of(field: pa.Field, usual: str) -> str:
    """What is between the brackets of a list: the type alone, if the field is as pyarrow makes it of that."""
    return _made(field.type) if field.nullable and field.name == usual else _made_field(field)


def _made_field(field: pa.Field) -> str:
    never_null = "" if field.nullable else ", nullable=False"
    return f"pa.field({_quoted(field.name)}, {_made(field.type)}{never_null})"

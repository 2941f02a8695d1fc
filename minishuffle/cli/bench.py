"""``minishuffle bench``: measurements that anyone can run, each a ratio or a rate from one run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
from pydantic import ValidationError

from minishuffle.cli.session import (
    FileToWrite,
    FiniteRange,
    guarantee_option,
    json_option,
    late_global_options,
    print_json,
)
from minishuffle.cli.tables import byte_text
from minishuffle.cli.terminal import echo
from minishuffle.console import console, new_table
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.plan.graph import JobSettings

__all__ = ["bench"]


@click.group()
@late_global_options
def bench() -> None:
    """Measure transport, exchange, latency, quiet jobs, recovery, scale, operators, keyed state, Spark."""


def _wire_options(command: Any) -> Any:
    for option in (
        click.option("--channels", default=64, show_default=True, type=click.IntRange(1, 4096)),
        click.option("--segment-bytes", default=32_768, show_default=True, type=click.IntRange(256, 1 << 20)),
        click.option("--pairs", default=9, show_default=True, type=click.IntRange(1, 99)),
        click.option(
            "--megabytes", default=512, show_default=True, type=click.IntRange(16), help="Of one measurement."
        ),
        json_option,
        late_global_options,
    ):
        command = option(command)
    return command


_tls_option: Final = click.option(
    "--tls", is_flag=True, help="Over TLS, against bare TLS of the same event loop and against no TLS."
)


def _buffer_timeout(context: click.Context, option: click.Parameter, value: str) -> float | str:
    try:
        return JobSettings.model_validate({"buffer_timeout": value}).buffer_timeout
    except ValidationError:
        raise click.BadParameter(f"{value!r} is neither 'adaptive' nor seconds from 0 on nor -1") from None


_buffer_timeout_option: Final = click.option(
    "--buffer-timeout",
    default="adaptive",
    show_default=True,
    metavar="adaptive|SECONDS",
    callback=_buffer_timeout,
    help="When a buffer that is not full is sent: adaptive, or after so many seconds; 0: at once, -1: never.",
)


@bench.command()
@_wire_options
@_tls_option
def transport(as_json: bool, tls: bool, **options: Any) -> None:
    """Buffers from loop to loop: full protocol with credits and authentication, against sendall/recv_into."""
    _wire("transport", as_json, options, tls=tls)


@bench.command()
@_wire_options
@_tls_option
def exchange(as_json: bool, tls: bool, **options: Any) -> None:
    """The same with a writer thread that fills every byte and a reader thread that reads every byte."""
    _wire("exchange", as_json, options, tls=tls)


def _wire(kind: Any, as_json: bool, options: dict[str, Any], *, tls: bool = False) -> None:
    from minishuffle.bench.wire import measure_tls, measure_wire

    if options["segment_bytes"] % 8:
        raise UsageError("--segment-bytes must be a multiple of 8: checksums cover 64-bit words")
    measured = (measure_tls if tls else measure_wire)(kind, **options)
    if as_json:
        print_json(measured)
    elif tls:
        _show_tls(kind, measured)
    else:
        table = new_table(("what", "GB/s"), right=("GB/s",))
        ours = f"{measured['gbytes_per_second']:.2f}"
        table.add_row(f"{kind}, {measured['segment_bytes']} byte segments", ours)
        for size, rate in measured["raw_gbytes_per_second"].items():
            table.add_row(f"raw socket, blocks of {size} bytes", f"{rate:.2f}")
        console().print(table)
        ratio = measured["ratio_to_raw"]
        echo(
            f"ratio to raw at the same block size: {ratio['median']} ({ratio['min']} … {ratio['max']}, "
            f"{measured['pairs']} pairs)"
        )
    if not measured["verified"]:
        raise ShuffleError("checksums differ: what arrived is not what was sent")


def _show_tls(kind: str, measured: dict[str, Any]) -> None:
    table = new_table(("what", "GB/s"), right=("GB/s",))
    for name, what in (
        ("gbytes_per_second", f"{kind} over TLS, {measured['segment_bytes']} byte segments"),
        ("bare_echo_gbytes_per_second", "bare TLS of the event loop, an echo"),
        ("bare_stream_gbytes_per_second", "bare TLS of the event loop, one way"),
        ("plain_gbytes_per_second", f"{kind} without TLS"),
    ):
        table.add_row(what, f"{measured[name]:.2f}")
    console().print(table)
    for name, what in (
        ("ratio_to_bare_echo", "a bare echo"),
        ("ratio_to_bare_stream", "bare TLS one way"),
        ("ratio_to_plain", "no TLS"),
    ):
        ratio = measured[name]
        echo(
            f"ratio to {what}: {ratio['median']} ({ratio['min']} … {ratio['max']}, {measured['pairs']} pairs)"
        )


@bench.command()
@click.option("--format", type=click.Choice(["arrow", "rows"]), default="arrow", show_default=True)
@click.option("--record", type=click.Choice(["int", "event"]), default="int", show_default=True)
@click.option("--emit", type=click.Choice(["each", "batch"]), default="batch", show_default=True)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option("--records", type=click.IntRange(1), help="How many in all.")
@click.option("--seconds", type=FiniteRange(min=0.1), help="Or for how long.")
@click.option("--keys", default=100_000, show_default=True, type=click.IntRange(1, 5_000_000))
@guarantee_option
@_buffer_timeout_option
@json_option
@late_global_options
def keyby(as_json: bool, records: int | None, seconds: float | None, **options: Any) -> None:
    """Records per second through a keyed sum on a cluster of its own, with the result checked."""
    from minishuffle.bench.keyby import measure_keyby

    if records is None and seconds is None:
        records = 20_000_000 if options["format"] == "arrow" else 2_000_000
    if records is not None and seconds is not None:
        raise UsageError("give --records or --seconds, not both")
    measured = measure_keyby(records=records, seconds=seconds, **options)
    if as_json:
        print_json(measured)
    else:
        _show_keyby(measured)
    if not measured["verified"]:
        raise ShuffleError("the sums differ from the independent computation")


def _show_keyby(measured: dict[str, Any]) -> None:
    table = new_table(("what", "value"), right=("value",))
    table.add_row("records per second", f"{measured['records_per_second']:,}")
    table.add_row("records", f"{measured['records']:,}")
    table.add_row("seconds, first emit to last output", f"{measured['seconds']}")
    table.add_row("processor seconds of the workers", f"{measured['cpu_seconds']}")
    table.add_row("records that crossed TCP", f"{measured['remote_fraction']:.1%}")
    table.add_row("payload bytes per such record", f"{measured['remote_payload_bytes_per_record']}")
    network = measured["network_bytes"]
    memory = f"{byte_text(network['peak'])} of {byte_text(network['cap'])}"
    table.add_row("network memory, peak of cap", memory)
    table.add_row("every key's sum checked", "yes" if measured["verified"] else "NO")
    console().print(table)


@bench.command("wordcount")
@click.option("--format", type=click.Choice(["rows", "arrow"]), default="rows", show_default=True)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option("--megabytes", default=200, show_default=True, type=click.IntRange(1, 10_000), help="Of text.")
@json_option
@late_global_options
def count_words(as_json: bool, **options: Any) -> None:
    """Words per second through a count by word, of generated text, with the result checked."""
    from minishuffle.bench.words import measure_wordcount

    measured = measure_wordcount(**options)
    if as_json:
        print_json(measured)
    else:
        table = new_table(("what", "value"), right=("value",))
        for what in ("words_per_second", "words", "distinct", "seconds"):
            table.add_row(what.replace("_", " "), f"{measured[what]:,}")
        table.add_row("every word's count checked", "yes" if measured["verified"] else "NO")
        console().print(table)
    if not measured["verified"]:
        raise ShuffleError("the counts differ from those of the generator")


@bench.command()
@click.option("--rate", default=20_000.0, show_default=True, type=FiniteRange(1), help="Records/s.")
@click.option("--seconds", default=10.0, show_default=True, type=FiniteRange(min=0.1))
@guarantee_option
@_buffer_timeout_option
@json_option
@late_global_options
def latency(as_json: bool, **options: Any) -> None:
    """From a record's creation to the function behind an exchange over TCP, beside a plain echo."""
    from minishuffle.bench.latency import measure_latency

    measured = measure_latency(**options)
    if as_json:
        print_json(measured)
    else:
        table = new_table(("what", "value"), right=("value",))
        table.add_row("buffer timeout", str(measured["flush"]))
        for name in ("p50", "p90", "p99", "p999", "max"):
            table.add_row(f"latency, {name}", f"{measured[f'{name}_ms']} ms")
        table.add_row("half a round trip of a plain echo, p50", f"{measured['echo_p50_ms']} ms")
        table.add_row("records that crossed TCP", f"{measured['remote_records']:,}")
        table.add_row("records lost", f"{measured['lost']:,}")
        console().print(table)
    if measured["lost"]:
        raise ShuffleError(f"{measured['lost']} records did not arrive")


@bench.command()
@click.option(
    "--rate",
    "rates",
    default=(0, 100, 1_000, 20_000),
    show_default=True,
    multiple=True,
    type=FiniteRange(0, 1_000_000),
    help="Records/s; 0: none. May be given several times.",
)
@click.option(
    "--parallelism",
    default=(2, 8),
    show_default=True,
    multiple=True,
    type=click.IntRange(2, 64),
    help="Of the job, on half as many workers, at least two; may be given several times.",
)
@click.option("--seconds", default=12.0, show_default=True, type=FiniteRange(min=1), help="Of each job.")
@json_option
@late_global_options
def quiet(as_json: bool, rates: Sequence[float], parallelism: Sequence[int], seconds: float) -> None:
    """Processor time of coordinator and workers while a keyed job has little to do, and its latency."""
    from minishuffle.bench.quiet import measure_quiet

    points = measure_quiet(rates=rates, parallelism=parallelism, seconds=seconds)
    if as_json:
        print_json({"seconds": seconds, "points": points})
    else:
        names = list(points[0])
        heads = [name.replace("_", " ") for name in names]
        table = new_table(heads, right=heads)
        for point in points:
            table.add_row(*("-" if value is None else f"{value:g}" for value in point.values()))
        console().print(table)
    if lost := sum(point["lost"] for point in points):
        raise ShuffleError(f"{lost} records did not arrive")


@bench.command()
@click.option("--target", default=1.0, show_default=True, type=FiniteRange(min=0.01), help="Seconds.")
@click.option(
    "--produce", default=2.0, show_default=True, type=FiniteRange(0.1, 1000), help="MB/s of the producer."
)
@click.option(
    "--share",
    "shares",
    default=(10, 30, 60, 10),
    show_default=True,
    multiple=True,
    type=FiniteRange(1, 100),
    help="Percent of it that the consumer takes; may be given several times, which follow each other.",
)
@click.option("--seconds", default=60.0, show_default=True, type=FiniteRange(min=2), help="Of each share.")
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(0, 99), help="At full rate.")
@click.option(
    "--full-seconds", default=8.0, show_default=True, type=FiniteRange(min=1), help="Of a run at full rate."
)
@json_option
@late_global_options
def debloat(as_json: bool, **options: Any) -> None:
    """How old rows are when a slow consumer takes them, with buffer debloating and without."""
    from minishuffle.bench.debloat import SETTLE_SECONDS, measure_debloat

    measured = measure_debloat(**options)
    if as_json:
        print_json(measured)
    else:
        columns = ("age p50", "with", "without", "as wanted after")
        table = new_table(columns, right=columns[1:])
        for each in measured["age_p50"]:
            ages = [f"{each[name]} s" for name in ("with", "without", "settled")]
            table.add_row(f"consumer at {each['share']:g} % of the rate", *ages)
        console().print(table)
        if rates := measured["full_rate_mb_per_second"]:
            echo(
                f"at full rate: {rates['with']} MB/s with, {rates['without']} without; median ratio of "
                f"{options['pairs']} pairs: {measured['full_rate_ratio']}"
            )
    if not measured["as_wanted"]:
        raise ShuffleError(
            f"a median age is not within 0.7 to 1.3 times the target of {options['target']:g} s "
            f"{SETTLE_SECONDS:g} s after a change: raise --produce or lower --target if it is younger"
        )


@bench.command()
@click.option(
    "--flow-control",
    default="credit",
    show_default=True,
    type=click.Choice(["credit", "tcp"]),
    help="Of the job.",
)
@click.option(
    "--channels",
    default=64,
    show_default=True,
    type=click.IntRange(9, 529),
    help="Which share the connection: as many pairs send as its square root, rounded down.",
)
@click.option("--seconds", default=4.0, show_default=True, type=FiniteRange(min=1), help="Of each phase.")
@json_option
@late_global_options
def isolation(as_json: bool, flow_control: Literal["credit", "tcp"], channels: int, seconds: float) -> None:
    """What a consumer that stands still does to the others on its connection."""
    from minishuffle.bench.siblings import measure_isolation

    measured = measure_isolation(flow_control=flow_control, pairs=math.isqrt(channels), seconds=seconds)
    if as_json:
        print_json(measured)
        return
    event = measured["barrier_ms"]
    table = new_table(("what", "value"), right=("value",))
    table.add_row("flow control", measured["flow_control"])
    table.add_row("pairs, and channels of the connection", f"{measured['pairs']}, {measured['channels']}")
    table.add_row("rate of a pair", f"{byte_text(measured['pair_bytes_per_second'])}/s")
    table.add_row(
        "siblings' rate while one consumer waits, of their usual", f"{measured['sibling_ratio']:.1%}"
    )
    table.add_row(
        "events through the siblings meanwhile", f"{event:g} ms" if event is not None else "did not come"
    )
    console().print(table)


@bench.command()
@click.option(
    "--graph",
    type=click.Choice(["hop", "chain"]),
    default="hop",
    show_default=True,
    help="A source, keyed subtasks and a collector on a worker that is spared; or two sources, a join, "
    "windows and files on every worker.",
)
@guarantee_option
@click.option(
    "--failure",
    type=click.Choice(["process", "task", "stop", "host", "coordinator"]),
    default="process",
    show_default=True,
    help="A worker process is killed, a function raises, a process is stopped, its host has no network "
    "(hosts are network namespaces: as root), or the coordinator is killed.",
)
@click.option(
    "--standby",
    default=1,
    show_default=True,
    type=click.IntRange(0, 16),
    help="Standby workers; 0: free slots.",
)
@click.option("--kills", default=20, show_default=True, type=click.IntRange(1, 1000))
@click.option("--rate", type=FiniteRange(1), help="Records/s of a source.  [default: 20000; of a chain 2000]")
@click.option(
    "--svg",
    type=FileToWrite(),
    help="Draw the output during a failure, beside Flink's; with matplotlib, the extra bench.",
)
@json_option
@late_global_options
def recovery(as_json: bool, svg: Path | None, **options: Any) -> None:
    """Failures in a running job: how long what was lost is missing, and what everybody else notices."""
    from minishuffle.bench.outagechart import check_drawable, draw_outage
    from minishuffle.bench.recovery import measure_recovery

    if svg is not None:
        check_drawable(options["failure"])
    measured = measure_recovery(**options)
    if as_json:
        print_json(measured)
    else:
        _print_recovery(measured)
    if svg is not None:  # Last: what was measured is printed even if it cannot be written.
        draw_outage(measured, svg)


def _print_recovery(measured: dict[str, Any]) -> None:
    table = new_table(("what", "p50", "max"), right=("p50", "max"))
    for name, text in (
        ("outage_ms", "output of the lost subtasks is missing"),
        ("others_gap_ms", "longest silence of each other subtask"),
        ("others_gap_baseline_ms", "the same without a failure"),
    ):
        if measured[name] is not None:
            table.add_row(text, f"{measured[name]['p50']} ms", f"{measured[name]['max']} ms")
    if (caught_up := measured["caught_up_s"]) is not None:
        table.add_row("until it is no later than before", f"{caught_up['p50']} s", f"{caught_up['max']} s")
    if (age := measured["snapshot_age_s"]) is not None:
        table.add_row("age of the snapshot it goes on from", f"{age['p50']} s", f"{age['max']} s")
    for phase, times in measured["phases_ms"].items():
        table.add_row(f"from the failure to: {phase}", f"{times['p50']} ms", f"{times['max']} ms")
    console().print(table)
    for name in (
        "not_caught_up",
        "caught_up_late",
        "others_restarted",
        "dropped",
        "in_flight",
        "state_lost",
        "rows_again",
        "fallbacks",
        "lost",
        "again",
    ):
        echo(f"{name.replace('_', ' ')}: {measured[name]:,}")


@bench.command()
@json_option
@late_global_options
def scale(as_json: bool) -> None:
    """What the failover of a worker costs the coordinator of jobs of 100, 1000 and 4000 slots; no sockets."""
    from minishuffle.bench.scale import SIZES, measure_scale

    measured = measure_scale(SIZES)
    if as_json:
        print_json(measured)
        return
    names = [name for name in measured["points"][0] if name != "estimated"]
    table = new_table([name.replace("_", " ") for name in names])
    for point in measured["points"]:
        mark = " (not run)" if point["estimated"] else ""
        values = [str(point[name]) if point[name] != -1 else "-" for name in names]
        table.add_row(values[0], values[1] + mark, *values[2:])
    console().print(table)
    echo("with N slots, of which K = 4 are lost:")
    for strategy, formula in measured["formula"].items():
        echo(f"  {strategy}: {formula}")


_batch_option: Final = click.option(
    "--batch",
    "batches",
    multiple=True,
    type=click.IntRange(1, 65_536),
    help="Rows of a batch; may be given several times.  [default: 1, 16, 128, 512, 4096, 65536]",
)
_keys_option: Final = click.option(
    "--keys",
    multiple=True,
    type=click.IntRange(1, 1_000_000),
    help="Different keys; may be given several times.  [default: 1000, 50000]",
)


@bench.command()
@click.option("--operator", "names", multiple=True, help="Only this one; may be given several times.")
@_batch_option
@_keys_option
@click.option(
    "--minutes", default=12.0, show_default=True, type=FiniteRange(0.0), help="For all together, about."
)
@click.option(
    "--against",
    type=click.File(),
    help="What --json printed earlier: shows how fast operators are as a share of that, and exits with 1 if "
    "one is too slow.",
)
@json_option
@late_global_options
@click.pass_context
def operators(
    context: click.Context,
    names: tuple[str, ...],
    batches: tuple[int, ...],
    keys: tuple[int, ...],
    minutes: float,
    against: Any,
    as_json: bool,
) -> None:
    """Each operator of streams and tables by itself, in one thread: nanoseconds a row, and bytes a key."""
    from minishuffle.bench.operators import BATCHES, KEYS, compared, measure_operators

    earlier = None if against is None else _measured_earlier(against)
    measured = measure_operators(names, batches or BATCHES, keys or KEYS, seconds=60 * minutes)
    if earlier is not None:
        measured["against"] = compared(measured, earlier)
    if as_json:
        print_json(measured)
    else:
        _show_operators(measured)
    if earlier is not None and not measured["against"]["is_met"]:
        context.exit(1)


def _measured_earlier(file: Any) -> dict[str, Any]:
    try:
        found = json.load(file)
        if not found["cells"]:
            raise ValueError("no cells")
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{file.name} is no output of 'minishuffle bench operators --json': give --against another file"
        ) from None
    return dict(found)


def _show_operators(measured: dict[str, Any]) -> None:
    """The operators against an earlier measurement if there is one, else all that was measured."""
    if (against := measured.get("against")) is None:
        names = list(measured["cells"][0])
        table = new_table([name.replace("_", " ") for name in names], right=names[3:])
        for cell in measured["cells"]:
            table.add_row(*("-" if value is None else str(value) for value in cell.values()))
        console().print(table)
        return
    table = new_table(("operator", "batches of 128 rows or more", "shorter ones"))
    for line in against["operators"]:
        shown = [
            "-"
            if line[kind] is None
            else f"{line[kind]:.3f}" + ("" if line[f"{kind}_is_met"] else " too slow")
            for kind in ("long", "short")
        ]
        table.add_row(line["operator"], *shown)
    console().print(table)
    for cell in against["slow_cells"]:
        timed = "with event time" if cell["event_time"] else "without event time"
        echo(
            f"{cell['operator']} of {cell['form']} {timed}, {cell['batch']:,} rows a batch, {cell['keys']:,} "
            f"keys: {cell['ratio']:.2f}"
        )


@bench.command()
@_batch_option
@_keys_option
@click.option(
    "--minutes", default=1.0, show_default=True, type=FiniteRange(0.0), help="For all together, about."
)
@json_option
@late_global_options
def state(batches: tuple[int, ...], keys: tuple[int, ...], minutes: float, as_json: bool) -> None:
    """Each store of keyed state beside a plain dict: nanoseconds a row, and what writing and reading cost."""
    from minishuffle.bench.stores import STATE_BATCHES, STATE_KEYS, measure_state

    measured = measure_state(batches or STATE_BATCHES, keys or STATE_KEYS, seconds=60 * minutes)
    if as_json:
        print_json(measured)
        return
    names = list(measured["cells"][0]["ns_per_row"])
    table = new_table(
        ["keys", "batch", *(f"{name.replace('_', ' ')}, ns a row" for name in names)], right=["keys", "batch"]
    )
    for cell in measured["cells"]:
        spent = [f"{cell['ns_per_row'][name]} ({cell['of_dict'][name]:.2f})" for name in names]
        table.add_row(str(cell["keys"]), str(cell["batch"]), *spent)
    console().print(table)
    echo("in brackets: how fast, as a share of a dict")
    for part in measured["parts"]:
        echo(
            f"{part['keys']:,} keys in {part['store']}: {part['write_ns_per_key']} ns a key to write, "
            f"{part['read_ns_per_key']} to read, {part['bytes_per_key']} bytes"
        )


@bench.command()
@click.option(
    "--records", default=10_000_000, show_default=True, type=click.IntRange(1), help="Of four columns."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1, 99), help="Shows their medians."
)
@click.option(
    "--warm-up",
    default=3,
    show_default=True,
    type=click.IntRange(0, 99),
    help="Rounds before these, while Java compiles.",
)
@click.option("--partitions", default=2, show_default=True, type=click.IntRange(1, 64), help="Spark's tasks.")
@json_option
@late_global_options
def spark(as_json: bool, records: int, rounds: int, warm_up: int, partitions: int) -> None:
    """DataFrames into a job and back, against Spark's own noop sink and Parquet from disk."""
    from minishuffle.bench.spark import measure_spark

    measured = measure_spark(records, warm_up, rounds, partitions)
    if as_json:
        print_json(measured)
        return
    table = new_table(
        ("what", "rows per second", "of Spark's own"), right=("rows per second", "of Spark's own")
    )
    for name, text, ratio in (
        ("write", "written into a job", measured["write_to_noop"]),
        ("noop", "written to Spark's noop sink", ""),
        ("python", "handed over to a function of Python that drops them", ""),
        ("read", "read from a job's result", measured["read_to_parquet"]),
        ("parquet_read", "read from Parquet on disk", ""),
    ):
        table.add_row(text, f"{measured[f'{name}_rows_per_second']:,}", str(ratio))
    console().print(table)

"""``minishuffle trace``: the frames of one channel, decoded, as they pass."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

import click

from minishuffle.cli.completion import complete_job
from minishuffle.cli.session import FiniteRange, late_global_options, print_json, session_of
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.errors import UnknownName, UsageError
from minishuffle.wire.inquiries import AskWorkers, TracedChannel

__all__ = ["frame_line", "parsed_channel", "trace"]

Fields: TypeAlias = dict[str, Any]
CHANNEL: Final = re.compile(r"(\d{1,9})\.(\d{1,9}):(\d{1,9})\.(\d{1,9})")
LOOK_SECONDS: Final = 0.2


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option(
    "--channel",
    required=True,
    metavar="PRODUCER:CONSUMER",
    help="Both subtasks as OPERATOR.INDEX, such as 0.1:2.0; 'minishuffle dump JOB' has them.",
)
@click.option("--frames", type=click.IntRange(1), default=100, show_default=True, help="End after so many.")
@click.option(
    "--seconds", type=FiniteRange(0.1, 3600), default=10.0, show_default=True, help="End after that."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@late_global_options
@click.pass_context
def trace(context: click.Context, job: str, channel: str, frames: int, seconds: float, as_json: bool) -> None:
    """Print the frames of a channel of JOB as they pass between two workers, seen from the consumer's.

    No payload is shown. The trace goes on behind a recovery. Subtasks on one worker exchange segments without
    frames.
    """
    asked = parsed_channel(channel)
    with session_of(context).client() as client:
        for frame in _frames(client, job, asked, frames, seconds):
            if as_json:
                print_json(frame)
            else:
                echo(frame_line(frame))


def parsed_channel(text: str) -> TracedChannel:
    """``PRODUCER:CONSUMER``, each as ``OPERATOR.INDEX``.

    Raises:
        UsageError: it is something else.
    """
    match = CHANNEL.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is no channel: write PRODUCER:CONSUMER, each as OPERATOR.INDEX, for example 0.1:2.0"
        )
    producer_operator, producer, operator, index = map(int, match.groups())
    return TracedChannel(
        producer_operator=producer_operator, producer=producer, operator=operator, index=index
    )


def _frames(client: Client, job: str, channel: TracedChannel, count: int, seconds: float) -> Iterator[Fields]:
    """The next ``count`` frames, as long as the job runs, for so many seconds at most.

    Raises:
        UnknownName: there is no such channel.
        UsageError: the job has ended, or the channel is within one worker.
    """
    deadline = time.monotonic() + seconds
    left = count
    while True:
        worker = _consumer_worker(client, job, channel, began=left < count)
        if worker is None:
            return
        answered = client.ask_workers(AskWorkers(job=job, workers=[worker], trace=channel))
        found = json.loads(answered.answers.get(worker, b"{}"))
        channels = found.get("channels", [])
        if channels and all(each["local"] for each in channels):
            raise UsageError(
                f"both subtasks run on worker {worker}, and exchange segments without frames; "
                f"'minishuffle dump {job}' shows what they hold"
            )
        if found.get("left_out"):
            yield {"frame": "left_out", "count": found["left_out"]}
        for frame in found.get("frames", []):
            if not left:
                return
            left -= 1
            yield frame
        if not left or time.monotonic() > deadline:
            return
        time.sleep(LOOK_SECONDS)


def _consumer_worker(client: Client, job: str, channel: TracedChannel, *, began: bool) -> int | None:
    """Where the consumer is; None: the job has ended since the trace began."""
    info = client.job(job)
    tasks = {(task.operator, task.index): task for task in info.tasks}
    consumer = tasks.get((channel.operator, channel.index))
    if consumer is None or (channel.producer_operator, channel.producer) not in tasks:
        raise UnknownName(f"job {job} has no such channel: 'minishuffle dump {job}' lists them")
    if info.state not in ("created", "running"):
        if began:
            return None
        raise UsageError(f"job {job} is {info.state}: nothing passes its channels any more")
    return consumer.worker


def frame_line(frame: Fields) -> str:
    """A frame as text."""
    if frame["frame"] == "left_out":
        return f"… {frame['count']:,} frames passed faster than they were asked for"
    at = datetime.fromtimestamp(frame["at"]).astimezone().isoformat(timespec="microseconds")
    arrow = "->" if frame["way"] == "in" else "<-"
    rest = {name: value for name, value in frame.items() if name not in ("at", "way", "frame", "edge")}
    generation = rest.pop("generation")
    fields = ", ".join(
        f"{name.replace('_', ' ')} {'+'.join(value) if isinstance(value, list) else value}"
        for name, value in rest.items()
    )
    return f"{at} {arrow} {frame['frame']} (generation {generation}): {fields}"

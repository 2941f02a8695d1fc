"""The picture of ``bench recovery --svg``: output during a failure, beside what was measured of Flink.

Above: the output of the subtasks that were struck, and of all others, in the failure of the median outage.
Below: for how long output is missing, on one scale with Flink's.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FLINK", "FLINK_SOURCE", "check_drawable", "draw_outage"]

FLINK: Final = {"Flink 2.3, tuned": 1.04, "Flink 2.3, its defaults": 19.0}
"""Seconds without output after a worker process was killed: Flink restarts the whole job, so all output is
missing."""
FLINK_SOURCE: Final = (
    "Flink 2.3: measured beside this project, checkpoints off, the whole job restarts. "
    "Both lose rows; minishuffle counts them."
)
SECONDS: Final = 20.0
"""The length of the lower axis."""
INK, PALE, STRUCK, OTHERS = "#1f2933", "#e4e7eb", "#d64545", "#2b6cb0"
"""On white, which is drawn too, so that the picture is the same on a dark page."""
STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # Text stays text: a tenth of the bytes, and it can be searched.
    "svg.hashsalt": "minishuffle",  # Ids do not differ from run to run.
}


def check_drawable(failure: str) -> None:
    """Raises UsageError: there is no outage to be drawn, or nothing to draw it with."""
    if failure == "coordinator":
        raise UsageError("--svg draws an outage, and a lost coordinator causes none: name another --failure")
    if find_spec("matplotlib") is None:
        raise UsageError("--svg needs matplotlib, which is missing: run pip install 'minishuffle[bench]'")


def draw_outage(measured: Mapping[str, Any], file: Path) -> None:
    """Write the picture as SVG.

    Args:
        measured: what ``measure_recovery`` gives.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        pyplot.switch_backend("svg")
        drawing, (above, below) = pyplot.subplots(
            2, height_ratios=[3, 2], figsize=(8.4, 4.6), layout="constrained", facecolor="white"
        )
        try:
            _draw_output(above, measured)
            _draw_outages(below, measured)
            drawing.supxlabel(FLINK_SOURCE, fontsize=8)
            drawing.savefig(file, format="svg", metadata={"Date": None, "Title": "Output during a failure"})
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error
        finally:
            pyplot.close(drawing)


def _draw_output(axes: Axes, measured: Mapping[str, Any]) -> None:
    output = measured["output"]
    edges = [output["from_ms"] + output["step_ms"] * step for step in range(len(output["others"]) + 1)]
    lines = (("others", OTHERS, "all other subtasks"), ("struck", STRUCK, "those that were struck"))
    for name, color, text in lines:
        axes.stairs(output[name], edges, color=color, label=text, linewidth=1.5, baseline=None)
    axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 200)
    axes.set_xlabel("milliseconds from the failure on", fontsize=9)
    axes.set_ylabel("output, % of before", fontsize=9)
    axes.set_title("minishuffle: the median failure", fontsize=10, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=2, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_outages(axes: Axes, measured: Mapping[str, Any]) -> None:
    outage = measured["outage_ms"]
    median, longest = f"{outage['p50']:.0f} ms", f"{outage['max']:.0f} ms"
    ours = f"{median} (longest of {measured['kills']}: {longest}), output of what was struck"
    lanes = {"minishuffle": (outage["p50"] / 1000, ours)}
    lanes |= {name: (seconds, f"{seconds:g} s, all output") for name, seconds in FLINK.items()}
    for lane, (seconds, text) in enumerate(lanes.values()):
        axes.barh(lane, SECONDS, color=PALE, height=0.55)
        axes.barh(lane, seconds, color=STRUCK, height=0.55)
        if seconds > SECONDS / 2:  # Inside the bar, else behind it.
            axes.text(seconds - 0.2, lane, text, va="center", ha="right", color="white", fontsize=9)
        else:
            axes.text(seconds + 0.2, lane, text, va="center", fontsize=9)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, SECONDS)
    axes.set_xlabel("seconds from the failure on", fontsize=9)
    axes.set_title("How long output is missing", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)

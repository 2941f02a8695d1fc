"""The pools and channels of one vertex of a job, from the dumps of the workers that run its subtasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from rich.table import Table

from minishuffle.console import new_table

__all__ = ["channel_maps", "channel_table", "pool_maps", "pool_table"]

Fields: TypeAlias = dict[str, Any]


def pool_maps(workers: Iterable[Fields], vertex: int) -> list[Fields]:
    """The buffer pool of each input (``in``) and output (``out``) of its subtasks. Outputs that are kept on
    disk or in memory have none."""
    return [
        {"subtask": task["index"], "side": side, "edge": each["edge"], **_sizes(each["pool"])}
        for task in _subtasks(workers, vertex)
        for side, exchanges in (("in", task["gates"]), ("out", task["partitions"]))
        for each in exchanges
        if each["pool"] is not None
    ]


def channel_maps(workers: Iterable[Fields], vertex: int) -> list[Fields]:
    """The channels that its subtasks read (``in``) and write (``out``), each as its own side sees it.

    Queues, backlogs and credit are in buffers. An input knows the credit that it has announced and that the
    producer has not used, and what it has yet to announce; an output knows the credit that it holds.
    Channels within one worker have no credit, nor have those of a job with ``flow_control = "tcp"``.
    """
    found: list[Fields] = []
    for task in _subtasks(workers, vertex):
        own = f"{vertex}.{task['index']}"
        for gate in task["gates"]:
            for channel in gate["channels"]:
                credit = channel.get("credit", {})
                starved = credit.get("starved") or channel.get("tcp", {}).get("waits_for_buffer")
                found.append(
                    {
                        "channel": f"{gate['from_operator']}.{channel['producer']}:{own}",
                        "side": "in",
                        "queue": channel["queue"],
                        "backlog": None,
                        "credit": credit.get("announced"),
                        "unannounced": credit.get("unannounced"),
                        "starved": bool(starved),
                    }
                )
        for partition in task["partitions"]:
            for channel in partition["channels"]:
                found.append(
                    {
                        "channel": f"{own}:{partition['to_operator']}.{channel['consumer']}",
                        "side": "out",
                        "queue": channel["queue"],
                        "backlog": channel["backlog"],
                        "credit": channel.get("credit"),
                        "unannounced": None,
                        "starved": False,
                    }
                )
    return found


def pool_table(pools: Iterable[Fields], name: str) -> Table:
    """:func:`pool_maps` as text; ``name`` is that of the vertex."""
    table = new_table(["subtask", "pool", "in use", "size"], ("in use", "size"))
    for pool in pools:
        what = f"{pool['side']} of edge {pool['edge']}"
        table.add_row(f"{name}[{pool['subtask']}]", what, str(pool["in_use"]), str(pool["size"]))
    return table


def channel_table(channels: Iterable[Fields]) -> Table:
    """:func:`channel_maps` as text."""
    numbers = ("queue", "backlog", "credit", "unannounced")
    table = new_table(["channel", "side", *numbers, "starved"], numbers)
    for channel in channels:
        cells = ("-" if channel[number] is None else str(channel[number]) for number in numbers)
        table.add_row(channel["channel"], channel["side"], *cells, "starved" if channel["starved"] else "")
    return table


def _subtasks(workers: Iterable[Fields], vertex: int) -> Iterator[Fields]:
    """The newest attempt of each subtask, in their order."""
    newest: dict[int, Fields] = {}
    for worker in workers:
        for task in worker["tasks"]:
            index = task["index"]
            if task["operator"] == vertex and task["attempt"] >= newest.get(index, task)["attempt"]:
                newest[index] = task
    yield from (task for _, task in sorted(newest.items()))


def _sizes(pool: Fields) -> Fields:
    return {"in_use": pool["in_use"], "size": pool["size"]}

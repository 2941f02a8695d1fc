"""What a job with ``guarantee="at_least_once"`` must not contain, and what the guarantee takes.

Its tasks go on from local snapshots, which other workers hold, and their producers retain what they have sent
until such snapshots cover it. What could not be sent or read again is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from minishuffle.errors import InvalidGraph
from minishuffle.plan.graph import JobGraph, Vertex

__all__ = ["check_guarantee", "guarantee_lines", "never_cut", "never_saved", "receipted_by_cuts"]

_ALIGNING = (
    "a barrier holds one channel back while another is read, for which each channel needs buffers of its own"
)


def check_guarantee(graph: JobGraph) -> None:
    """Raises InvalidGraph if the job has a guarantee that it cannot keep; with the first reason."""
    if not graph.settings.is_guaranteed:
        return
    for reason in (*_of_settings(graph), *_of_vertices(graph), *_of_edges(graph)):
        raise InvalidGraph(f'guarantee="{graph.settings.guarantee}" cannot be kept {reason}')


def _of_settings(graph: JobGraph) -> Iterator[str]:
    settings = graph.settings
    if settings.restart_strategy == "none":
        yield 'with restart_strategy="none", since what was lost comes again by a restart: leave one out'
    if settings.on_unavailable == "drop":
        yield 'with on_unavailable="drop", which loses rows: leave it out, or use guarantee="loss"'
    if settings.source_lease is not None:
        yield (
            "with source_lease, which says how many rows may be lost: leave it out, sources go on at the "
            "positions in their snapshots"
        )
    if settings.flow_control == "tcp":
        yield f'with flow_control="tcp": {_ALIGNING}. Use flow_control="credit"'
    if settings.buffers_per_channel == 0:
        yield f"with buffers_per_channel=0: {_ALIGNING}. Use 1 or more"


def _of_vertices(graph: JobGraph) -> Iterator[str]:
    for vertex in graph.vertices:
        if vertex.acknowledges:
            yield from _of_acknowledging(graph, vertex)
        elif vertex.is_source and not (vertex.replayable or vertex.stream):
            yield (
                f"for the source of {vertex.name!r}, which does not give again what it has given (replayable "
                'is False): have it acknowledge what need not come again, or use guarantee="loss"'
            )
        if vertex.sink and vertex.bounded:
            yield (
                f"for the results that {vertex.sink!r} keeps for other programs until the job ends: they are "
                'lost with their worker. Write them with to_files, or use guarantee="loss"'
            )
        if vertex.keeps:
            yield (
                f"for the rows that the sink {vertex.keeps!r} keeps in its process: give it flush(), or "
                "prepare() and commit(prepared), or result_only = False if they are outside once write "
                "returns"
            )


def _of_acknowledging(graph: JobGraph, vertex: Vertex) -> Iterator[str]:
    """A source acknowledges what durable snapshots cover, and is read until then."""
    if vertex.bounded:
        yield (
            f"for the source of {vertex.name!r}, which may end before it has acknowledged all: set bounded = "
            'False, leave acknowledge out, or use guarantee="loss"'
        )
    if missing := never_cut(graph) or ("" if graph.settings.durable_interval else "durable_interval is 0"):
        yield (
            f"for the source of {vertex.name!r}, which acknowledges what durable snapshots cover, and there "
            f"are none: {missing}"
        )


def _of_edges(graph: JobGraph) -> Iterator[str]:
    """A blocking exchange restarts what it joins from the beginning, where that ends."""
    alone = graph.snapshotted()
    for number, edge in enumerate(graph.edges):
        if edge.kind == "blocking" and not alone.isdisjoint((edge.source, edge.target)):
            yield (
                f"for the blocking exchange {graph.exchange_name(number)}, which pipelined exchanges join "
                "with a source that has no end: leave exchange('blocking') out, or bound all sources"
            )


def never_saved(graph: JobGraph) -> str:
    """Why no savepoint of a job of this kind can be taken; empty: it can."""
    if why := never_cut(graph):
        return why
    for vertex in graph.vertices:
        if vertex.stream:
            return (
                f"other programs write to its stream {vertex.stream!r}, and what they have sent is known to "
                "this cluster alone: have the job read a source of its own"
            )
        if vertex.sink:
            return (
                f"its sink {vertex.sink!r} keeps rows for other programs, which know them by this job alone: "
                "write them with to_files, or a sink of your own"
            )
    return ""


def never_cut(graph: JobGraph) -> str:
    """Why no durable snapshot of a job of this kind can be taken; empty: it can."""
    for edge in graph.edges:
        if edge.kind == "blocking":
            where = f"{graph.vertices[edge.source].name} => {graph.vertices[edge.target].name}"
            return (
                f"a blocking exchange stores its rows outside of all tasks ({where}): leave "
                "exchange('blocking') out, or run the job again from its beginning"
            )
    return ""


def receipted_by_cuts(graph: JobGraph) -> frozenset[int]:
    """Vertices whose streams other programs write to, and get a receipt once a durable snapshot covers it.

    Not those of a stream that leads to an input which is read to its end before another: until then there is
    no durable snapshot, and that end waits for the receipts.
    """
    vertices = graph.snapshotted() if graph.settings.durable_interval and not never_cut(graph) else ()
    streams = [each for each in vertices if graph.vertices[each].stream]
    return frozenset(each for each in streams if not _is_read_first(graph, each))


def _is_read_first(graph: JobGraph, vertex: int) -> bool:
    """Whether what a vertex gives leads to an input that is read to its end before another."""
    behind = _reached(graph, vertex)
    return any(graph.is_read_first(n) for n, edge in enumerate(graph.edges) if edge.source in behind)


def _reached(graph: JobGraph, vertex: int) -> frozenset[int]:
    """The vertex, and all to which its rows lead."""
    seen, waiting = {vertex}, [vertex]
    while waiting:
        for number in graph.outputs_of(waiting.pop()):
            if (target := graph.edges[number].target) not in seen:
                seen.add(target)
                waiting.append(target)
    return frozenset(seen)


def guarantee_lines(graph: JobGraph) -> list[str]:
    """For a reader: what the guarantee of a job takes of its workers; nothing without one."""
    settings, tasks = graph.settings, graph.snapshotted()
    if not settings.is_guaranteed:
        return []
    count = sum(graph.vertices[each].parallelism for each in tasks)
    edges = sum(edge.source in tasks for edge in graph.edges)
    lines = [
        f"guarantee {settings.guarantee}: {count} tasks send a snapshot of their state to another worker "
        f"every {settings.snapshot_interval:g} s, or later where that would take more than "
        f"{settings.snapshot_cost_max:.0%} of their time",
        f"  {edges} of {len(graph.edges)} exchanges retain what was sent until snapshots cover it: what "
        "comes in two intervals, in memory and then on disk (retained_bytes of each worker)",
    ]
    if why := never_cut(graph):
        lines.append(f"  no durable snapshots, and so two workers at least: {why}")
    elif settings.durable_interval:
        lines.append(
            f"  a durable snapshot of the whole job every {settings.durable_interval:g} s, to which it goes "
            "back if a task is lost with the holder of its snapshots; on one worker there are these alone"
        )
    else:
        lines.append("  no durable snapshots (durable_interval), and so two workers at least")
    lines += _stream_lines(graph)
    if again := sorted(graph.replayed()):
        names = ", ".join(graph.vertices[each].name for each in again)
        lines.append(
            f"  no snapshots of {names}: blocking exchanges join them, and they run again as a whole"
        )
    return lines


def _stream_lines(graph: JobGraph) -> Iterator[str]:
    """When what other programs write has its receipts."""
    by_cuts = receipted_by_cuts(graph)
    for number, vertex in enumerate(graph.vertices):
        if vertex.stream and number in by_cuts:
            yield (
                f"  a partition of a write to {vertex.stream!r} ends once a durable snapshot covers it, "
                "which is begun within about a second for that"
            )
        elif vertex.stream:
            yield (
                f"  a partition of a write to {vertex.stream!r} ends once local snapshots cover it, since no "
                "durable one can be taken meanwhile: the job fails if a task is lost with the holder of its "
                "snapshots before there is one"
            )
        kept = [graph.vertices[each].sink for each in _reached(graph, number) if graph.vertices[each].sink]
        if vertex.stream and kept:
            yield (
                f"  it also waits until readers have committed what {', '.join(sorted(kept))} keeps of it: "
                "have a query read that while programs write"
            )

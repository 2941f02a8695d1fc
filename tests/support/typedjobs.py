"""Jobs whose types a checker has to find: read by mypy and pyright, and never run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, assert_type

import pyarrow as pa

from minishuffle import Aside, KeyedStream, LocalCluster, ProcessContext, Stream, Table

SHORT = timedelta(minutes=1)


class Ad(TypedDict):
    name: str
    at: datetime


class Click(TypedDict):
    ad: str
    at: datetime
    price: float


@dataclass
class Order:
    customer: str
    amount: int


NOON = datetime(2026, 1, 1, 12)
ads = Stream.items([Ad(name="tea", at=NOON)])
clicks = Stream.items(iter([Click(ad="tea", at=NOON, price=0.1)]))
orders = Stream.items([Order("ann", 1)])
by_ad = clicks.key_by(lambda click: click["ad"])


def sources() -> None:
    assert_type(ads, Stream[Ad])
    assert_type(clicks, Stream[Click])
    assert_type(orders, Stream[Order])
    assert_type(Stream.items([1, 2]), Stream[int])
    assert_type(Stream.text("moby.txt"), Stream[str])
    assert_type(Stream.generate(records=5), Stream[int])
    assert_type(Stream.generate(lambda start, count: ["a"] * count, rate=1.0), Stream[str])
    assert_type(Stream.source(Primes()), Stream[int])
    assert_type(Stream.source(Partition()), Stream[str])
    assert_type(Table.from_files("a.csv").to_rows(), Stream[dict[str, Any]])


class Primes:
    def splits(self) -> list[int]:
        return [2]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        yield [split]


class Partition:
    replayable = True

    def splits(self) -> list[str]:
        return ["orders-0"]

    def read(self, split: str, position: bytes) -> Iterator[tuple[list[str], bytes]]:
        yield [split], b"1"


async def looked_up(click: Click) -> tuple[str, int]:
    return click["ad"], 1


def cheap_or_aside(click: Click) -> Click | Aside:
    return click if click["price"] < 1 else Aside("dear", click)


def words(line: str) -> Iterator[str | Aside]:
    yield line or Aside("empty", line)


def rows() -> None:
    assert_type(clicks.map(lambda click: click["price"]), Stream[float])
    assert_type(clicks.map(cheap_or_aside, sides=["dear"]), Stream[Click])
    assert_type(clicks.filter(lambda click: click["price"] > 1), Stream[Click])
    assert_type(Stream.text("a").flat_map(str.split), Stream[str])
    assert_type(Stream.text("a").flat_map(words, sides=["empty"]), Stream[str])
    assert_type(clicks.map_async(looked_up, concurrency=2), Stream[tuple[str, int]])
    assert_type(clicks.union(clicks), Stream[Click])
    assert_type(clicks.union(ads), Stream[Click | Ad])
    assert_type(clicks.event_time(lambda click: click["at"], out_of_order=SHORT), Stream[Click])
    assert_type(clicks.partition(lambda click, count: len(click["ad"]) % count), Stream[Click])
    assert_type(clicks.rebalance().name("a").parallel(2).slot_group("b").exchange("blocking"), Stream[Click])
    assert_type(clicks.collect(), Stream[Click])
    assert_type(orders.to_table(), Table)
    assert_type(clicks.broadcast_join(ads, on={"ad": "name"}), Stream[dict[str, Any]])
    assert_type(Stream.together(clicks.collect(), orders.collect("b")), Stream[Any])


def first(value: Click, click: Click) -> Click:
    return value


def added(total: float, click: Click) -> float:
    return total + click["price"]


def keys() -> None:
    assert_type(by_ad, KeyedStream[str, Click])
    assert_type(
        clicks.key_by(lambda click: (click["ad"], click["at"])), KeyedStream[tuple[str, datetime], Click]
    )
    assert_type(clicks.key_by("ad"), KeyedStream[Any, Click])
    assert_type(clicks.key_by("ad", "at"), KeyedStream[Any, Click])
    assert_type(clicks.key_by(["ad"]), KeyedStream[Any, Click])
    assert_type(by_ad.count(), Stream[tuple[str, int]])
    assert_type(by_ad.reduce(first), Stream[tuple[str, Click]])
    assert_type(by_ad.reduce(lambda value, click: value), Stream[tuple[str, Click]])
    assert_type(by_ad.fold(float, added), Stream[tuple[str, float]])


def windows() -> None:
    hours = by_ad.window(timedelta(hours=1))
    assert_type(hours.count(), Stream[tuple[str, datetime, int]])
    assert_type(hours.reduce(first), Stream[tuple[str, datetime, Click]])
    assert_type(hours.fold(float, added), Stream[tuple[str, datetime, float]])
    assert_type(by_ad.window("month", tz="Europe/Oslo").count(), Stream[tuple[str, datetime, int]])
    sessions = by_ad.session_window(SHORT, late="side")
    assert_type(sessions.count(), Stream[tuple[str, datetime, datetime, int]])
    assert_type(sessions.reduce(first), Stream[tuple[str, datetime, datetime, Click]])
    assert_type(sessions.fold(float, added), Stream[tuple[str, datetime, datetime, float]])
    assert_type(by_ad.count_window(3).count(), Stream[tuple[str, datetime, datetime, int]])


def joins() -> None:
    shown = ads.key_by(lambda ad: ad["name"])
    assert_type(shown.join(by_ad, within=SHORT), Stream[tuple[str, Ad, Click]])
    assert_type(shown.join(by_ad, "left", SHORT), Stream[tuple[str, Ad, Click | None]])
    assert_type(shown.join(by_ad, how="right", within=SHORT), Stream[tuple[str, Ad | None, Click]])
    assert_type(shown.join(by_ad, "full", SHORT), Stream[tuple[str, Ad | None, Click | None]])
    assert_type(shown.join(by_ad, "semi", before=SHORT, after=SHORT), Stream[Ad])
    assert_type(shown.join(by_ad, "anti", SHORT, "side"), Stream[Ad])
    assert_type(shown.join(clicks.key_by("ad")), Stream[tuple[str, Ad, Click]])


def on_click(click: Click, context: ProcessContext[str]) -> Iterable[tuple[str, int] | Aside] | None:
    assert_type(context.key, str)
    return [(context.key, 1), Aside("all", click)]


def on_timer(at: datetime, context: ProcessContext[str]) -> list[datetime]:
    return [at]


def kept(click: Click, context: ProcessContext) -> None:
    context.set_timer(click["at"])


def processes() -> None:
    assert_type(by_ad.process(on_click, sides=["all"]), Stream[tuple[str, int]])
    assert_type(by_ad.process(on_click, on_timer), Stream[tuple[str, int] | datetime])
    assert_type(by_ad.process(kept, on_timer), Stream[datetime])
    assert_type(
        by_ad.process(lambda click, context: [(context.key, click["price"])]), Stream[tuple[str, float]]
    )


def sides() -> None:
    counted = by_ad.window(SHORT, late="side", allowed_lateness=SHORT).count()
    assert_type(counted.late, Stream[Any])
    assert_type(counted.panes, Stream[Any])
    late: Stream[Click] = counted.late
    assert_type(late.map(lambda click: click["ad"]), Stream[str])
    assert_type(clicks.map(cheap_or_aside, on_error="side").errors, Stream[dict[str, Any]])
    assert_type(clicks.side("dear"), Stream[Any])
    table = clicks.to_table().event_time("at").key_by("ad").window(SHORT, late="side").count()
    assert_type(table.late, Table)


def general(stream: Stream[object]) -> Stream[str]:
    """Takes streams of any rows."""
    return stream.map(repr)


def results() -> None:
    assert_type(general(clicks), Stream[str])
    with LocalCluster(workers=1) as cluster:
        assert_type(cluster.run(by_ad.count()), list[tuple[str, int]])
        assert_type(cluster.run(orders.to_table()), pa.Table)
        for ad, count in cluster.run(by_ad.count().collect()):
            assert_type(ad, str)
            assert_type(count, int)

"""Jobs that a checker has to reject: an error in each line that ends in ``# wrong``, no other. Never run."""

from __future__ import annotations

from datetime import datetime, timedelta

from minishuffle import LocalCluster, ProcessContext, Stream
from support.typedjobs import Click, ads, by_ad, clicks, orders

HOUR = timedelta(hours=1)


def rows() -> None:
    clicks.map(lambda click: click["cost"])  # wrong
    orders.map(lambda order: order.amount).filter(lambda amount: amount.customer)  # wrong
    Stream.text("moby.txt").map(lambda line: line + 1)  # wrong
    Stream.items(5)  # wrong
    Stream.generate(lambda start, count: count)  # wrong
    numbers: Stream[int] = clicks.map(lambda click: click["ad"])  # wrong
    both: Stream[Click] = clicks.union(ads)  # wrong
    clicks.union(ads, numbers, both).map(lambda row: row["ad"])  # wrong
    clicks.map_async(lambda click: click["ad"], concurrency=1)  # wrong


def appended(names: str, click: Click) -> str:
    return names + click["ad"]


def keys() -> None:
    by_ad.count().map(lambda pair: pair[0] + pair[1])  # wrong
    by_ad.reduce(lambda value, click: click["ad"])  # wrong
    by_ad.fold(int, appended)  # wrong
    clicks.key_by(1)  # wrong
    by_ad.map(lambda click: click)  # wrong
    clicks.count()  # wrong


def windows() -> None:
    by_ad.window(HOUR).count().map(lambda row: row[3])  # wrong
    by_ad.window("week").count()  # wrong
    ended: Stream[tuple[str, datetime, int]] = by_ad.session_window(HOUR).count()  # wrong
    ended.key_by(lambda row: row[2] > row[1])  # wrong


def joins() -> None:
    shown = ads.key_by(lambda ad: ad["name"])
    shown.join(by_ad, within=HOUR).map(lambda pair: pair[2]["price"])
    shown.join(by_ad, "left", within=HOUR).map(lambda pair: pair[2]["price"])  # wrong
    shown.join(by_ad, "right", within=HOUR).map(lambda pair: pair[1]["name"])  # wrong
    shown.join(by_ad, "semi", within=HOUR).map(lambda pair: pair[2])  # wrong
    shown.join(by_ad, "outer", within=HOUR)  # wrong
    shown.join(clicks.key_by(lambda click: click["price"]), within=HOUR)  # wrong
    shown.join(clicks, within=HOUR)  # wrong


def on_click(click: Click, context: ProcessContext[str]) -> list[str]:
    return [context.key + 1]  # wrong


def on_number(number: int, context: ProcessContext[str]) -> list[str]:
    return [context.key]


def processes() -> None:
    by_ad.process(on_click).map(lambda ad: ad.upper())
    by_ad.process(on_number)  # wrong
    by_ad.process(on_click, on_click)  # wrong


def results() -> None:
    with LocalCluster(workers=1) as cluster:
        for ad, count in cluster.run(by_ad.count().collect()):
            print(ad + count)  # wrong
        cluster.run([1])  # wrong

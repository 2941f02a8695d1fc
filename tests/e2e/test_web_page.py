"""The web page in Chromium, on real clusters and jobs; the last test kills the coordinator."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page, Route

from minishuffle.api.stream import Stream
from minishuffle.cli.demo import Samples, total
from minishuffle.cli.main import cli
from minishuffle.client import JobHandle
from minishuffle.config import web_token
from minishuffle.errors import ResourceExhausted
from minishuffle.examples.backpressure import backpressure
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.web.guard import WebAccess
from minishuffle.web.server import serve_coordinator_web
from support.accesses import READ_TOKEN, TOKEN, access
from support.browser import NOT_ANSWERED, Shown, chromium, shown
from support.coordinators import ScriptedCoordinator
from support.sickjobs import burning
from support.soak import SOAK
from support.waiting import until

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("wider_resources"),
]

HOST = "127.0.0.1"
JOBS = 1_000 if SOAK else 250
VERTICES = 25 if SOAK else 5
"""Of eight subtasks each."""
SUBTASKS = {"producer": "0", "consumer": "1"}
"""Those of the example of back-pressure that have rows."""
Until = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    sizes = {"slots": 8, "segment_bytes": 4096, "network_memory_bytes": 16 << 20}
    with LocalCluster(workers=2, standby=1, task_cancel_timeout=2.0, **sizes) as started:
        yield started


@pytest.fixture
def base(cluster: LocalCluster) -> str:
    return f"http://{HOST}:{cluster.web_port}/"


@contextmanager
def running(
    cluster: LocalCluster, job: Stream[Any], name: str, parallelism: int = 2, **settings: Any
) -> Iterator[JobHandle]:
    """The job, until the test is over."""
    handle = cluster.submit(job, name=name, parallelism=parallelism, settings=JobSettings(**settings))
    yield handle
    if handle.info().state in ("created", "running"):
        handle.cancel()
    handle.wait_until_over(60.0)


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def counted(rate: float = 200) -> Stream[Any]:
    return (
        Stream.generate(numbers, rate=rate).key_by(lambda number: number % 50).count(emit="batch").to_count()
    )


def level_of(page: Shown, vertex: str) -> str:
    """What the graph says of the back-pressure of a vertex."""
    return page.page.locator(".vertex", has_text=vertex).locator(".level").inner_text()


# --- what is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_an_empty_cluster(browser: Browser, base: str, width: int, scheme: Any) -> None:
    with shown(browser, base, width=width, scheme=scheme) as page:
        page.see("No jobs yet")
        page.see("alive")
        page.see("of 16 slots free", "header")
        rows = page.page.locator("tbody tr", has_text="alive").all()
        assert [row.locator("td").nth(3).inner_text() for row in rows] == ["0 / 8", "0 / 8", "–"]
        page.check()


def test_a_healthy_job(browser: Browser, cluster: LocalCluster, base: str) -> None:
    with (
        running(cluster, counted(), "healthy", latency_interval=0.05) as job,
        shown(browser, base) as page,
    ):
        page.page.get_by_role("link", name="healthy").click()
        page.page.wait_for_function(
            """() => {
                const rates = [...document.querySelectorAll(".vertex .rates")].map((each) => each.innerText);
                return rates.length === 2 && rates.every((each) => /(in|out) [1-9]/.test(each));
            }"""
        )
        # Of what others do on this machine at the same time it may have a little at first.
        graph = page.page.locator(".vertex", has_text=job.info().tasks[0].name)
        graph.locator(".level", has_text="● OK").wait_for()
        assert page.page.locator(".partitioner").all_inner_texts() == ["hash"]
        page.see("that task restarts; rows for it are dropped meanwhile")
        page.see("Nothing is wrong", "#diagnosis")
        page.page.locator(".vertex").nth(1).click()
        latencies = page.page.get_by_role("region", name="Latency of ").locator("tbody tr")
        latencies.nth(1).wait_for()
        assert re.fullmatch(r"1\s+\d+(\s+[\d.]+ m?s){4}", latencies.nth(1).inner_text())
        page.page.locator(".vertex").nth(0).click()
        assert page.page.locator(".vertex").nth(0).get_attribute("aria-pressed") == "true"
        page.see("output 0", "#vertex")
        assert page.page.locator("#vertex h2").inner_text() == job.info().tasks[0].name
        page.see("No task has failed or was lost", "#recovery")
        assert page.page.title() == f"healthy ({job.id}) · minishuffle"
        page.check()
        page.page.set_viewport_size({"width": 390, "height": 844})
        page.page.emulate_media(color_scheme="dark")
        page.check()


def test_back_pressure(browser: Browser, cluster: LocalCluster, base: str) -> None:
    job = backpressure(seconds=600.0)
    with (
        running(cluster, job, "slow", debloat_target=0.5) as handle,
        shown(browser, f"{base}#/jobs/{handle.id}") as page,
    ):
        page.page.locator(".vertex", has_text="producer").locator(".level.high").wait_for()
        assert level_of(page, "producer") == "■ HIGH"
        assert level_of(page, "consumer") == "● OK"
        assert page.page.locator("#vertex h2").inner_text() == "consumer", "the busiest is chosen"
        page.see("throttles the job", "#diagnosis")
        assert page.page.locator("#diagnosis button").inner_text().startswith("consumer[")
        page.page.locator("#diagnosis").get_by_text("Numbers").click()
        page.see("most backpressured", "#diagnosis")
        page.page.locator("#vertex td.alert", has_text="▲").first.wait_for()
        page.page.locator(
            "#vertex td", has_text=re.compile(r"buffers of .*B, .*s in flight")
        ).first.wait_for()
        page.page.get_by_text("Each channel").click()
        page.page.locator("#vertex td.alert", has_text="starved").wait_for()
        page.see("from producer[0]", "#vertex")
        page.check(faults=False)


def test_a_profile_is_drawn_as_a_flame_graph(browser: Browser, cluster: LocalCluster, base: str) -> None:
    """Of one subtask: while it computes in pure Python, there is a processor for the browser."""
    stream = Stream.generate(numbers, rate=1_000).map(burning(10_000)).to_count()
    with (
        running(cluster, stream, "slow", parallelism=1) as job,
        shown(browser, f"{base}#/jobs/{job.id}") as page,
    ):
        page.page.locator(".vertex", has_text="map").click()
        page.page.get_by_role("button", name="Profile 5 s").click()
        page.see("50 times a second", ".profile")
        burn = page.page.locator(".box.code", has_text="burn").first
        burn.wait_for()
        page.see("250 samples in", ".profile")
        assert page.page.locator(".profile tbody th").first.inner_text().endswith("burn"), "the top one"
        assert "support/sickjobs.py:" in (burn.get_attribute("aria-label") or "")
        page.page.locator(".box").first.focus()
        page.page.keyboard.press("ArrowDown")
        page.page.keyboard.press("ArrowDown")
        assert "burn" in page.page.locator(".box:focus").inner_text()
        page.page.keyboard.press("Enter")
        width = "each => each.style.width"
        assert burn.evaluate(width) == "100%"
        page.page.keyboard.press("Escape")
        page.page.wait_for_function("() => document.querySelector('.box.code').style.width !== '100%'")
        before = page.page.locator(".box").count()
        page.page.get_by_label("Show code of minishuffle").check()
        page.page.locator(".box.runtime").first.wait_for()
        assert page.page.locator(".box").count() > before
        page.check()


def measured(samples: Samples, job: str) -> list[int]:
    """What ``/metrics`` says of the one full channel's consumer and producer."""

    def of(vertex: str, name: str, **labels: str) -> int:
        named = {"pipeline_id": job, "vertex": vertex, **labels}
        return int(total(samples, f"minishuffle_{name}", subtask=SUBTASKS[vertex], **named))

    return [
        of("consumer", "channels_starved"),
        of("consumer", "input_queue_buffers"),
        *(of("consumer", "input_buffers", kind=kind) for kind in ("exclusive", "floating")),
        *(of("consumer", "input_buffers_capacity", kind=kind) for kind in ("exclusive", "floating")),
        of("consumer", "input_credits", state="announced"),
        of("producer", "output_backlog_buffers"),
        of("producer", "output_pool_buffers"),
        of("producer", "output_pool_buffers_capacity"),
    ]


def on_the_page(page: Page, vertex: str) -> list[str]:
    page.locator(".vertex", has_text=vertex).click()
    rows = page.get_by_role("region", name=f"Pools and channels of {vertex}").locator("tbody tr")
    row = rows.nth(int(SUBTASKS[vertex]))
    row.wait_for()
    return row.locator("td").all_inner_texts()


def in_top(flags: list[str], job: str, vertex: str) -> tuple[dict[str, Any], dict[str, Any]]:
    ran = CliRunner().invoke(cli, [*flags, "top", job, "--vertex", vertex, "--once", "--json"])
    assert ran.exit_code == 0, ran.output
    (found,) = json.loads(ran.stdout)["jobs"]
    (pool,) = [each for each in found["pools"] if each["subtask"] == int(SUBTASKS[vertex])]
    (channel,) = [each for each in found["channels"] if each["channel"] == "0.0:1.1"]
    assert [each["level"] for each in found["vertices"]] == ["HIGH", "OK"]
    return pool, channel


def test_what_is_shown_at_rest_is_the_same_in_top_and_in_metrics(
    browser: Browser, cluster: LocalCluster, base: str, watch: Callable[..., Any], wait_until: Until
) -> None:
    """The consumer has stopped for an hour, and everything in between is full."""
    seen = watch(cluster)
    with (
        running(cluster, backpressure(seconds=0.3, pause=3600.0), "stopped") as job,
        shown(browser, f"{base}#/jobs/{job.id}") as page,
    ):

        def at_rest() -> bool:
            before = measured(seen.samples(), job.id)
            return before[0] == 1 and before[-2] == before[-1] and before == measured(seen.samples(), job.id)

        def shown_at_rest() -> list[list[int]] | None:
            """The page shows a worker's report, which is up to an interval older than its metrics."""
            shares = (*on_the_page(page.page, "consumer")[1:7], *on_the_page(page.page, "producer")[-2:])
            found = [[int(number) for number in re.findall(r"\d+", text)] for text in shares[1:]]
            starved, queue, exclusive, floating, *rest = found
            buffers = [exclusive[0], floating[0], exclusive[1], floating[1]]
            flat = [*starved, *queue, *buffers, *(number for each in rest for number in each)]
            return found if flat == measured(seen.samples(), job.id) else None

        wait_until(at_rest, "full buffers")
        page.page.locator(".vertex", has_text="producer").locator(".level.high").wait_for()
        _, queue, exclusive, floating, credit, backlog, pool = wait_until(shown_at_rest, "them on the page")
        pool_in, channel_in = in_top(seen.flags, job.id, "consumer")
        pool_out, channel_out = in_top(seen.flags, job.id, "producer")
        assert channel_in["starved"] and channel_in["queue"] == queue[0]
        assert channel_in["credit"] == channel_out["credit"] == credit[0] == 0
        assert channel_out["backlog"] == backlog[0] > 0
        assert [pool_out["in_use"], pool_out["size"]] == pool
        assert pool_in["in_use"] == exclusive[0] + floating[0]


def test_a_killed_worker(browser: Browser, cluster: LocalCluster, base: str, wait_until: Until) -> None:
    with running(cluster, counted(), "hurt", 4) as job, shown(browser, f"{base}#/jobs/{job.id}") as page:
        page.page.locator(".vertex .level").first.wait_for()
        tasks = wait_until(
            lambda: all(task.state == "running" for task in job.info().tasks) and job.info().tasks, "the job"
        )
        victim = tasks[-1].worker
        lost = sum(task.worker == victim for task in tasks)
        cluster.kill_worker(victim)
        page.see(f"worker {victim} lost: {lost} tasks", "#recovery")
        page.page.locator("#recovery h3", has_text="again after").wait_for()
        page.page.locator("#recovery dd", has_text=f"{lost} lost").wait_for()
        rows = page.page.locator("#recovery tbody tr")
        assert rows.count() == lost
        assert re.search(rf"{victim} → \d", rows.first.inner_text())
        page.check()
        page.page.get_by_role("link", name="Jobs").click()
        page.page.get_by_role("cell", name=str(lost), exact=True).first.wait_for()
        page.check(faults=False)


HOUR = 3_600_000_000
BAD = 500
"""Of so many numbers one is bad."""


def readings() -> Stream[Any]:
    """With event times of an hour ago; some become dead letters, some are printed."""

    def reading(number: int) -> str:
        if number % BAD == 0:
            raise ValueError(f"<b>{number}</b> is a round number")
        return f"reading {number}"

    stream = Stream.generate(numbers, rate=1_000).event_time(lambda _: int(time.time() * 1e6) - HOUR)
    texts = stream.map(reading, on_error="dead_letter").filter(lambda text: text.endswith("99"))
    return texts.rebalance().map(str.upper).print()


def test_watermarks_log_and_settings(browser: Browser, cluster: LocalCluster, base: str) -> None:
    with (
        running(cluster, readings(), "logged", buffer_timeout=0.0) as job,
        shown(browser, f"{base}#/jobs/{job.id}") as page,
    ):
        page.see("1 h 0 min behind now", "#vertex dd")
        page.page.get_by_role("region", name="Subtasks of").locator("time").nth(1).wait_for()
        log = page.page.locator("#log")
        log.locator("li", has_text="READING 1999").wait_for()
        letter = log.locator("li", has_text="<b>1000</b> is a round number")
        letter.wait_for()
        assert letter.inner_text().startswith("▲ dead letter map: ValueError")
        page.see("dead letters", "#log .note")
        log.get_by_label("Dead letters only").check()
        letter.wait_for()
        assert log.locator("li", has_text="READING").count() == 0
        log.get_by_label("Find in the log").fill("no such line")
        page.see("No line matches", "#log")
        log.get_by_label("Dead letters only").uncheck()
        log.get_by_label("Find in the log").fill("reading 2099")
        log.locator("li", has_text="READING 2099").wait_for()
        assert log.locator("li").count() == 1
        settings = page.page.locator("#settings")
        given = settings.locator("table").first.locator("tbody tr")
        assert given.all_inner_texts() == ["buffer_timeout\t0.0\tadaptive"]
        settings.get_by_text("The others, which are the defaults").click()
        page.see("on_unavailable", "#settings")
        page.check()
        page.page.set_viewport_size({"width": 390, "height": 844})
        page.page.emulate_media(color_scheme="dark")
        page.check()


def test_rows_of_an_edge_are_shown_with_the_token_alone(
    browser: Browser, cluster: LocalCluster, base: str
) -> None:
    """First rows that are Python objects, then columns."""
    schema = pa.schema([("price", pa.int64()), ("text", pa.string())])
    stream = Stream.generate(numbers, rate=50).event_time(lambda number: number * 1_000_000)
    texts = stream.map(lambda number: {"price": number, "text": f"<b>{number}</b> " + "long " * 40})
    table = texts.rebalance().map(dict).to_table(schema)
    job = table.key_by("price").window(timedelta(seconds=10)).count().to_count()
    with running(cluster, job, "tapped") as handle, shown(browser, f"{base}#/jobs/{handle.id}") as page:
        page.page.locator(".vertex .level").nth(2).wait_for()
        page.page.locator(".vertex").nth(0).click()
        vertex = page.page.locator("#vertex")
        vertex.get_by_role("button", name="Show rows").click()
        dialog = page.page.locator("dialog[open]")
        for token in ("wrong", web_token((cluster.state_dir / "secret").read_bytes().strip())):
            dialog.get_by_label("Token").fill(token)
            dialog.get_by_role("button", name="Show rows").click()
            if token == "wrong":
                page.see("that is not the cluster's token", "dialog[open]")
                assert page.faults() == []
        sample = page.page.get_by_role("region", name="Rows from").locator("tbody tr")
        sample.nth(19).wait_for()
        assert sample.count() == 20
        assert [line for line in page.console if NOT_ANSWERED not in line] == []
        page.console.clear()
        page.see("the next 20 rows", "#vertex")
        assert re.search(r"\t\d\t\d\t1 Jan 1970, .*\t{'price': \d+, 'text': '<b>", sample.first.inner_text())
        page.check()
        page.page.locator(".vertex").nth(1).click()
        vertex.get_by_role("button", name="Show rows").click()
        header = page.page.get_by_role("region", name="Rows from").locator("thead th")
        header.get_by_text("price").wait_for()
        assert sample.first.inner_text().split("\t")[-1].isdecimal()
        page.page.set_viewport_size({"width": 390, "height": 844})
        page.page.emulate_media(color_scheme="dark")
        page.check()


def test_many_subtasks_and_lines(browser: Browser) -> None:
    """The log of a job of a thousand tasks, of which the coordinator keeps the end."""
    coordinator = ScriptedCoordinator(slots=500)
    job = coordinator.submit("wide", 500)
    coordinator.log(job, [f"line {number} {'x' * 90}" for number in range(30_000)])
    with served(coordinator) as url, shown(browser, f"{url}#/jobs/{job}") as page:
        log = page.page.locator("#log")
        log.locator("li", has_text="line 29999").wait_for()
        assert log.locator("li").count() == 300
        page.see("the last 300 of", "#log")
        log.get_by_label("Find in the log").fill("line 1234")
        log.locator("li", has_text="line 12345").wait_for()
        coordinator.log(job, ["line 12340 again"])
        log.locator("li", has_text="line 12340 again").wait_for()
        assert page.page.locator("#vertex table").first.locator("tbody tr").count() == 500
        page.check(faults=False)


def test_many_subtasks(browser: Browser, cluster: LocalCluster, base: str) -> None:
    stream = Stream.generate(numbers, rate=20)
    for _ in range(VERTICES - 1):
        stream = stream.rebalance().map(lambda number: number)
    with (
        running(cluster, stream.to_count(), "wide", 8) as job,
        shown(browser, f"{base}#/jobs/{job.id}") as page,
    ):
        page.page.locator(".vertex .level").nth(VERTICES - 1).wait_for()
        assert page.page.locator(".vertex").count() == VERTICES
        assert len(job.info().tasks) == 8 * VERTICES
        assert page.page.locator("#vertex table").first.locator("tbody tr").count() == 8
        page.check(faults=False)
        page.page.set_viewport_size({"width": 390, "height": 844})
        page.check(faults=False)


@contextmanager
def served(source: ScriptedCoordinator, wants: WebAccess | None = None) -> Iterator[str]:
    """The web server of such a coordinator, on an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()

    async def end() -> None:
        """A diagnosis may be between its looks."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def run() -> None:
        loop.run_forever()
        loop.run_until_complete(end())

    thread = threading.Thread(target=run, name="web")
    thread.start()
    try:
        starting = asyncio.run_coroutine_threadsafe(serve_coordinator_web(source, 0, wants or access()), loop)
        server = starting.result(20.0)
        try:
            yield f"http://{HOST}:{server.port}/"
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(20.0)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20.0)
        loop.close()


def test_many_jobs(browser: Browser) -> None:
    """The coordinator's own machine, with a worker that does nothing: a real one would run 2,000 threads."""
    coordinator = ScriptedCoordinator(slots=JOBS)
    for number in range(JOBS):
        coordinator.submit(f"counts of shop {number}", starts=False)
    with served(coordinator) as url, shown(browser, url) as page:
        page.see(f"{JOBS:,} running, 0 ended")
        assert page.page.locator("tbody tr", has_text="shop").count() == 100
        page.page.get_by_role("button", name=f"Show {JOBS - 100} more of {JOBS:,}").click()
        assert page.page.locator("tbody tr", has_text="shop").count() == JOBS
        page.page.get_by_label("Find a job").fill("shop 17")
        page.page.get_by_role("link", name="counts of shop 177", exact=True).wait_for()
        page.page.wait_for_function("() => document.querySelectorAll('tbody th.wide').length === 11")
        page.check()


# --- who may do what -------------------------------------------------------------------------------


def test_a_job_is_cancelled_with_the_token_alone(browser: Browser, cluster: LocalCluster, base: str) -> None:
    with running(cluster, counted(), "short") as job, shown(browser, f"{base}#/jobs/{job.id}") as page:
        page.page.get_by_role("button", name="Cancel job").click()
        dialog = page.page.locator("dialog[open]")
        dialog.get_by_label("Token").fill("wrong")
        dialog.get_by_role("button", name="Cancel job").click()
        page.see("that is not the cluster's token", "dialog[open]")
        assert page.faults() == []
        assert job.info().state == "running"
        dialog.get_by_label("Token").fill(web_token((cluster.state_dir / "secret").read_bytes().strip()))
        dialog.get_by_role("button", name="Cancel job").click()
        page.page.locator(".title .state", has_text="canceled").wait_for()
        assert job.info().state == "canceled"
        assert [line for line in page.console if NOT_ANSWERED not in line] == []


def give_token(page: Shown, token: str) -> None:
    page.page.get_by_label("Token").fill(token)
    page.page.get_by_role("button", name="Show the cluster").click()


def test_what_comes_late_for_one_token_says_nothing_of_the_next(browser: Browser) -> None:
    coordinator = ScriptedCoordinator()
    coordinator.submit("far away")
    held: list[Route] = []

    def holds_one() -> bool:
        """A look at the page has what came from it handled."""
        return page.page.evaluate("() => true") and len(held) == 1

    with served(coordinator, access(reads_are_open=False)) as url, shown(browser, url) as page:
        page.page.evaluate("() => { AbortSignal.timeout = () => new AbortController().signal }")
        give_token(page, "wrong")
        page.see("That is not the cluster's token.")
        page.page.route("**/api/v1/cluster", lambda route: held.append(route))
        until(holds_one, "a request with the wrong token")
        give_token(page, TOKEN)
        held.pop().continue_()
        until(holds_one, "the next one, behind the answer")
        held.pop().continue_()
        page.page.unroute("**/api/v1/cluster")
        page.see("far away")


@pytest.mark.parametrize("right", [TOKEN, READ_TOKEN])
def test_a_page_of_a_guarded_cluster_asks_for_a_token_once(browser: Browser, right: str) -> None:
    coordinator = ScriptedCoordinator()
    coordinator.submit("far away")
    wants = access(reads_are_open=False)
    with served(coordinator, wants) as url, shown(browser, url) as page:
        page.see("This cluster shows itself to those who have its token")
        assert page.faults() == []
        for token, then in (("wrong", "That is not the cluster's token."), (right, "far away")):
            give_token(page, token)
            page.see(then)
        assert page.overflow() == (0, 0)
        page.page.reload()
        page.see("far away")
        assert page.page.evaluate("sessionStorage.length") == 1
        assert page.page.evaluate("localStorage.length") == 0
        assert [line for line in page.console if NOT_ANSWERED not in line] == []


def test_pages_of_another_origin_get_nothing(browser: Browser, cluster: LocalCluster, base: str) -> None:
    worker = cluster.status().workers[0]
    token = web_token((cluster.state_dir / "secret").read_bytes().strip())
    with (
        running(cluster, counted(), "ours") as job,
        shown(browser, f"http://localhost:{worker.metrics_port}/metrics") as page,
    ):
        answers: list[int] = []
        page.page.on("response", lambda response: answers.append(response.status))
        ask = """async ([url, options]) => {
            try { return (await fetch(url, options)).type; } catch (error) { return error.name; }
        }"""
        cancel = f"{base}api/v1/jobs/{job.id}/cancel"
        bearer = {"Authorization": f"Bearer {token}"}
        assert page.page.evaluate(ask, [f"{base}api/v1/jobs", {}]) == "TypeError"
        assert page.page.evaluate(ask, [f"{base}api/v1/jobs", {"mode": "no-cors"}]) == "opaque"
        assert page.page.evaluate(ask, [cancel, {"method": "POST", "mode": "no-cors"}]) == "opaque"
        assert page.page.evaluate(ask, [cancel, {"method": "POST", "headers": bearer}]) == "TypeError"
        assert answers
        assert set(answers) <= {403, 405}
        assert job.info().state == "running"
        page.page.goto(base.replace(HOST, "localhost"))
        page.see("ours")


def test_a_journal_that_cannot_be_written_is_shown(
    browser: Browser, cluster: LocalCluster, base: str
) -> None:
    pid = cluster.status().pid
    with shown(browser, base) as page:
        page.page.locator(".summary").wait_for()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(ResourceExhausted):
                cluster.client.submit(counted(), parallelism=1)
            gone = page.page.locator(".gone")
            gone.wait_for()
            assert "restarts wait, until it can be written: the journal" in gone.inner_text()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        gone.wait_for(state="detached")


def test_a_coordinator_that_is_gone_and_comes_back(
    browser: Browser, cluster: LocalCluster, base: str
) -> None:
    with running(cluster, counted(), "lasting") as job, shown(browser, f"{base}#/jobs/{job.id}") as page:
        page.page.locator(".vertex .level").first.wait_for()
        gone = page.page.locator(".gone")
        cluster.kill_coordinator()
        gone.filter(has_text="does not answer since").wait_for()
        assert page.page.locator("h1").inner_text() == "lasting", "what was known stays"
        gone.wait_for(state="detached")
        page.page.locator(".summary", has_text="term 2").wait_for()
        page.page.locator(".vertex .level").first.wait_for()
        assert page.overflow() == (0, 0)
        assert [line for line in page.console if NOT_ANSWERED not in line] == []


# --- how soon --------------------------------------------------------------------------------------


@pytest.mark.alone
def test_the_page_is_there_and_shows_a_kill_within_a_second(
    browser: Browser, cluster: LocalCluster, base: str
) -> None:
    with running(cluster, counted(), "timed") as job, shown(browser, f"{base}#/jobs/{job.id}") as page:
        page.page.locator(".vertex .level").first.wait_for()
        paint = page.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert paint < 1_000, "milliseconds"
        page.page.evaluate(
            """() => new MutationObserver((_, watch) => {
                if (document.querySelector("#recovery .recovery") === null) return;
                window.seenAt = Date.now() / 1000;
                watch.disconnect();
            }).observe(document.body, { subtree: true, childList: true })"""
        )
        killed = time.time()
        cluster.kill_worker(job.info().tasks[0].worker)
        page.page.wait_for_function("() => window.seenAt !== undefined")
        seen: float = page.page.evaluate("window.seenAt")
        print(f"first paint after {paint:.0f} ms, the kill shown after {1000 * (seen - killed):.0f} ms")
        assert seen - killed < 1.0

"""What holds for every test: nothing may be left behind, and how hard Hypothesis looks.

A test that leaves a thread, a file descriptor, a child process or an asyncio task behind ends in an
error. The look before comes after fixtures of a wider scope are set up, so a cluster that a module
shares is no leak; what such a fixture opens later, while a test runs, is left out by naming it with
``@pytest.mark.usefixtures("wider_resources")``. Threads of C libraries (pyarrow's pools, jemalloc)
are not Python threads and are not seen.

``MINISHUFFLE_SOAK=1`` looks for many more examples, ``CI`` makes every run the same.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import uvloop
from hypothesis import HealthCheck, settings
from pyarrow import csv
from xdist.remote import Producer

from minishuffle import launch
from support import extras, fatal, forked
from support.sidebyside import SideBySide, shares_spark
from support.soak import SOAK

SETTLE_SECONDS_MAX = 2.0
"""How long a thread, a process or a socket that is ending may take after its test."""
SETTLE_STEP_SECONDS = 0.01
LOOP_TURNS_MAX = 50

EXAMPLES, SOAK_EXAMPLES = 50, 2000
# No deadlines: on a busy machine any example may be slow.
settings.register_profile("default", deadline=None, max_examples=EXAMPLES)
settings.register_profile(
    "ci", deadline=None, max_examples=EXAMPLES, derandomize=True, database=None, print_blob=True
)
settings.register_profile(
    "soak", deadline=None, max_examples=SOAK_EXAMPLES, suppress_health_check=[HealthCheck.too_slow]
)


def hypothesis_profile() -> str:
    if os.environ.get("MINISHUFFLE_SOAK") == "1":
        return "soak"
    return "ci" if os.environ.get("CI") else "default"


settings.load_profile(hypothesis_profile())

# The JVMs of Spark live for seconds here: what the second compiler does for them comes too late, and to
# verify the classes of Spark takes more than a second of each.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
FOR_EXECUTORS = f"'-Dspark.executor.defaultJavaOptions={SHORT_LIVED}'"
os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{SHORT_LIVED} {FOR_EXECUTORS}")

# Two tests, JVMs and browsers share two processors, of which each worker has one: nobody is to be suspected
# for that, and rows of endless jobs to be dropped. Tests of suspicion say themselves how long they wait.
os.environ.setdefault("MINISHUFFLE_SUSPECT_AFTER", "2.0")

launch.Popen = forked.started  # type: ignore[assignment, misc]

# libuv opens a signal pipe for the whole process at its first loop, and pyarrow one when it first reads a
# whole CSV file: no test leaks those.
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first_loop:
    first_loop.run(asyncio.sleep(0))
csv.read_csv(pa.BufferReader(b"a\n1\n"))


OWN_JVM = {"new_jvm", "own_jvm"}


def import_share(session: pytest.Session) -> None:
    """Import those test files that no other process of the run begins with. All of them import all files
    then, but what pytest makes of a file's assertions, in a new clone more than half of the time until the
    first test, is made once and read by the others."""
    of: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if of is None:
        return
    folders = [session.config.rootpath / argument for argument in session.config.args]
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    for file in files[int(of["workerid"].removeprefix("gw")) :: of["workercount"]]:
        try:
            assert pytest.Module.from_parent(session, path=file).obj
        except Exception:  # Told when that file is collected, as if for the first time.
            name = ".".join(file.relative_to(session.config.rootpath).with_suffix("").parts)
            sys.modules.pop(name, None)


@dataclass(frozen=True)
class Held:
    """What a process holds: descriptions of threads, file descriptors and child processes, by identity."""

    threads: dict[int | None, str]
    descriptors: dict[tuple[int, str], str]
    children: dict[tuple[int, float], str]

    @classmethod
    def now(cls) -> Held:
        threads = {thread.ident: f"thread {thread.name!r}" for thread in threading.enumerate()}
        return cls(threads, open_descriptors(), child_processes())

    def beyond(self, before: Held) -> list[str]:
        """Descriptions of what is held now and was not before."""
        return [
            *(text for key, text in self.threads.items() if key not in before.threads),
            *(text for key, text in self.descriptors.items() if key not in before.descriptors),
            *(text for key, text in self.children.items() if key not in before.children),
        ]


def open_descriptors() -> dict[tuple[int, str], str]:
    """By number and target: a number that was closed and opened anew is another descriptor."""
    found = {}
    shared = forked.template_descriptors()
    for name in os.listdir("/proc/self/fd"):
        if int(name) in shared:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # The directory's own.
            continue
        found[int(name), target] = f"file descriptor {name} ({target})"
    return found


def child_processes() -> dict[tuple[int, float], str]:
    """By number and start. The kernel lists each thread's; psutil looks at all processes of the machine. What
    templates have forked is ours."""
    found = {}
    templates = forked.template_processes()
    threads = [f"/proc/self/task/{thread}" for thread in os.listdir("/proc/self/task")]
    for thread in [*threads, *(f"/proc/{pid}/task/{pid}" for pid in templates)]:
        try:
            with open(f"{thread}/children", "rb") as file:
                numbers = file.read().split()
        except (FileNotFoundError, ProcessLookupError):  # The thread has ended.
            continue
        for number in map(int, numbers):
            if number in templates:
                continue
            try:
                child = psutil.Process(number)
                found[number, child.create_time()] = f"process {number} ({child.name()})"
            except psutil.NoSuchProcess:
                continue
    return found


class Looks:
    """What this process held when it was looked at last, as long as that is what the next test finds: no
    fixture of a wider scope was set up or taken down since. A look takes a sixth of an empty test."""

    def __init__(self) -> None:
        self._last: Held | None = None

    def before(self) -> Held:
        return self._last or Held.now()

    def forget(self) -> None:
        self._last = None

    def left_behind(self, before: Held) -> list[str]:
        """What is still there once everything that is about to end has had time to."""
        self._last = now = Held.now()
        if not (leaked := now.beyond(before)):
            return []
        self.forget()
        gc.collect()
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while (leaked := Held.now().beyond(before)) and time.monotonic() < deadline:
            time.sleep(SETTLE_STEP_SECONDS)
            gc.collect()  # a thread that has just ended may have left a cycle
        return leaked


looks = Looks()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write what the machines do now into the transcripts, and into the journal of this format"
    parser.addoption("--rewrite-transcripts", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    fatal.register(config)
    extras.register(config)
    # Cleanups run in reverse: after the one that closes the shared cluster, which would start its processes
    # again, from new templates.
    config.add_cleanup(forked.end_templates)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return extras.stand_in(module_path, parent)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for the soak alone, and puts first what takes longest: of several processes none has
    a long part left when the others are done. That is what shares a session of Spark, and in it what begins
    with a new one; then files with slow tests."""
    extras.mark_by_fixture(items)
    for_soak = [item for item in items if item.get_closest_marker("soak")]
    if for_soak and not SOAK:
        config.hook.pytest_deselected(items=for_soak)
        items[:] = [item for item in items if item not in set(for_soak)]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    own = {item.path for item in items if not OWN_JVM.isdisjoint(getattr(item, "fixturenames", ()))}
    spark = {item.path for item in items if shares_spark(item.nodeid.partition("::")[0])}
    items.sort(key=lambda item: (item.path not in spark, item.path not in own, item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide | None:
    """What ``--dist loadfile`` means here."""
    return SideBySide(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected lives to the end of the run: nothing of it is garbage to be looked for."""
    gc.disable()
    import_share(session)
    found = yield
    gc.enable()
    gc.freeze()  # Each collection takes 300 ms otherwise, and so would one before this.
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        looks.forget()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        looks.forget()


@pytest.fixture(scope="module")
def own_imports() -> Iterator[None]:
    """Processes of clusters import for themselves, as they do for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minishuffle.launch.Popen", subprocess.Popen)
        yield


@pytest.fixture
def wider_resources() -> None:
    """Says that a fixture of a wider scope opens what this test leaves open."""


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before every other fixture of the test, its event loop too, and torn down after them."""
    before = looks.before()
    yield
    if "wider_resources" in request.fixturenames:
        looks.forget()
        return
    if leaked := looks.left_behind(before):
        pytest.fail(f"the test left behind: {'; '.join(leaked)}", pytrace=False)


@pytest.fixture(autouse=True)
def tasks_watched(request: pytest.FixtureRequest, nothing_left_behind: None) -> None:
    """Asks for the event loop of tests that are coroutines, and of no other."""
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("no_task_left_behind")


@pytest.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    """For tests that are coroutines: ends after their other fixtures, before their loop is closed."""
    before = asyncio.all_tasks()
    yield
    for _ in range(LOOP_TURNS_MAX):
        leaked = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not leaked:
            return
        await asyncio.sleep(0)
    names = sorted(f"{task.get_name()} ({task.get_coro()!r})" for task in leaked)
    pytest.fail(f"the test left behind: task {'; task '.join(names)}", pytrace=False)


@pytest.fixture
def one_processor(worker_id: str) -> Iterator[None]:
    """For tests whose threads take turns: a third faster if none of them has to wake another processor."""
    allowed = os.sched_getaffinity(0)
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """A runner of coroutines, once on asyncio's own loop and once on uvloop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


@pytest.fixture(scope="session")
def repository() -> Path:
    """The top level of the checkout."""
    return Path(__file__).resolve().parents[1]

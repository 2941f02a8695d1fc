"""The house's rules as tests: layers, who may touch clocks and sockets, sizes, banned calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from support.sources import PACKAGE, RECIPES, TESTS, Module, modules, none_of, part_of

FUNCTION_LINES_MAX = 60


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYERS = (
    names("errors limits backoff clock config console ids counters releases"),
    names("wire"),
    names("protocol"),
    names("transport"),
    names("kernels"),
    names("exchange"),
    names("operators"),
    names("snapshots"),
    names("connectors"),
    names("plan"),
    names("runtime"),
    names("api"),
    names("worker coordinator"),
    names("observe"),
    names("web"),
    names("remote"),
    names("authority client launch local notebook postmortem replacements supervision testing __init__"),
    names("spark"),
    names("bench examples"),  # Built with the public names, two rows above.
    names("pipelines"),
    names("cli"),
    names("__main__"),
)
"""From the bottom up: a file imports only from a row below its own, or from its own package."""
OBSERVE = 13
"""Everything below this row is sans-IO but for the files that follow."""

MAY_BLOCK = frozenset(
    {
        "api/firstrows.py",
        "kernels/machinecode.py",
        "transport/tcp.py",
        "transport/control.py",
        "transport/tls.py",
        "transport/hostlook.py",
        "transport/interfaces.py",
        "runtime/asynccalls.py",
        "worker/tasks/busytime.py",
        "worker/diskthreads.py",
        "worker/sources/leases.py",
        "worker/tasks/handoff.py",
        "worker/tasks/programcache.py",
        "worker/channels/probing.py",
        "worker/introspection/profiling.py",
        "worker/tasks/snapshotholder.py",
        "worker/tasks/task.py",
        "worker/process.py",
        "worker/wallclock.py",
        "worker/registration.py",
        "worker/service.py",
        "worker/external/clients.py",
        "worker/coordinatorlink.py",
        "coordinator/process.py",
        "coordinator/snapshotfolders.py",
    }
)
CLOCKS_AND_SOCKETS = names(
    "asyncio _thread concurrent multiprocessing queue sched select selectors signal socket "
    "socketserver subprocess threading time uvloop"
)
MAY_CLOUDPICKLE = frozenset(
    {
        "plan/pickling.py",
        "worker/tasks/task.py",
        "worker/tasks/programcache.py",
        "cli/loading.py",
        "bench/operators.py",
    }
)
"""Where the functions of a job are packed, opened, and found: never where its records go."""
PICKLES = names("pickle _pickle dill marshal shelve")

BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|common)(_|$)")
BANNED_CLASSES = re.compile(r"(Manager|Factory|Impl)$")
MAY_SLEEP = {
    "remote/conftest.py": "taken wait",
    "conftest.py": "left_behind",
    "deploy/test_watched.py": "slow stuck greedy",
    "e2e/test_consumed.py": "write _still",
    "e2e/test_isolation.py": "write watch_heartbeats",
    "e2e/test_tcp_flow_control.py": "hardly sent_on slow",
    "support/sickjobs.py": "write slow",
    "spark/test_source.py": (
        "wait kill_once test_a_job_that_takes_nothing_pauses_the_write_and_spark_holds_no_more_for_it"
    ),
}
"""By file, beside those called ``until``: functions that look again until something has happened or a
limit is over, and user functions that are slow on purpose. A test never sleeps to give something time to
happen."""


def layer(module: Module) -> int:
    return next((row for row, parts in enumerate(LAYERS) if module.part in parts), -1)


# --- layers ----------------------------------------------------------------------------------------


def layer_problems(module: Module) -> Iterator[str]:
    for line, imported in module.imports():
        inside = imported.removeprefix("minishuffle.")
        part = part_of(f"{inside}.".replace(".", "/")) if inside != imported else ""
        if not part or part == module.part:
            continue
        target = Module(part, "", ast.Module([], []))
        same_package = "/" not in module.name and layer(target) == layer(module)
        if layer(target) >= layer(module) and not same_package:
            yield f"{module.name}:{line} imports {imported}, which is not below {module.part}"


def test_every_part_has_its_layer() -> None:
    none_of([f"{module.name} is in no layer" for module in modules(PACKAGE) if layer(module) < 0])


def test_imports_go_down() -> None:
    none_of([problem for module in modules(PACKAGE) for problem in layer_problems(module)])


@pytest.mark.parametrize(("part", "other"), [("worker", "coordinator"), ("coordinator", "worker")])
def test_worker_and_coordinator_never_import_each_other(part: str, other: str) -> None:
    seen = {name for module in modules(PACKAGE) if module.part == part for _, name in module.imports()}
    assert seen
    assert not {name for name in seen if name.startswith(f"minishuffle.{other}")}


def loaded_at_once(module: Module) -> Iterator[str]:
    """What is imported when the module is: not what its functions import, or types alone."""
    at_once = [node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return (name for _, name in Module(module.name, "", ast.Module(at_once, [])).imports())


def loaded_with(start: str) -> set[str]:
    """By the dotted name of a module, of what is loaded with it all that is not of this package."""
    package = {f"minishuffle.{module.name[:-3].replace('/', '.')}": module for module in modules(PACKAGE)}
    seen, waiting, outside = set[str](), [start], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in loaded_at_once(package[name]):
            inside = imported if imported in package else imported.rpartition(".")[0]
            if inside in package:
                waiting.append(inside)
            elif not imported.startswith("minishuffle"):
                outside.add(imported.partition(".")[0])
    return outside


def test_a_coordinator_loads_nothing_that_only_rows_and_columns_need() -> None:
    assert "numpy" in loaded_with("minishuffle.worker.process")
    assert not loaded_with("minishuffle.coordinator.process") & {"numpy", "pyarrow", "numba", "cloudpickle"}


def clock_problems(module: Module) -> Iterator[str]:
    if layer(module) >= OBSERVE or module.name in MAY_BLOCK:
        return
    for line, name in module.imports():
        if name.partition(".")[0] in CLOCKS_AND_SOCKETS:
            yield f"{module.name}:{line} imports {name}: take time, bytes and wake-ups as arguments"
        elif name.partition(".")[0] == "random" and name != "random.Random":
            yield f"{module.name}:{line} imports {name}: take a random.Random as an argument"


def test_only_the_shells_import_clocks_threads_and_sockets() -> None:
    none_of([problem for module in modules(PACKAGE) for problem in clock_problems(module)])


def test_the_lists_of_files_are_up_to_date() -> None:
    there = {module.name for module in modules(PACKAGE)}
    assert there >= MAY_BLOCK | MAY_CLOUDPICKLE
    assert {module.name for module in modules(TESTS)} >= set(MAY_SLEEP)


def pickle_problems(module: Module) -> Iterator[str]:
    for line, name in module.imports():
        top = name.partition(".")[0]
        if top in PICKLES or (top == "cloudpickle" and module.name not in MAY_CLOUDPICKLE):
            yield f"{module.name}:{line} imports {name}: records travel as msgpack or Arrow"


def test_nothing_on_the_data_path_is_pickled() -> None:
    none_of([problem for module in modules(PACKAGE) for problem in pickle_problems(module)])


# --- sizes and names -------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [PACKAGE, TESTS], ids=["package", "tests"])
def test_functions_have_a_size_that_can_be_read(folder: Path) -> None:
    none_of([problem for module in modules(folder) for problem in long_functions(module)])


def long_functions(module: Module) -> Iterator[str]:
    for node in module.functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{module.name}:{node.lineno} {node.name} has {lines} lines"


def test_names_say_what_a_thing_is() -> None:
    parts = {(module.name, part) for module in modules(PACKAGE) for part in module.name[:-3].split("/")}
    classes = {
        (module.name, node.name)
        for module in modules(PACKAGE)
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    assert classes
    none_of([f"{name}: {part} says nothing" for name, part in sorted(parts) if BANNED_NAMES.search(part)])
    none_of([f"{name}: {kind} says nothing" for name, kind in sorted(classes) if BANNED_CLASSES.search(kind)])


def test_every_module_says_what_it_is_for() -> None:
    none_of([f"{m.name} has no docstring" for m in modules(PACKAGE) if not ast.get_docstring(m.tree)])


# --- what is never written -------------------------------------------------------------------------


@dataclass(frozen=True)
class Banned:
    """A call that is not made in the files that ``applies`` picks, and what to write instead."""

    call: re.Pattern[str]
    instead: str
    applies: Callable[[Module], bool]


def everywhere(module: Module) -> bool:
    return True


def below_observe(module: Module) -> bool:
    return layer(module) < OBSERVE


BANNED = (
    Banned(re.compile(r"^(time\.)?sleep$"), "wait on a bell or a timer of the loop", below_observe),
    Banned(
        re.compile(r"^print$"),
        "use logging",
        lambda m: m.part not in ("bench", "cli") and not m.name.startswith(RECIPES),
    ),
    Banned(
        re.compile(r"^click\.s?echo$"),
        "use echo of cli/terminal.py, which escapes what a terminal lacks",
        lambda m: m.name != "cli/terminal.py",
    ),
    Banned(re.compile(r"^hash$"), "use stable_hash: Python's hash differs between runs", everywhere),
    Banned(re.compile(r"(^|\.)get_event_loop$"), "use asyncio.get_running_loop", everywhere),
    Banned(
        re.compile(r"\.writelines$"),
        "use write: writelines has no back-pressure on some releases of asyncio",
        lambda m: m.name not in ("transport/tcp.py", "bench/peer.py"),
    ),
    Banned(re.compile(r"(^|\.)(utcnow|today)$"), "use a clock that was passed in", below_observe),
    Banned(re.compile(r"^(datetime\.)+now$"), "use a clock that was passed in", below_observe),
    Banned(re.compile(r"^(eval|exec|breakpoint|input)$"), "nothing: it has no place here", everywhere),
    Banned(re.compile(r"^os\.(system|popen)$"), "use subprocess with a list", everywhere),
)


def banned_calls(module: Module) -> Iterator[str]:
    for line, call in module.calls():
        for rule in BANNED:
            if rule.applies(module) and rule.call.search(call):
                yield f"{module.name}:{line} calls {call}: {rule.instead}"


def test_no_banned_call_is_made() -> None:
    none_of([problem for module in modules(PACKAGE) for problem in banned_calls(module)])


def swallowed(module: Module) -> Iterator[str]:
    """Bare excepts, and broad ones that do nothing with what they caught."""
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = set(re.findall(r"\w+", ast.unparse(node.type))) if node.type else set()
            if not caught:
                yield f"{module.name}:{node.lineno} catches everything: name what may be raised"
            elif caught & {"Exception", "BaseException"} and all(map(does_nothing, node.body)):
                yield f"{module.name}:{node.lineno} swallows whatever went wrong"
        elif isinstance(node, ast.Call) and suppresses_all(node):
            yield f"{module.name}:{node.lineno} suppresses whatever went wrong"


def suppresses_all(node: ast.Call) -> bool:
    named = {last_name(argument) for argument in node.args}
    return last_name(node.func) == "suppress" and bool(named & {"Exception", "BaseException"})


def does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Pass, ast.Continue)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


@pytest.mark.parametrize("folder", [PACKAGE, TESTS], ids=["package", "tests"])
def test_no_error_is_swallowed(folder: Path) -> None:
    none_of([problem for module in modules(folder) for problem in swallowed(module)])


# --- tests of the tests ----------------------------------------------------------------------------


def sleeps(module: Module) -> Iterator[str]:
    """Calls of time.sleep outside the functions that may."""
    allowed: set[int] = set()
    for node in module.functions():
        if node.name == "until" or node.name in MAY_SLEEP.get(module.name, "").split():
            allowed.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for line, call in module.calls():
        if call in ("time.sleep", "sleep") and line not in allowed:
            yield f"{module.name}:{line} sleeps: wait for what should happen, with a limit"


def test_tests_do_not_sleep() -> None:
    none_of([problem for module in modules(TESTS) for problem in sleeps(module)])


CHECKS = frozenset({"raises", "warns", "fail", "validate", "assert_called_once_with"})
"""Names of calls that fail a test; the machines' own ``validate`` asserts their invariants."""


@cache
def called_names(node: ast.AST) -> frozenset[str]:
    """The last part of the name of each call below a node."""
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return frozenset(last_name(function) for function in calls)


def last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def asserts_itself(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Assert) for part in ast.walk(node)) or bool(called_names(node) & CHECKS)


@cache
def asserting(folder: Path) -> frozenset[str]:
    """Names of the functions in the tests that assert something, themselves or by what they call."""
    functions = [node for module in modules(folder) for node in module.functions()]
    found = {node.name for node in functions if asserts_itself(node)}
    calls = [(node.name, called_names(node)) for node in functions]
    while more := {name for name, called in calls if called & found} - found:
        found |= more
    return frozenset(found)


def test_every_test_asserts_something() -> None:
    known = asserting(TESTS)
    idle = [
        f"{module.name}:{node.lineno} {node.name} asserts nothing"
        for module in modules(TESTS)
        for node in module.functions()
        if node.name.startswith("test_") and not asserts_itself(node) and not called_names(node) & known
    ]
    none_of(idle)


# --- the rules themselves --------------------------------------------------------------------------

VIOLATIONS = (
    ("protocol/x.py", "import asyncio", clock_problems),
    ("exchange/x.py", "def f():\n    from time import monotonic", clock_problems),
    ("coordinator/state.py", "import random", clock_problems),
    ("wire/x.py", "from minishuffle.protocol.credit import Credit", layer_problems),
    ("wire/x.py", "from minishuffle import cli", layer_problems),
    ("wire/x.py", "from ..exchange import gate", layer_problems),
    ("worker/x.py", "import minishuffle.coordinator.state", layer_problems),
    ("examples/x.py", "from minishuffle.bench import keyby", layer_problems),
    ("client.py", "from minishuffle.bench import keyby", layer_problems),
    ("operators/x.py", "from minishuffle.plan import nodes", layer_problems),
    ("operators/x.py", "from minishuffle.connectors import files", layer_problems),
    ("connectors/x.py", "from minishuffle.api.stream import Table", layer_problems),
    ("exchange/x.py", "import cloudpickle", pickle_problems),
    ("cli/x.py", "from pickle import loads", pickle_problems),
    ("worker/tasks/task.py", "import time\ntime.sleep(1)", banned_calls),
    ("client.py", "print(1)", banned_calls),
    ("cli/x.py", "click.echo(1)", banned_calls),
    ("exchange/x.py", "hash('a')", banned_calls),
    ("transport/control.py", "self.transport.writelines([])", banned_calls),
    ("plan/x.py", "datetime.now()", banned_calls),
    ("cli/x.py", "try:\n    f()\nexcept:\n    g()", swallowed),
    ("cli/x.py", "try:\n    f()\nexcept Exception:\n    pass", swallowed),
    ("cli/x.py", "with contextlib.suppress(Exception):\n    f()", swallowed),
    ("cli/x.py", "def f():\n" + "    g()\n" * FUNCTION_LINES_MAX, long_functions),
    ("wire/test_x.py", "def test_x():\n    time.sleep(1)", sleeps),
    ("e2e/conftest.py", "def other():\n    time.sleep(1)", sleeps),
)


@pytest.mark.parametrize(("name", "text", "rule"), VIOLATIONS)
def test_each_rule_finds_what_breaks_it(
    name: str, text: str, rule: Callable[[Module], Iterator[str]]
) -> None:
    assert len(list(rule(Module(name, text, ast.parse(text))))) == 1


def test_a_test_that_checks_nothing_is_found() -> None:
    body = ast.parse("def test_x():\n    compute(1)\n    print(2)").body[0]
    assert not asserts_itself(body)
    assert not called_names(body) & asserting(TESTS)

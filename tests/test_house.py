"""How the package is cut: one subject a module, each name in one place, nothing that nobody reads.

What may be imported by whom, and who may touch clocks and sockets, is in ``test_architecture``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import pytest

from support.sources import PACKAGE, RECIPES, ROOT, TESTS, FunctionNode, Module, modules, none_of, part_of

NO_TEST_OF_ITS_OWN = {
    "cli/bench.py": "each benchmark is run by the test of its module in bench",
    "cli/drill.py": "run by bench/test_drill.py",
    "cli/worker.py": "run by e2e/test_processes.py, as a process",
    "coordinator/instructions.py": "types only, used by every test of the coordinator",
    "worker/instructions.py": "types only, used by every test of the worker's state",
    "limits.py": "constants",
    "bench/peer.py": "a process, run by bench/test_wire.py",
    "examples/keyby.py": "run by examples/test_examples.py",
    "examples/wordcount.py": "run by examples/test_examples.py",
    "remote/connection.py": "a shell, run by the tests of writer and reader",
    "transport/addresses.py": "run by the tests of tcp and control, which dial wrong addresses",
    "wire/inquiries.py": "every message is packed and unpacked by wire/test_messages.py",
    "wire/outputs.py": "every message is packed and unpacked by wire/test_messages.py",
    "wire/registration.py": "every message is packed and unpacked by wire/test_messages.py",
    "wire/requests.py": "every message is packed and unpacked by wire/test_messages.py",
    "wire/clients.py": "every message is packed and unpacked by wire/test_messages.py",
    "worker/introspection/answers.py": "run by worker/process/test_dumps.py and test_tracing.py",
    "worker/service.py": "a shell, run by worker/process",
    "worker/channels/peers.py": "a shell, run by worker/process and transport/test_conformance.py",
    "coordinator/clients/status.py": "read by coordinator/test_state_requests.py",
    "web/pools.py": "served by both processes: web/test_rest.py",
    "protocol/channel.py": "the ends of a channel need a connection: protocol/test_connection.py",
    "remote/reader.py": "run against real workers by e2e/test_results.py",
}
"""Modules without a test module of their own name, and where they are tested."""
NOT_A_MODULE = {
    "connectors/test_sources.py": "one suite for all sources, from any offset",
    "coordinator/test_simulation.py": "whole clusters under faults, by seed",
    "api/test_answers.py": "jobs whose answer must not depend on how they are cut",
    "api/test_jobs.py": "whole jobs",
    "deploy/test_dashboards.py": "the folder deploy, beside the package",
    "deploy/test_manifests.py": "the same",
    "deploy/test_rules.py": "the same",
    "deploy/test_walkthrough.py": "the same, on hosts of their own",
    "deploy/test_watched.py": "the same, with a real Prometheus",
    "api/test_ledger.py": "recorded jobs, and what they gave",
    "api/test_metamorphic.py": "random jobs, cut in many ways",
    "api/test_type_matrix.py": "every type of Arrow in every operator of the Table API",
    "examples/test_examples.py": "the built-in jobs",
    "examples/test_recipes.py": "programs of users",
    "pipelines/test_interrupt.py": "signals to whole pipelines",
    "transport/test_conformance.py": "one suite for all transports",
    "transport/test_conformance_attachments.py": "the same, with attachments that come and go",
    "transport/test_conformance_unavailable.py": "the same, with consumers that go away",
}
"""Tests of a subject that is more than one module; those at the top and of e2e besides."""

SAME_FILE_NAME = {
    "__init__": "Python's",
    "__main__": "Python's",
    "process": "the shell of each process",
    "state": "the machine of each process",
    "instructions": "what the machine of each process asks of its shell",
    "attemptreports": "those that a worker makes, and what a coordinator does with them",
    "clients": "one conversation, seen from the wire and from a worker",
    "cluster": "Spark's cluster and the command that starts a local one",
    "pipeline": "the contract and the command that runs one",
    "session": "Spark's session and that of a command",
    "keyby": "the example and the benchmark of it",
    "drill": "what it runs and the command",
    "control": "the bytes of control messages, and the links that carry them",
    "connection": "the machine, and an external client's shell of one",
    "reader": "a source's reader and a result's",
    "registration": "the two messages of one, and how a worker process asks for it",
    "pausing": "the pause of a job, and where each of its tasks stops",
    "spool": "the file and the sink that writes it",
    "schemas": "types of columns, as a plan, an exchange and Spark know them",
}
SAME_NAME = {
    "keyby": "the example and the benchmark's command",
    "main": "the group of commands and the program's entry",
    "run": "the command for a pipeline, and the function for a job in a test",
    "Verdict": "the demo's and a pipeline's",
    "Worker": "the process, and what the coordinator knows of it",
}
MAY_BE_UNREAD = {
    "_activeSession": "PySpark reads its own field",
    "_instantiatedSession": "PySpark reads its own field",
    "check_hostname": "OpenSSL reads it",
    "hostname_checks_common_name": "OpenSSL reads it",
    "ignored": "how tests see that a message changed nothing",
    "minimum_version": "OpenSSL reads it",
    "num_tickets": "OpenSSL reads it",
    "verify_mode": "OpenSSL reads it",
}
"""Fields that the package writes and does not read, and who does."""
CALLED_BY_OTHERS = re.compile(
    r"^(data_received|get_buffer|buffer_updated|eof_received|list_commands|get_command|format_commands|initialOffset|latestOffset"
    r"|getDefaultReadLimit|prepareForTriggerAvailableNow|streamWriter|_(int|event)_(arrow|rows)|test_\w+|get_(source|filename))$"
)
"""What asyncio, click, importlib and Spark call by name, and what is looked up by a name put together."""
PUBLIC_API = frozenset({"contains", "kill_worker", "weekday"})
"""What only users call."""
SNAPSHOTS = frozenset({"divided"})
"""What only snapshots will call: how state is divided among subtasks. (They also write and read it.)"""
PRIVATE = re.compile(r"_(?!_|(replace|asdict)$)")
"""The rest are public methods of named tuples."""
PRIVATES = re.compile(r"\._(?!_)\w+\._(?!_)\w+")
JOBS = ("plan/", "api/", "operators/", "connectors/")
"""The rooms in which jobs are planned, and those of what runs in their tasks."""
PROCESSES = ("worker/", "coordinator/")
SET_FROM_OUTSIDE = {
    "worker/tasks/handoff.py": ("notified", "the wake flag of a subpartition: set by whoever queues it"),
    "worker/tasks/jobimports.py": ("__import__", "Python's, which a worker wraps"),
    "worker/interpreter.py": ("callbacks", "Python's, which hear of collections"),
    "worker/external/clientgate.py": ("channels", "channels of a gate that come and go"),
}
"""By module of the two processes: attributes of other objects that it changes, and why."""
CHANGES = re.compile(
    "add|append|appendleft|difference_update|discard|extend|insert|pop|popitem|popleft|remove|setdefault"
    "|subtract|update"
)
"""Methods of Python's collections that change these."""
FORWARDS = {
    "coordinator/process.py": "web_started look",  # The web server knows the process alone.
    "worker/channels/probing.py": "close",
    "worker/introspection/profiling.py": "now",  # One of several kinds of what is asked of a worker.
}
"""By module of the two processes: methods that only forward to an object which those who call do not know."""
SMALL_LINES_MAX = 75
SMALL = {
    "bench/snapshotages": "how old snapshots of tasks are while a benchmark runs",
    "__main__": "``python -m minishuffle``",
    "api/drafts": "what stands behind a step of unknown columns while ``minishuffle schema`` loads a plan",
    "backoff": "how long to wait between two tries",
    "cli/__main__": "``python -m minishuffle.cli``, which starts processes of clusters",
    "cli/entry": "what every start of the command line begins with, before its imports",
    "cli/firstprocess": "an init for a process that is number 1 of its container",
    "cli/localmodules": "modules beside a job's file, which workers get",
    "cli/new": "the project that somebody begins with",
    "cli/systemd": "messages to systemd",
    "cli/terminal": "text on any terminal",
    "clock": "a wall clock that is never set",
    "connectors/items": "the source of collections in memory",
    "coordinator/scheduling/draining": "a worker that is to leave",
    "coordinator/scheduling/workerinventory": "slots and segments in use, by worker",
    "coordinator/clusterclock": "wall time in the coordinator, and how far ahead it is",
    "coordinator/shutdown": "the orderly stop of a cluster",
    "examples/keyby": "the example of an endless job",
    "examples/wordcount": "the example of word count",
    "exchange/gather": "some rows of columns, by numbers",
    "exchange/notices": "entries of a channel's queue without data",
    "kernels/trust": "who can have put a file where it is",
    "observe/leftout": "in words, the records that a job left out of its results",
    "observe/vertices": "a vertex of a job, as users name it",
    "operators/deviation": "the standard deviation",
    "operators/event_time": "where the event time of a record stands",
    "operators/misplaced_nulls": "nulls that a schema rules out",
    "operators/ordered_categories": "categories with an order of their own",
    "operators/row_objects": "rows that are objects with fields",
    "operators/row_order": "rows by the values of columns",
    "operators/time_heap": "what waits for its time",
    "plan/sides": "side outputs of steps, and what is known of their records",
    "runtime/statesnapshot": "what a subtask has to know to go on elsewhere",
    "snapshots/savedstate": "what a subtask goes on with, out of a snapshot",
    "transport/forks": "sockets that forked processes must not hold",
    "transport/hostlook": "whether the kernel of another host answers",
    "transport/interfaces": "this host as others see it",
    "web/pages": "files of the web page",
    "web/refusals": "errors of the HTTP servers as JSON",
    "wire/outputs": "messages about files of sinks",
    "worker/reports/recoverysteps": "reports of what recoveries attach again",
    "worker/tasks/threadwatchdog": "tasks that are stuck in the user's code",
    "worker/tasks/taskrows": "the rows that a task has taken, and those that it has lost",
    "worker/wallclock": "the readings of the clocks of a worker",
}
"""Small modules, and the subject of each, which has no other home. What is not a subject of its own stands
with the one that it belongs to."""
ARGUMENTS_MAX = 5
MANY_ARGUMENTS = {
    "cli/": "click gives each option as an argument",
    "kernels/loops.py": "compiled loops take vectors and numbers, no objects",
}
"""Where functions may take more positional arguments."""


@pytest.fixture(scope="module", params=[PACKAGE], ids=["package"])
def package(request: pytest.FixtureRequest) -> tuple[Module, ...]:
    return tuple(module for module in modules(request.param) if not module.name.startswith(RECIPES))


def stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".py")


def folder(name: str) -> str:
    return name.rpartition("/")[0]


# --- one module, one subject, one test -------------------------------------------------------------


def mirrors_of(module: str, there: frozenset[str]) -> list[str]:
    """``test_<module>.py`` and ``test_<module>_<aspect>.py`` in the mirrored folder, or with the process."""
    place = f"{folder(module)}/" if folder(module) else ""
    rooms = "|".join(map(re.escape, (place, f"{part_of(module)}/process/")))
    pattern = re.compile(rf"({rooms})test_{re.escape(stem(module))}(_\w+)?\.py")
    return [name for name in there if pattern.fullmatch(name)]


def test_every_module_has_a_test_of_its_name(package: tuple[Module, ...]) -> None:
    there = frozenset(module.name for module in modules(TESTS))
    missing = {
        module.name
        for module in package
        if stem(module.name) not in ("__init__", "__main__") and not mirrors_of(module.name, there)
    }
    none_of([f"{name} has no test of its name" for name in sorted(missing - set(NO_TEST_OF_ITS_OWN))])
    none_of([f"{name} is no exception any more" for name in sorted(set(NO_TEST_OF_ITS_OWN) - missing)])


def test_no_module_of_the_rooms_of_jobs_is_an_exception() -> None:
    """Only what snapshots will call is; and what the rule for payloads itself lists."""
    listed = [*NO_TEST_OF_ITS_OWN, *MANY_ARGUMENTS]
    none_of([f"{name} is one" for name in listed if name.startswith(JOBS)])


def test_every_test_is_of_a_module(package: tuple[Module, ...]) -> None:
    there = frozenset(module.name for module in modules(TESTS))
    tests = {name for name in there if stem(name).startswith("test_") and not name.startswith("e2e/")}
    tests = {name for name in tests if folder(name)}
    mirrored = {test for module in package for test in mirrors_of(module.name, there)}
    none_of([f"{name} mirrors no module" for name in sorted(tests - mirrored - set(NOT_A_MODULE))])
    assert set(NOT_A_MODULE) <= tests


def test_file_names_are_unique(package: tuple[Module, ...]) -> None:
    places = defaultdict(list)
    for module in package:
        places[stem(module.name)].append(module.name)
    twice = {name for name, found in places.items() if len(found) > 1}
    none_of([f"{name}: {places[name]}" for name in sorted(twice - set(SAME_FILE_NAME))])
    none_of([f"{name} is no exception any more" for name in sorted(set(SAME_FILE_NAME) - twice)])


def test_each_small_module_is_the_only_home_of_its_subject(package: tuple[Module, ...]) -> None:
    short = [each.name.removesuffix(".py") for each in package if each.text.count("\n") <= SMALL_LINES_MAX]
    small = {name for name in short if stem(name) != "__init__"}
    none_of([f"{name} has at most {SMALL_LINES_MAX} lines: what is it about?" for name in small - set(SMALL)])
    none_of([f"{name} is no small module any more" for name in set(SMALL) - small])
    assert len(set(SMALL.values())) == len(SMALL)


def public_definitions(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name


def test_no_name_is_defined_by_two_modules(package: tuple[Module, ...]) -> None:
    places = defaultdict(list)
    for module in package:
        for name in public_definitions(module):
            places[name].append(module.name)
    twice = {name for name, found in places.items() if len(found) > 1}
    none_of([f"{name}: {places[name]}" for name in sorted(twice - set(SAME_NAME))])
    none_of([f"{name} is no exception any more" for name in sorted(set(SAME_NAME) - twice)])


def test_a_slot_is_a_scheduling_slot(package: tuple[Module, ...]) -> None:
    other = re.compile(r"(class|def) \w*[Ss]lots?\b(?!_)|\bslots?: (list|dict|deque)")
    checked = [module for module in package if module.part in ("wire", "protocol", "transport", "exchange")]
    assert checked
    none_of([f"{module.name}: {match[0]}" for module in checked if (match := other.search(module.text))])


# --- circles ---------------------------------------------------------------------------------------


def import_graph(package: tuple[Module, ...]) -> dict[str, set[str]]:
    """By module name, what it imports at any depth of its code, under TYPE_CHECKING too."""
    dotted = {f"minishuffle.{module.name[:-3].replace('/', '.')}": module.name for module in package}
    graph: dict[str, set[str]] = {}
    for module in package:
        found = set()
        for _, name in module.imports():
            target = dotted.get(name) or dotted.get(name.rpartition(".")[0])
            if target and target != module.name:
                found.add(target)
        graph[module.name] = found
    return graph


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """What is left when nothing can be taken away that imports nothing left, or that nothing left imports."""
    left = dict(graph)
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = {name for name, targets in left.items() if not targets & set(left) or name not in imported}
        if not ends:
            return set(left)
        left = {name: targets for name, targets in left.items() if name not in ends}


def test_nothing_imports_itself_in_a_circle(package: tuple[Module, ...]) -> None:
    none_of(sorted(in_circles(import_graph(package))))


# --- nothing that nobody reads ---------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def dead(package: tuple[Module, ...], elsewhere: str) -> Iterator[str]:
    """Definitions whose name stands nowhere else than where they are defined."""
    counted = Counter(words_of(elsewhere))
    for module in package:
        counted.update(words_of(module.text))
    for module in package:
        for node in module.nodes:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            named = node.name
            if counted[named] > 1 or named.startswith("__") or node.decorator_list:
                continue
            if named not in PUBLIC_API | SNAPSHOTS and not CALLED_BY_OTHERS.match(named):
                yield f"{module.name}:{node.lineno} {named} is used by nothing in the package"


def test_nothing_is_defined_that_nothing_uses(package: tuple[Module, ...]) -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    elsewhere = " ".join(path.read_text() for path in [*scripts, ROOT / "pyproject.toml", ROOT / "Makefile"])
    none_of(list(dead(package, elsewhere)))


def unread(package: tuple[Module, ...]) -> Iterator[str]:
    """Attributes that are stored and never loaded, anywhere in the package."""
    stored: dict[str, str] = {}
    loaded: set[str] = set()
    named: set[str] = set()
    for module in package:
        for node in module.nodes:
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    stored.setdefault(node.attr, f"{module.name}:{node.lineno}")
                else:
                    loaded.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                named.add(node.value)  # For getattr, unless it is one of __slots__.
    slots = {word for module in package for word in slot_names(module)}
    for name, place in stored.items():
        if name not in loaded and (name in slots or name not in named):
            yield f"{place} {name} is written and never read"


def slot_names(module: Module) -> set[str]:
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return {name for name in found if isinstance(name, str)}


def test_no_field_is_written_and_never_read(package: tuple[Module, ...]) -> None:
    found = {text.split()[1]: text for text in unread(package)}
    none_of([text for name, text in found.items() if name not in MAY_BE_UNREAD])
    none_of([f"{name} is no exception any more" for name in sorted(set(MAY_BE_UNREAD) - set(found))])


GONE = re.compile(
    r"\b(CountRows|CountArrow|FoldRows|ReduceRows|AggregateArrow|JoinRows|JoinArrow|AsOfArrow|BroadcastRows"
    r"|BroadcastArrow|FormIndex|KeyedRows|PairRows|UnpairRows|KeepTime|HideTime|WindowRows|WindowArrow"
    r"|SessionRows|SessionArrow|FilterRows|FlatMapRows|Explode|MapPieces|for_columns|takes_times"
    r"|sides_to_read|_Wanted|columns_found|unseen_columns|class Used|self\.asks)\b"
)
"""Twins, one for rows and one for columns, in whose place there is one class; and other places of keys and
event times than ``exchange.batch``; and what operators were asked while a job was planned."""


def unknown_schemas(module: Module) -> Iterator[str]:
    """Questions whether a schema is None: for names that end with ``schema`` or are declared as one."""
    for function in module.functions():
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        declared = {each.arg for each in arguments if is_schema(each.annotation)}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and is_schema(node.annotation):
                declared.add(ast.unparse(node.target))
        for asked in asked_for_none(function):
            if asked in declared or asked.endswith("schema"):
                yield f"{module.name}:{function.lineno} {function.name} asks whether {asked} is None"


def is_schema(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(re.search(r"\bSchema\b", ast.unparse(annotation)))


def asked_for_none(function: FunctionNode) -> Iterator[str]:
    """Expressions that are compared with None, or whose truth is asked for."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(each, ast.Constant) and each.value is None for each in sides):
                yield from map(ast.unparse, sides)
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield ast.unparse(node.test)
        elif isinstance(node, ast.BoolOp):
            yield from map(ast.unparse, node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield ast.unparse(node.operand)


def test_a_schema_is_known_wherever_one_stands(package: tuple[Module, ...]) -> None:
    """A user may leave one out, which ``with_schema`` in ``plan.schemas`` sees; a node, or what is known of
    records, has one always."""
    checked = [module for module in package if module.part in ("plan", "api")]
    none_of([problem for module in checked for problem in unknown_schemas(module)])


def test_twins_are_gone(package: tuple[Module, ...]) -> None:
    texts = [(module.name, module.text) for module in package]
    none_of([f"{name}: {found}" for name, text in texts for found in GONE.findall(text)])


ASKS_FOR_THE_PAYLOAD = {
    "operators/row_conversion.py rows_of": "rows of columns, which to_rows makes",
    "operators/task_state.py _are_rows": "the encoder of state that is no value of a key: rows take longer "
    "to pack, and are cut shorter",
    "operators/reductions.py _column_of": "the store of counts: keys alone are a column if many",
    "operators/batch_times.py event_times": "a loop over rows, whose times may be of any type: by way of a "
    "column 16 rows take 2,800 ns each and not 1,200 (datetimes 4,300 and not 900)",
}
"""Operators, by function, that ask whether a batch has rows or columns: where one is made of the other, where
state is stored or encoded, and loops over lists that are faster so. No other does: a plan knows it, and what
is the same for both is a method of ``exchange.batch.Batch``."""


def payload_questions(module: Module) -> Iterator[str]:
    """Functions that ask whether a payload, or a name that is given one, is a list or a record batch."""
    for function in module.functions():
        payloads = {
            ast.unparse(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and re.search(r"\.payload$", ast.unparse(node.value))
            for target in node.targets
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "type"):
                asked = ast.unparse(node.args[0])
                if asked in payloads | {"payload"} or asked.endswith(".payload"):
                    yield f"{module.name} {function.name}"


def test_operators_do_not_ask_for_rows_or_columns(package: tuple[Module, ...]) -> None:
    found = {each for module in package if module.part == "operators" for each in payload_questions(module)}
    none_of([f"{each} asks what its payload is" for each in sorted(found - set(ASKS_FOR_THE_PAYLOAD))])
    none_of([f"{each} is no exception any more" for each in sorted(set(ASKS_FOR_THE_PAYLOAD) - found)])


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ("payload = batch.payload\n    return isinstance(payload, list)", True),
        ("rows = batch.payload\n    return type(rows) is list", True),
        ("if not isinstance(batch.payload, pa.RecordBatch):\n        raise ValueError", True),
        ("found = batch.keys\n    return isinstance(found, list)", False),
        ("return [row for row in batch.payload if isinstance(row, dict)]", False),
    ],
)
def test_a_question_for_a_payload_is_found(body: str, asks: bool) -> None:
    text = f"def f(batch):\n    {body}\n"
    assert (
        list(payload_questions(Module("operators/x.py", text, ast.parse(text))))
        == ["operators/x.py f"] * asks
    )


# --- shapes ----------------------------------------------------------------------------------------


def many_arguments(module: Module) -> Iterator[str]:
    for node in module.functions():
        names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > ARGUMENTS_MAX:
            yield f"{module.name}:{node.lineno} {node.name} takes {count} positional arguments"


def test_functions_take_few_positional_arguments(package: tuple[Module, ...]) -> None:
    checked = [module for module in package if not module.name.startswith(tuple(MANY_ARGUMENTS))]
    none_of([problem for module in checked for problem in many_arguments(module)])


def without_value(module: Module) -> Iterator[str]:
    """Attributes that ``__init__`` declares and does not set."""
    for node in module.functions():
        if node.name != "__init__":
            continue
        for part in ast.walk(node):
            if (
                isinstance(part, ast.AnnAssign)
                and part.value is None
                and isinstance(part.target, ast.Attribute)
            ):
                yield f"{module.name}:{part.lineno} {part.target.attr} has no value after __init__"


def test_every_attribute_has_a_value_after_init(package: tuple[Module, ...]) -> None:
    none_of([problem for module in package for problem in without_value(module)])


def through_privates(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := PRIVATES.search(line):
            yield f"{module.name}:{number} reaches through privates: {match[0]}"


def test_nothing_reaches_through_two_objects_privates(package: tuple[Module, ...]) -> None:
    none_of([problem for module in package for problem in through_privates(module)])


@dataclass(frozen=True)
class Access:
    """An attribute of an object that is no instance of the class in whose code that stands."""

    module: str
    line: int
    attribute: str
    assigned: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {'assigns' if self.assigned else 'reads'} {self.attribute}"


def attributes_of(kind: ast.ClassDef) -> Iterator[str]:
    """What a class defines: methods, class attributes, slots, and what its methods assign to ``self``."""
    for node in kind.body:
        if isinstance(node, FunctionNode):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    for node in ast.walk(kind):
        if is_of_self(node) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))


def is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Of ``super()`` too."""
    if not isinstance(node, ast.Attribute):
        return False
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def defined(package: tuple[Module, ...]) -> dict[str, set[str]]:
    """By class, its attributes and those of all classes above it."""
    found: dict[str, set[str]] = defaultdict(set)
    above: dict[str, set[str]] = defaultdict(set)
    for node in (node for module in package for node in module.nodes):
        if isinstance(node, ast.ClassDef):
            found[node.name].update(attributes_of(node))
            above[node.name].update(name for base in node.bases for name in words_of(ast.unparse(base)))
    size = -1
    while size != (now := sum(map(len, found.values()))):
        size = now
        for name, bases in above.items():
            found[name].update(*(found[base] for base in bases if base in found))
    return found


def accesses(module: Module, own: dict[str, set[str]]) -> Iterator[Access]:
    """Private attributes that are read, and attributes that are assigned, where they are another class's."""

    def look(node: ast.AST, mine: set[str]) -> Iterator[Access]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and child.attr not in mine and not is_of_self(child):
                assigned = not isinstance(child.ctx, ast.Load)
                if assigned or PRIVATE.match(child.attr):
                    yield Access(module.name, child.lineno, child.attr, assigned)
            yield from look(child, own[child.name] if isinstance(child, ast.ClassDef) else mine)

    return look(module.tree, set())


@pytest.fixture(scope="module")
def others(package: tuple[Module, ...]) -> list[Access]:
    """All in the rooms of jobs, and in that of the coordinator."""
    own = defined(package)
    checked = [module for module in package if module.name.startswith((*JOBS, "coordinator/"))]
    return [each for module in checked for each in accesses(module, own)]


def test_nothing_reads_what_another_object_keeps_to_itself(others: list[Access]) -> None:
    none_of([str(each) for each in others if not each.assigned])


def test_attributes_are_assigned_by_their_own_class(others: list[Access]) -> None:
    none_of([str(each) for each in others if each.assigned and each.module.startswith(JOBS)])


def is_record(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """A dataclass that may change: its fields are for all of its module."""
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(each) and "frozen=True" not in ast.unparse(each)
        for each in node.decorator_list
    )


def changed(node: ast.AST) -> ast.expr | None:
    """What is assigned, or of what an item is; or the collection that is changed by a call."""
    target: ast.expr | None = None
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        target = node.func.value if CHANGES.fullmatch(node.func.attr) else None
    while isinstance(target, ast.Subscript):
        target = target.value
    return target


def assigned(module: Module, own: dict[str, set[str]]) -> Iterator[ast.Attribute]:
    """Attributes of other objects than ``self`` that are assigned, or whose items are: not those of the
    module's own records, nor counters, which are for whoever counts, nor what is called when something
    happens, by name ``on_...``."""
    shared = {"TaskCounters", "OperatorCounters", "ConnectionCounters"}
    shared |= {node.name for node in module.nodes if is_record(node)}
    fields = {field for name in shared for field in own.get(name, ())}
    for target in map(changed, module.nodes):
        if not isinstance(target, ast.Attribute) or is_of_self(target):
            continue
        if target.attr not in fields and not target.attr.startswith("on_"):
            yield target


def test_each_attribute_is_assigned_by_the_class_that_declares_it(package: tuple[Module, ...]) -> None:
    """In both processes: what is written in one place is understood in one place."""
    own, left = defined(package), {name: set(each.split()) for name, (each, _) in SET_FROM_OUTSIDE.items()}
    problems = []
    for module in package:
        found = list(assigned(module, own)) if module.name.startswith(PROCESSES) else []
        may = set(SET_FROM_OUTSIDE.get(module.name, ("", ""))[0].split())
        problems += [
            f"{module.name}:{node.lineno} changes {ast.unparse(node)}: call a method of its class"
            for node in found
            if node.attr not in may
        ]
        if module.name in left:
            left[module.name] -= {node.attr for node in found}
    none_of(problems)
    over = [f"{name} does not change {each} any more: take it out" for name in left for each in left[name]]
    none_of(over)


def parts_of(kind: ast.ClassDef, classes: Collection[str]) -> set[str]:
    """Attributes in which ``__init__`` puts an object of one of these classes, made there or handed in."""
    found = set()
    for method in kind.body:
        if not isinstance(method, FunctionNode) or method.name != "__init__":
            continue
        arguments = [*method.args.args, *method.args.kwonlyargs]
        types = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                targets, values = node.targets, [node.value] * len(node.targets)
                if isinstance(node.value, ast.Tuple) and isinstance(targets[0], ast.Tuple):
                    targets, values = targets[0].elts, node.value.elts
                for target, value in zip(targets, values, strict=True):
                    named = types.get(ast.unparse(value), ast.unparse(value).partition("(")[0])
                    if is_of_self(target) and named in classes:
                        found.add(target.attr)
    return found


def forwards(module: Module, classes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Methods that only call one of a part, with what they are given: the class, and the method."""
    for kind in (node for node in module.nodes if isinstance(node, ast.ClassDef)):
        parts = parts_of(kind, classes)
        for method in (node for node in kind.body if isinstance(node, FunctionNode)):
            body = method.body[1:] if ast.get_docstring(method) else method.body
            call = getattr(body[0], "value", None) if len(body) == 1 else None
            call = call.value if isinstance(call, ast.Await) else call
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            part = call.func.value
            while isinstance(part, ast.Attribute) and not is_of_self(part):
                part = part.value
            taken = [each.arg for each in [*method.args.args[1:], *method.args.kwonlyargs]]
            given = [ast.unparse(each) for each in [*call.args, *(each.value for each in call.keywords)]]
            if is_of_self(part) and part.attr in parts and given == taken:
                yield kind.name, method.name


def test_no_method_only_forwards(package: tuple[Module, ...]) -> None:
    """In both processes: who needs a part asks the part."""
    classes = frozenset(defined(package))
    found = {
        (module.name, method): f"{module.name}: {kind}.{method} only forwards"
        for module in package
        if module.name.startswith(PROCESSES)
        for kind, method in forwards(module, classes)
    }
    may = {(name, method) for name, methods in FORWARDS.items() for method in methods.split()}
    none_of([text for key, text in found.items() if key not in may])
    none_of([f"{name}: {method} is no exception any more" for name, method in may - found.keys()])


# --- words -----------------------------------------------------------------------------------------

WORDS = {
    r"\bmend(s|ed|ing)?\b": "suggest the fix",
    r"(?<!\bthere )\b(is|are) no workers?\b|\bnot workers\b": "external client",
    r"\bvisitors?\b|\bstrangers?\b|'s door\b": "external client",
    r"\bstory\b": "history",
    r"\bfigures?\b": "stats",
    r"\bfarewell\b|\bgoodbye\b": "final frame",
    r"\bh[au]ngs? up\b|\bhang_up\b": "disconnect",
    r"\b(is|are|was|were) over\b|\.over\b(?!\()|\bover: bool": "terminal, has ended",
    r"\b(is|are|was|were|be) told\b": "say who does what to which",
    r"\bsaid again\b|\bwho comes\b|\bof another's\b": "say who does what to which",
    r'^\s*(#|""")\s*Of [a-z]': "begin with what the thing is",
    r"\bis promised to jobs\b": "separate from the memory reserved for jobs",
}
"""Words that readers of this field would have to guess at, and what is written instead."""
BEFORE = re.compile(r"^(\|[^|\n]*\|)[^|\n]*\|", re.MULTILINE)
"""The second column of the changelog's table of breaks: names as they were."""


def bad_words(name: str, text: str) -> Iterator[str]:
    for pattern, instead in WORDS.items():
        for match in re.finditer(pattern, text, re.MULTILINE | re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line} {match[0].strip()!r}: write {instead!r}"


def test_the_words_are_those_of_the_field(package: tuple[Module, ...]) -> None:
    documents = [*PACKAGE.rglob("*.md"), ROOT / "README.md"]
    texts = [(module.name, module.text) for module in package]
    changes = (ROOT / "CHANGELOG.md").read_text()
    texts.append(("CHANGELOG.md", BEFORE.sub(r"\1|", changes)))
    texts += [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in documents]
    none_of([problem for name, text in texts for problem in bad_words(name, text)])


PRONOUNS = frozenset({"that", "which", "those", "them", "what", "whose", "whoever", "one", "such"})
PRONOUNS_MAX = 3
"""In one sentence. With more of them nobody knows which is which who has not read the code."""
PLAIN = (
    *("coordinator/", "worker/", "wire/", "protocol/", "transport/", "observe/", "counters.py", "limits.py"),
    *("backoff.py", "clock.py", "postmortem.py", "replacements.py", "supervision.py"),
)
"""Here docstrings of public names count as well, with one less in a sentence, and begin with a subject."""
OPENINGS = re.compile(r"(What|Those|Such|That|Whoever|Somebody|Nobody|They|So many)\b")
"""Words with which a docstring begins that does not name its subject."""


def documented(node: ast.AST, *, is_private: bool = False) -> Iterator[tuple[int, str]]:
    """Docstrings of private functions, classes and attributes, with their lines."""
    body = getattr(node, "body", [])
    for child, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            private = is_private or child.name.startswith("_")
            if private and (text := ast.get_docstring(child)):
                yield child.lineno, text
            yield from documented(child, is_private=private)
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(behind, ast.Expr):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            private = is_private or ast.unparse(target).rpartition(".")[2].startswith("_")
            if private and isinstance(behind.value, ast.Constant):
                yield behind.lineno, str(behind.value.value)


def riddles(module: Module) -> Iterator[str]:
    is_plain = module.name.startswith(PLAIN)
    most = PRONOUNS_MAX - is_plain
    for line, text in documented(module.tree, is_private=is_plain):
        if is_plain and OPENINGS.match(text):
            yield f"{module.name}:{line} begin with what it is or does: {text.splitlines()[0]}"
        for sentence in re.split(r"(?<=[.:;])\s+", text):
            if sum(word in PRONOUNS for word in re.findall(r"[a-z]+", sentence.lower())) > most:
                yield f"{module.name}:{line} say what is meant: {' '.join(sentence.split())}"


def test_docstrings_say_what_they_speak_of(package: tuple[Module, ...]) -> None:
    none_of([problem for module in package for problem in riddles(module)])


# --- the rules themselves --------------------------------------------------------------------------


def parsed(text: str) -> Module:
    return Module("exchange/x.py", text, ast.parse(text))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (many_arguments, "def f(a, b, c, d, e, g):\n    pass"),
        (without_value, "class A:\n    def __init__(self):\n        self.a: int"),
        (through_privates, "a._b._c()"),
        (lambda module: dead((module,), ""), "def lonely():\n    pass"),
        (lambda module: unread((module,)), "def f(a):\n    a.b = 1"),
        (lambda module: bad_words(module.name, module.text), "# the error names the mend"),
        (unknown_schemas, "def f(given: pa.Schema | None):\n    return given is None"),
        (unknown_schemas, "def f(step):\n    return [] if step.arrow_schema else None"),
        (riddles, 'class _A:\n    """Those of them that had what one has."""'),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: Callable[[Module], Iterator[str]], text: str) -> None:
    found = [problem for problem in rule(parsed(text)) if "f is used by nothing" not in problem]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("self._a = other._a", []),
        ("self._a = other._b", ["reads _b"]),
        ("other.c = 1", ["assigns c"]),
        ("other._a, self.d = super()._e()", []),
    ],
)
def test_what_is_of_another_class_is_found(line: str, found: list[str]) -> None:
    module = parsed(f"class A:\n    _a: int\n\nclass B(A):\n    def f(self, other):\n        {line}")
    assert [str(each).partition(" ")[2] for each in accesses(module, defined((module,)))] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("self.a = other.b", []),
        ("record.c += 1", []),
        ("counters.rows_done += 1; link.on_written = print", []),
        ("other.d, self.a = 1, 2", ["d"]),
        ("del other.a.e", ["e"]),
        ("other.f.add(1); self.a[0] = other.f.get(1)", ["f"]),
        ("other.g[0][1] += 1; record.c[0] = 1", ["g"]),
        ("other.h = 1", ["h"]),
    ],
)
def test_what_is_assigned_from_outside_is_found(line: str, found: list[str]) -> None:
    record = "@dataclass(slots=True)\nclass R:\n    c: int\n\n@dataclass(frozen=True)\nclass F:\n    h: int"
    module = parsed(f"{record}\n\ndef f(self, other, record, counters, link):\n    {line}")
    own = defined((module,)) | {"TaskCounters": {"rows_done"}}
    assert [node.attr for node in assigned(module, own)] == found


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("return self.part.g(x)", True),
        ("return self.part.inner.g(x)", True),
        ("return self.part.g(x, self.now)", False),
        ("return self.other.g(x)", False),
        ("y = self.part.g(x)\n        return y", False),
    ],
)
def test_a_method_that_only_forwards_is_found(body: str, is_found: bool) -> None:
    start = "def __init__(self):\n        self.part, self.other = Part(), {}"
    module = parsed(f"class Part:\n    pass\n\nclass A:\n    {start}\n    def f(self, x):\n        {body}")
    assert list(forwards(module, {"A", "Part"})) == ([("A", "f")] if is_found else [])


def test_a_circle_is_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}) == {"b", "c"}


def test_names_mirror_modules() -> None:
    there = frozenset({"wire/test_frames.py", "wire/test_frames_split.py", "wire/test_framesets.py"})
    assert sorted(mirrors_of("wire/frames.py", there)) == ["wire/test_frames.py", "wire/test_frames_split.py"]
    assert Path(ROOT / "tests").samefile(TESTS)

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.cli.loading import load_job, load_pipeline
from minishuffle.errors import InvalidGraph, ShuffleError, UnknownName, UsageError
from minishuffle.plan.planner import compile_job

JOB = '''
from typing import Annotated
from pydantic import Field
from minishuffle import Stream
from helper_of_job import double

ready = Stream.items([1, 2]).map(double).collect()
number = 7

def numbers(count: Annotated[int, Field(gt=0)], factor: float | None = None, names: list[str] = ["a"],
            unseen=3) -> Stream:
    """Numbers, doubled."""
    return Stream.items([(double(i), factor, names) for i in range(count)]).collect()

def wrong(count: int = 1) -> int:
    return count

def broken(count: int = 0) -> Stream:
    return Stream.items([1 // count]).collect()

def bare(count) -> Stream:
    return ready

def read(row):
    return row
'''


@pytest.fixture
def job_file(tmp_path: Path) -> Iterator[Path]:
    before = set(sys.modules)
    (tmp_path / "helper_of_job.py").write_text("def double(n):\n    return 2 * n\n")
    file = tmp_path / "json.py"  # A name that a module of the library has.
    file.write_text(JOB)
    yield file
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            for pickle in (cloudpickle, sys.modules.get("pyspark.cloudpickle")):
                if pickle is not None and name in pickle.list_registry_pickle_by_value():
                    pickle.unregister_pickle_by_value(sys.modules[name])
            del sys.modules[name]


def test_a_stream_of_a_file(job_file: Path) -> None:
    job = load_job(f"{job_file}:ready")
    assert job.label == "json.py:ready"
    assert replace(job, source="ready.py").label == replace(job, source="x" * 200).label == "ready"
    assert isinstance(job.build(), Stream)
    assert job.parameters == ()
    with pytest.raises(UnknownName, match="job ready takes no parameters"):
        job.build(["count=1"])


def test_a_function_of_a_file_and_its_parameters(job_file: Path) -> None:
    job = load_job(f"{job_file}:numbers")
    assert job.doc == "Numbers, doubled."
    assert [parameter.name for parameter in job.parameters] == ["count", "factor", "names"]
    assert [parameter.required for parameter in job.parameters] == [True, False, False]
    assert job._values(["count=3", "factor=2", 'names=["x", "y"]']) == {
        "count": 3,
        "factor": 2.0,
        "names": ["x", "y"],
    }
    assert job._values(["count=3", "factor=null"]) == {"count": 3, "factor": None}
    assert isinstance(job.build(["count=3"]), Stream)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["count"], "write --set key=value"),
        (
            ["cuont=1"],
            r"no such parameter; did you mean 'count'\? job numbers takes count: .*names: list\[str\]",
        ),
        (["count=many"], r"--set count=many: Input should be a valid integer"),
        (["count=0"], "--set count=0: Input should be greater than 0"),
        (["count=1", "factor=[]"], "--set factor=\\[\\]"),
        (
            [],
            r"needs --set count=…; job numbers takes count: .*; streams and tables of the file: ready",
        ),
    ],
)
def test_bad_settings_are_one_error(job_file: Path, settings: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        load_job(f"{job_file}:numbers").build(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameter", "write"),
    [("late='drop'", "late: str = 'drop'"), ("late=3", "late: int = 3"), ("late=None", "late: str = None")],
)
def test_a_parameter_without_an_annotation_is_told_of(tmp_path: Path, parameter: str, write: str) -> None:
    file = tmp_path / "late_job.py"
    file.write_text(f"def job({parameter}):\n    pass\n")
    with pytest.raises(UnknownName, match=r"'late' of job\(\) has no annotation") as caught:
        load_job(f"{file}:job").build(["late=fail"])
    assert str(caught.value).endswith(f": write {write}")


def test_code_of_the_users_own_travels_by_value(job_file: Path) -> None:
    job = load_job(f"{job_file}:numbers")
    module = sys.modules[job.target.__module__]
    assert module.__name__.startswith("minishuffle_job_json_")
    registered = cloudpickle.list_registry_pickle_by_value()
    assert {module.__name__, "helper_of_job"} <= set(registered)
    assert "json" not in registered
    assert sys.modules["json"].__file__ != str(job_file)
    assert str(job_file.parent) not in sys.path


PIPELINE = """
from helper_of_job import double
from minishuffle.pipelines import Pipeline

def quadruple(n):
    return double(double(n))

class Own(Pipeline):
    def inputs(self, spark, data):
        return {}

    def job(self, streams):
        raise AssertionError

own = Own()
"""


@pytest.mark.extra
def test_functions_of_a_pipelines_file_work_in_tasks_of_spark_that_lack_the_file(job_file: Path) -> None:
    from pyspark.serializers import CloudPickleSerializer

    job_file.write_text(PIPELINE)
    pipeline = load_pipeline(f"{job_file}:own")
    quadruple = sys.modules[pipeline.target.__module__].quadruple
    packed = CloudPickleSerializer().dumps(quadruple)
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(3))"
    there = subprocess.run(
        [sys.executable, "-c", program], input=packed, capture_output=True, timeout=60, cwd="/"
    )
    assert (there.stdout, there.stderr) == (b"12\n", b"")


def test_a_job_is_loaded_without_spark(job_file: Path) -> None:
    program = (
        "import sys; from minishuffle.cli.loading import load_job; "
        f"load_job('{job_file}:ready'); print('pyspark' in sys.modules)"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, text=True)
    assert (there.stdout, there.stderr) == ("False\n", "")


def test_a_module_of_the_working_directory(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job_file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (job_file.parent / "own_job_module.py").write_text(JOB)
    job = load_job("own_job_module:ready")
    assert isinstance(job.build(), Stream) and job.label == "own_job_module:ready"
    assert "own_job_module" in cloudpickle.list_registry_pickle_by_value()


@pytest.mark.parametrize(
    ("spec", "kind", "text"),
    [
        ("keybi", UnknownName, "did you mean 'keyby'"),
        (
            "nothing_like_it",
            UnknownName,
            "there are ads, backpressure, keyby, wordcount, or write module:attribute",
        ),
        ("job.py", UsageError, "job.py:ATTRIBUTE"),
        ("absent.py:job", UnknownName, "there is no file absent.py"),
        ("absent_module_x:job", UnknownName, "there is no module 'absent_module_x'"),
        (":job", UsageError, "write module:attribute"),
        (
            "{file}:absent",
            UnknownName,
            "no attribute 'absent'; there are ready, numbers, wrong, broken, bare",
        ),
        (
            "{file}:reddy",
            UnknownName,
            r"no attribute 'reddy'; did you mean 'ready'\? there are ready, numbers, ",
        ),
        ("{file}:number", UsageError, "is of type int, not a Stream or a Table"),
        (
            "{file}:bare",
            UsageError,
            "parameter count has no annotation, .*; streams and tables of the file: ready",
        ),
        (
            "{file}:read",
            UsageError,
            r"parameter row has .*; did you mean 'ready'\? streams and tables of the",
        ),
    ],
)
def test_what_is_no_job_is_one_clear_error(
    job_file: Path, spec: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        load_job(spec.format(file=job_file))
    assert "\n" not in str(caught.value)


def test_a_function_that_returns_something_else(job_file: Path) -> None:
    with pytest.raises(UsageError, match="job wrong must return a Stream or a Table, not int"):
        load_job(f"{job_file}:wrong").build()


def test_a_function_that_raises_shows_its_own_traceback_alone(job_file: Path) -> None:
    with pytest.raises(ShuffleError, match="job broken cannot be built: ZeroDivisionError") as caught:
        load_job(f"{job_file}:broken").build()
    text = str(caught.value)
    assert text.count("  File ") == 1
    assert "return Stream.items([1 // count]).collect()" in text


@pytest.mark.parametrize("job", ["top", "built"])
def test_an_error_of_a_step_is_one_line_with_its_place_in_the_file(tmp_path: Path, job: str) -> None:
    step = 'Stream.items([{"k": 1}]).to_table().select("x").collect()'
    lines = ["from minishuffle import Stream, col", f"top = {step}", "def built():", f"    return {step}"]
    file = tmp_path / "odd.py"
    file.write_text("\n".join(lines if job == "top" else [lines[0], *lines[2:]]))
    line = 2 if job == "top" else 3
    with pytest.raises(UnknownName, match=f"^odd.py:{line}: select: there is no column 'x'; there are k\n"):
        load_job(f"{file}:{job}").build()
    selecting = file.read_text()
    file.write_text(selecting.replace('select("x")', 'with_columns(y=col("x"))'))
    with pytest.raises(UnknownName, match=rf"^odd.py:{line}: with_columns\(y=...\): there is no column 'x'"):
        load_job(f"{file}:{job}").build()
    file.write_text(selecting.replace(".to_table()", ".map(str).to_table()"))
    with pytest.raises(InvalidGraph, match=rf"^to_table at \S*odd.py:{line}: nothing says"):
        load_job(f"{file}:{job}").build()


def test_a_function_that_exits_fails_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("import sys\n\ndef exiting():\n    sys.exit(7)\n")
    with pytest.raises(
        ShuffleError, match=r"(?s)job exiting cannot be built: SystemExit: 7\n.*sys\.exit\(7\)"
    ):
        load_job(f"{file}:exiting").build()


@pytest.mark.parametrize("line", ["raise ValueError('at load')", "import sys; sys.exit('at load')", "1 +"])
def test_a_file_that_cannot_be_loaded_shows_why(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"{line}\n")
    before = set(sys.modules)
    with pytest.raises(ShuffleError, match=r"bad\.py cannot be loaded: ") as caught:
        load_job(f"{file}:job")
    assert "importlib" not in str(caught.value)
    assert not any(name.startswith("minishuffle_job_bad") for name in set(sys.modules) - before)


@pytest.mark.parametrize("name", ["ads", "backpressure", "keyby", "wordcount"])
def test_built_in_jobs_build(name: str) -> None:
    job = load_job(name)
    assert job.name == job.label == name
    assert job.doc
    assert isinstance(job.build(), Stream | Table)


LATE_IMPORTS = """
from minishuffle import Stream

def late(n):
    import helper_of_job
    from helper_of_job import double
    return double(n) + helper_of_job.double(1)

def built() -> Stream:
    from helper_of_job import double
    return Stream.items([1, 2]).map(double).map(late).collect()
"""


def test_functions_may_import_what_lies_beside_the_file_whenever_they_run(job_file: Path) -> None:
    """Those that build the job, here, and those that run in tasks, which lack the file."""
    job_file.write_text(LATE_IMPORTS)
    stream = load_job(f"{job_file}:built").build()
    assert str(job_file.parent) not in sys.path
    (vertex,) = compile_job(stream).vertices
    program = (
        "import sys, cloudpickle\n"
        "from minishuffle.worker.tasks.jobimports import import_from\n"
        "from minishuffle.plan.programs import open_program\n"
        "program = open_program(sys.stdin.buffer.read(), cloudpickle.loads)\n"
        "import_from(program.modules)\n"
        "first, then, _ = program.operators\n"
        "print(then.fn(first.fn(3)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], input=vertex.program, capture_output=True, timeout=60, cwd="/"
    )
    assert (there.stdout, there.stderr) == (b"14\n", b"")

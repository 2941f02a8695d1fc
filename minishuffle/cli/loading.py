"""From what a user types as JOB or PIPELINE to the thing itself: finding it, its parameters, building it."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

import cloudpickle
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from minishuffle.api.stream_base import StreamBase
from minishuffle.cli.localmodules import local_modules
from minishuffle.errors import ShuffleError, UnknownName, UsageError, told_from_outside
from minishuffle.examples import BUILT_IN
from minishuffle.pipelines import BUILT_IN as PIPELINES
from minishuffle.pipelines import Pipeline
from minishuffle.plan.arguments import is_name
from minishuffle.plan.pickling import send_modules

__all__ = ["Found", "Job", "JobParameter", "Kind", "load_job", "load_pipeline"]

Made = TypeVar("Made")

REQUIRED: Any = inspect.Parameter.empty
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Where the standard library and other packages are."""


@dataclass(slots=True, frozen=True)
class JobParameter:
    """One ``--set`` key of a job."""

    name: str
    annotation: Any
    default: Any
    """``REQUIRED`` when there is none."""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def type_name(self) -> str:
        annotated = typing.get_origin(self.annotation) is typing.Annotated
        return inspect.formatannotation(self.annotation.__origin__ if annotated else self.annotation)

    def __str__(self) -> str:
        text = f"{self.name}: {self.type_name}"
        return text if self.required else f"{text} = {self.default!r}"

    def parse(self, text: str) -> Any:
        """The value in ``text``: as it stands, or as JSON (for lists, maps and null).

        Raises:
            UsageError: it does not fit the annotation.
        """
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(self.annotation)
        except PydanticSchemaGenerationError:
            raise UsageError(
                f"parameter {self.name} has a type that a command line cannot give: {self.type_name}"
            ) from None
        try:
            return adapter.validate_python(text)
        except ValidationError as first:
            try:
                return adapter.validate_python(json.loads(text))
            except ValueError:
                problem = first.errors()[0]["msg"]
                raise UsageError(
                    f"--set {self.name}={text}: {problem} ({self.name} takes {self.type_name})"
                ) from None


@dataclass(slots=True, frozen=True)
class Kind(Generic[Made]):
    """What is looked for: how it is called, what it is, and which there are by name."""

    name: str
    type: type[Made]
    type_name: str
    names: str
    """Several of its type, in a text."""
    fix: str
    """What to change in a function that returns something else."""
    built_in: Mapping[str, str]


JOB: Kind[StreamBase] = Kind(
    "job", StreamBase, "a Stream or a Table", "streams and tables", "return what a sink gives", BUILT_IN
)
PIPELINE: Kind[Pipeline] = Kind("pipeline", Pipeline, "a Pipeline", "pipelines", "return one", PIPELINES)  # type: ignore[type-abstract]


@dataclass(slots=True, frozen=True)
class Found(Generic[Made]):
    """What was found; ``parameters`` is empty when the attribute is of the kind's type itself."""

    kind: Kind[Made]
    name: str
    doc: str
    parameters: tuple[JobParameter, ...]
    target: Made | Callable[..., Any]
    directory: Path | None = None
    """Where its functions import from: that of its file; None for what is built in."""
    source: str = ""
    """Its file, without folders, or its module; empty for what is built in."""
    hint: str = ""
    """For errors about its parameters: what else of the file may be meant."""

    @property
    def label(self) -> str:
        """What a job of it is called unless the user says so: ``orders.py:spent``; the attribute alone if the
        file has the same name, or the two are too long."""
        if self.source.removesuffix(".py").rpartition(".")[2] in ("", self.name):
            return self.name
        both = f"{self.source}:{self.name}"
        return both if is_name(both) else self.name

    def build(self, settings: Sequence[str] = ()) -> Made:
        """Make it with ``settings`` of the form ``key=value``.

        Raises:
            UsageError: an unknown key, a value of another type, or a missing one.
        """
        values = self._values(settings)
        if isinstance(self.target, self.kind.type):
            return self.target
        assert callable(self.target)
        what = f"{self.kind.name} {self.name}"
        try:
            with _by_value(self.directory, self.kind):
                made = self.target(**values)
        except ShuffleError as error:
            _add_place(error)
            raise
        except (Exception, SystemExit) as error:
            raise ShuffleError(f"{what} cannot be built: {told_from_outside(error, _is_ours)}") from error
        if not isinstance(made, self.kind.type):
            other = type(made).__name__
            fix = f"{self.kind.fix}{self.hint}"
            raise UsageError(f"{what} must return {self.kind.type_name}, not {other}: {fix}")
        return made

    def _values(self, settings: Sequence[str]) -> dict[str, Any]:
        known = {parameter.name: parameter for parameter in self.parameters}
        listed = ", ".join(map(str, self.parameters)) or "no parameters"
        called = f"{self.name}()" if self.name == self.kind.name else f"{self.kind.name} {self.name}"
        takes = f"{called} takes {listed}"
        values: dict[str, Any] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise UsageError(f"--set {setting}: write --set key=value")
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise UnknownName(
                    self._unannotated(key) or f"--set {key}: there is no such parameter; {hint}{takes}"
                )
            values[key] = known[key].parse(text)
        missing = [p.name for p in self.parameters if p.required and p.name not in values]
        if missing:
            needed = " ".join(f"--set {name}=…" for name in missing)
            raise UsageError(f"{called} needs {needed}; {takes}{self.hint}")
        return values

    def _unannotated(self, name: str) -> str:
        """What to write if it is a parameter without an annotation; empty if it is none."""
        given = inspect.signature(self.target).parameters.get(name) if callable(self.target) else None
        if given is None:
            return ""
        kind = "str" if given.default is None else type(given.default).__name__
        return (
            f"--set {name}: the parameter {name!r} of {self.name}() has no annotation, which says how its "
            f"text is read: write {name}: {kind} = {given.default!r}"
        )


Job = Found[StreamBase]


def load_job(spec: str) -> Job:
    """Find a job: a built-in name, ``module:attribute`` or ``file.py:attribute``.

    Code of the user's own travels to the workers by value: they need not have the file.

    Raises:
        UnknownName: there is no such job, file, module or attribute.
        UsageError: it is not a Stream or a Table, nor a function that can be called from the command line.
        ShuffleError: the module raised when it was loaded; the text has its traceback.
    """
    return _load(spec, JOB)


def load_pipeline(spec: str) -> Found[Pipeline]:
    """Find a pipeline in the same way: a Pipeline, a class of such, or a function that returns one."""
    return _load(spec, PIPELINE)


def _load(spec: str, kind: Kind[Made]) -> Found[Made]:
    source, colon, attribute = spec.rpartition(":")
    if not colon:
        return _built_in(spec, kind)
    if not source or not attribute:
        raise UsageError(f"{spec!r} is not a {kind.name}: write module:attribute or file.py:attribute")
    is_file = source.endswith(".py") or "/" in source
    directory = Path(source).resolve().parent if is_file else Path.cwd()
    with _by_value(directory, kind):
        module = _load_file(Path(source)) if is_file else _load_module(source)
    if module.__file__ is not None:
        send_modules(local_modules(Path(module.__file__), directory))
    found = _found_in(module, attribute, spec, kind)
    return replace(found, directory=directory, source=Path(source).name if is_file else source)


def _built_in(name: str, kind: Kind[Made]) -> Found[Made]:
    if name not in kind.built_in:
        if name.endswith(".py"):
            raise UsageError(
                f"{name}: say which attribute of the file is the {kind.name}, as {name}:ATTRIBUTE"
            )
        near = difflib.get_close_matches(name, kind.built_in, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownName(
            f"there is no built-in {kind.name} {name!r}; {hint}there are {', '.join(sorted(kind.built_in))}, "
            "or write module:attribute or file.py:attribute"
        )
    module, _, attribute = kind.built_in[name].partition(":")
    return _found_in(importlib.import_module(module), attribute, name, kind)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownName(f"there is no file {path}")
    path = path.resolve()
    # A name of its own, so that a job file called 'json.py' does not take the place of another module.
    name = f"minishuffle_job_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ShuffleError as error:
        del sys.modules[name]
        _add_place(error)
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ShuffleError(f"{path} cannot be loaded: {told_from_outside(error, _is_ours)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UnknownName(
                f"there is no module {name!r} here or installed; for a file write {name}.py:ATTRIBUTE"
            ) from None
        raise ShuffleError(f"module {name} cannot be loaded: {told_from_outside(error, _is_ours)}") from error
    except ShuffleError as error:
        _add_place(error)
        raise
    except (Exception, SystemExit) as error:
        raise ShuffleError(f"module {name} cannot be loaded: {told_from_outside(error, _is_ours)}") from error
    return module


def _pickles(kind: Kind[Any]) -> list[Any]:
    """What packs functions of the user's: cloudpickle, and for a pipeline PySpark's own copy of it, which
    keeps a list of its own of the modules that go by value."""
    if kind is not PIPELINE or importlib.util.find_spec("pyspark") is None:
        return [cloudpickle]
    return [cloudpickle, importlib.import_module("pyspark.cloudpickle")]


@contextmanager
def _by_value(directory: Path | None, kind: Kind[Any]) -> Iterator[None]:
    """Code in here may import from ``directory``; what it loads from there is sent by value, as workers lack
    it.

    Installed packages go by name, also from a virtual environment under that directory.
    """
    if directory is None:
        yield
        return
    before, pickles = set(sys.modules), _pickles(kind)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have changed it
            sys.path.remove(str(directory))
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] == "minishuffle":
            continue
        path = Path(file).resolve()
        if path.is_relative_to(directory) and not {"site-packages", "dist-packages"} & set(path.parts):
            for pickle in pickles:
                pickle.register_pickle_by_value(module)


def _found_in(module: ModuleType, attribute: str, spec: str, kind: Kind[Made]) -> Found[Made]:
    made = [name for name, value in vars(module).items() if isinstance(value, kind.type)]
    if not hasattr(module, attribute):
        makes = [name for name, value in vars(module).items() if _may_make(value, module, kind)]
        own = made + [name for name in makes if name[0] != "_"]
        there = f"; {_meant(attribute, own)}there are {', '.join(own)}" if own else ""
        raise UnknownName(f"{spec}: there is no attribute {attribute!r}{there}")
    target = getattr(module, attribute)
    name = spec if spec in kind.built_in else attribute
    if isinstance(target, kind.type):
        return Found(kind, name, "", (), target)
    hint = f"; {_meant(attribute, made)}{kind.names} of the file: {', '.join(made)}" if made else ""
    if not callable(target) or (inspect.isclass(target) and not _is_kind(target, kind)):
        other = type(target).__name__
        raise UsageError(
            f"{spec} is of type {other}, not {kind.type_name} nor a function that returns one{hint}"
        )
    doc = (inspect.getdoc(target) or "").replace("``", "")
    return Found(kind, name, doc, _parameters(target, spec, hint), target, hint=hint)


def _meant(attribute: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(attribute, names, 1)
    return f"did you mean {near[0]!r}? " if near else ""


def _may_make(value: Any, module: ModuleType, kind: Kind[Any]) -> bool:
    """It is a function of the module's own, or a class, that may give what is looked for."""
    return (inspect.isfunction(value) or _is_kind(value, kind)) and value.__module__ == module.__name__


def _is_kind(target: Any, kind: Kind[Any]) -> bool:
    """Whether it is a class of a user's own whose objects are what is looked for."""
    return inspect.isclass(target) and issubclass(target, kind.type) and not inspect.isabstract(target)


def _parameters(function: Callable[..., Any], spec: str, hint: str) -> tuple[JobParameter, ...]:
    try:
        made_by = function.__init__ if inspect.isclass(function) else function
        hints = typing.get_type_hints(made_by, include_extras=True)
    except NameError as error:
        raise UsageError(f"{spec}: an annotation cannot be read: {error}{hint}") from None
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"{spec}: parameter {name} must not be positional-only{hint}")
        if name in hints:
            found.append(JobParameter(name, hints[name], parameter.default))
        elif parameter.default is REQUIRED:
            raise UsageError(f"{spec}: parameter {name} has no annotation, so no --set can give it{hint}")
    return tuple(found)


def _is_ours(filename: str) -> bool:
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen importlib")


def _add_place(error: ShuffleError) -> None:
    """Put the line of the user's file that it came from before the text, unless the text has it."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_package(frame)
    ]
    if not lines:
        return
    # The package computes schemas by way of functools.
    file, line = next((each for each in reversed(lines) if not each[0].startswith(INSTALLED)), lines[-1])
    place = f"{Path(file).name}:{line}"
    if place not in str(error):
        error.args = (f"{place}: {error}",)


def _is_package(frame: FrameType) -> bool:
    """Whether the code is the package's, or such as dataclasses make for it, which has no file."""
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    is_made = file == "<string>" and module.startswith("minishuffle.")
    return file.startswith(PACKAGE) or _is_ours(file) or is_made

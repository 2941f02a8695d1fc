"""``import`` of modules in the directory of a job's file by its functions; workers do not have these modules.

Their sources travel with the program. Each task has its own instances, under names that other jobs on the
same worker may use for other modules. So they are not in ``sys.modules``: an import statement asks the task
of its thread first. (``importlib.import_module`` does not.)
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

from minishuffle.operators.base import ModuleSource

__all__ = ["import_from"]

_plain_import = builtins.__import__


class _Loader(ExecutionLoader):
    """Loads a module from its source."""

    def __init__(self, source: ModuleSource) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source.text

    def get_filename(self, fullname: str) -> str:
        return self._source.path

    def is_package(self, fullname: str) -> bool:
        return self._source.is_package


class JobModules:
    """The modules of one task, loaded when they are first imported."""

    def __init__(self, sources: Mapping[str, ModuleSource]) -> None:
        self._sources = sources
        self._loaded: dict[str, ModuleType] = {}

    def has(self, name: str) -> bool:
        return name in self._sources

    def load(self, name: str) -> ModuleType:
        """Load a module, its packages first.

        Raises:
            ModuleNotFoundError: there is none. An error that the module itself raises when it is loaded is
                passed on.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._sources:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        package, _, last = name.rpartition(".")
        parent = self.load(package) if package else None
        if name in self._loaded:  # its package has imported it
            return self._loaded[name]
        loader = _Loader(self._sources[name])
        spec = spec_from_loader(name, loader)
        assert spec is not None
        module = self._loaded[name] = module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del self._loaded[name]
            raise
        if parent is not None:
            setattr(parent, last, module)
        return module


_of_thread: ContextVar[JobModules | None] = ContextVar("modules of the job", default=None)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: tuple[str, ...] | None = (),
    level: int = 0,
) -> Any:
    """(In the place of ``builtins.__import__``.)"""
    modules = _of_thread.get()
    if modules is None:
        return _plain_import(name, globals, locals, fromlist or (), level)
    whole = name
    if level:
        above = str((globals or {}).get("__package__") or "").split(".")
        whole = ".".join([*above[: len(above) - level + 1], *filter(None, [name])])
    if not modules.has(whole.partition(".")[0]):
        return _plain_import(name, globals, locals, fromlist or (), level)
    module = modules.load(whole)
    if not fromlist:
        return module if level else modules.load(whole.partition(".")[0])
    for each in fromlist:
        if not hasattr(module, each) and modules.has(f"{whole}.{each}"):
            modules.load(f"{whole}.{each}")
    return module


def import_from(sources: Mapping[str, ModuleSource]) -> None:
    """Have import statements that this thread executes from here on look there first, by module name."""
    if sources:
        builtins.__import__ = _import  # type: ignore[assignment]
        _of_thread.set(JobModules(sources))

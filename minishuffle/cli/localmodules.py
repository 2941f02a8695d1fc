"""The modules beside a job's file that it imports, wherever in its code: workers get their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from minishuffle.operators.base import ModuleSource

__all__ = ["local_modules"]


def local_modules(file: Path, directory: Path) -> dict[str, ModuleSource]:
    """Sources by module name, of those that lie in ``directory`` and that ``file``, or one of them, imports.

    What cannot be read as Python is left out: it raises when it is imported, if it ever is.
    """
    found: dict[str, ModuleSource] = {}
    pending = list(_imported(file, _package_of(file, directory)))
    while pending:
        name = pending.pop()
        if name in found or (source := _source_of(name, directory)) is None:
            continue
        found[name] = source
        package = name if source.is_package else name.rpartition(".")[0]
        pending += [name.rpartition(".")[0], *_imported(Path(source.path), package)]
    return found


def _package_of(file: Path, directory: Path) -> str:
    inner = file.resolve().parent
    return ".".join(inner.relative_to(directory).parts) if inner.is_relative_to(directory) else ""


def _source_of(name: str, directory: Path) -> ModuleSource | None:
    if not name:
        return None
    place = directory.joinpath(*name.split("."))
    for path, is_package in ((place / "__init__.py", True), (place.with_name(f"{place.name}.py"), False)):
        if path.is_file():
            try:
                return ModuleSource(path.read_text(encoding="utf-8"), str(path), is_package)
            except (OSError, UnicodeDecodeError):
                return None
    return None


def _imported(file: Path, package: str) -> Iterator[str]:
    """The names of all modules that may be meant by the import statements of a file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".") if package else []
            base = above[: len(above) - node.level + 1] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            yield whole
            yield from (".".join(filter(None, [whole, alias.name])) for alias in node.names)

"""The project's own source files, parsed: what the tests of its rules read."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

__all__ = ["PACKAGE", "RECIPES", "ROOT", "TESTS", "FunctionNode", "Module", "modules", "none_of", "part_of"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minishuffle"
TESTS = ROOT / "tests"
RECIPES = "examples/recipes/"
"""Programs of users, each for itself: they print, and no name in one has to do with a name elsewhere."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def part_of(path: str) -> str:
    """The part of the package that a path below it belongs to: its first name."""
    return path.partition("/")[0]


@dataclass(frozen=True)
class Module:
    """One source file; ``name`` is its path below the folder that it was found in."""

    name: str
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The folder, or the module at the top, that the file belongs to."""
        return part_of(self.name.removesuffix(".py"))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Everything in the file; walking it is what takes the time of these tests."""
        return tuple(ast.walk(self.tree))

    def functions(self) -> Iterator[FunctionNode]:
        return (node for node in self.nodes if isinstance(node, FunctionNode))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of everything imported, anywhere in the file; relative ones resolved."""
        package = ["minishuffle", *self.name.split("/")[:-1]]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def calls(self) -> Iterator[tuple[int, str]]:
        """Line and name, as written, of everything that is called."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node.lineno, ast.unparse(node.func)


@cache
def modules(folder: Path) -> tuple[Module, ...]:
    found = []
    gc.disable()  # A million nodes that stay: collections find nothing while they are made, nor later.
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(folder).as_posix(), text, ast.parse(text)))
    gc.freeze()
    gc.enable()
    assert found, f"no files in {folder}"
    return tuple(found)


def none_of(problems: list[str]) -> None:
    """Fail with every problem, a line each."""
    assert not problems, "\n" + "\n".join(problems)

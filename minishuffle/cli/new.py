"""``minishuffle new NAME``: a project to begin with."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

import click

from minishuffle.cli.terminal import echo
from minishuffle.errors import UsageError

__all__ = ["new"]

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
TEMPLATES: Final = "project"
"""The folder of the examples with the files of a project, in which ``$name`` stands for its name."""
SUFFIX: Final = ".template"
"""What their names end in, so that none is imported, compiled or checked as a part of this package."""


@click.command()
@click.argument("name")
def new(name: str) -> None:
    """Write a project into the folder NAME: a job, a test of it alone, one on a cluster, and a README.

    Its tests need pytest, which minishuffle does not install.
    """
    write_project(Path(), name)
    echo(f"{name}/README.md says what is there; to begin:")
    for line in (f"cd {name}", "python orders.py", "python -m pip install pytest", "python -m pytest"):
        echo(f"  {line}")


def write_project(parent: Path, name: str) -> None:
    """Make the folder ``parent/name`` with all files of a project, or nothing.

    Raises:
        UsageError: it is no name, or a module's of Python, the folder is not empty, or it cannot be written.
    """
    if NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r:.80} is no name for a project: write up to 64 letters (a to z), digits, '-' and '_', a "
            "letter first, such as 'my-job'"
        )
    if name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is a module of Python, which a folder of that name may hide: choose another "
            f"one, such as '{name}-job'"
        )
    folder = parent / name
    if folder.is_symlink() or (folder.exists() and not _is_empty(folder)):
        raise UsageError(f"{name} exists already, and is no empty folder: choose another name, or remove it")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as beside:
            made = Path(beside, name)
            made.mkdir()
            for template in files("minishuffle.examples").joinpath(TEMPLATES).iterdir():
                text = Template(template.read_text(encoding="utf-8")).substitute(name=name)
                (made / template.name.removesuffix(SUFFIX)).write_text(text, encoding="utf-8")
            made.rename(folder)  # All at once; onto an empty folder if there is one.
    except OSError as error:
        raise UsageError(
            f"{name} cannot be written into {parent.absolute()}: {error.strerror}: go where there is room, "
            "and you may write"
        ) from error


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())

"""``minishuffle explain MS-111``: what an error is, with an example and the fix."""

from __future__ import annotations

import builtins
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from minishuffle.cli.session import late_global_options
from minishuffle.cli.terminal import echo
from minishuffle.errors import UnknownName

__all__ = ["Explanation", "explain", "explanations"]

TEXTS: Final = Path(__file__).with_name("explanations.md")
SECTION: Final = re.compile(r"^## (MS-\d+) (\w+)\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FENCED: Final = re.compile(r"^```\w*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LINE: Final = re.compile(r"^(?=.)", re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """What there is to say of one class of errors."""

    number: str
    name: str
    text: str
    """Paragraphs that begin with ``Cause:``, ``Example:`` and ``Fix:``, in Markdown."""

    @property
    def summary(self) -> str:
        """The first sentence of the cause."""
        cause = " ".join(self.text.removeprefix("Cause: ").split())
        return cause.partition(". ")[0]

    @property
    def shown(self) -> str:
        """For a terminal: code is indented, not fenced."""
        text = FENCED.sub(lambda found: LINE.sub("    ", found[1]), self.text)
        return f"{self.number} {self.name}\n\n{text.rstrip()}"


def explanations() -> list[Explanation]:
    """All of them, by number."""
    return [Explanation(*found) for found in SECTION.findall(TEXTS.read_text(encoding="utf-8"))]


@click.command()
@click.argument(
    "code",
    required=False,
    shell_complete=lambda context, parameter, typed: [
        each.number for each in explanations() if each.number.startswith(typed.upper())
    ],
)
@late_global_options
def explain(code: str | None) -> None:
    """Explain an error by its CODE, such as MS-111: the cause, an example and the fix.

    CODE may be the name of its class, as a traceback has it: TaskFailed. Without CODE all are listed. (The
    plan of a job is shown by submit --describe.)
    """
    known = explanations()
    if code is None:
        for each in known:
            echo(f"{each.number}  {each.name:20}  {each.summary}")
        return
    for each in known:
        if code.lower() in (each.number.lower(), f"ms{each.number[3:]}", each.number[3:], each.name.lower()):
            echo(each.shown)
            return
    if isinstance(kind := getattr(builtins, code, None), type) and issubclass(kind, BaseException):
        raise UnknownName(
            f"{code} is not of minishuffle: a function of yours raised it, and the traceback names its line; "
            "see 'minishuffle explain MS-160' (TaskFailed) for a job that failed of it"
        )
    names = {name.lower(): each for each in known for name in (each.number, each.name)}
    near = difflib.get_close_matches(code.lower(), names, 1)
    hint = f"did you mean {names[near[0]].number} ({names[near[0]].name})? " if near else ""
    raise UnknownName(f"no error has the code {code!r}; {hint}'minishuffle explain' lists all")

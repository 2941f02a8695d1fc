"""The documents agree with the code: links, settings, commands, targets, files, and the credit exchange."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from minishuffle.cli.main import cli
from minishuffle.config import ClusterSettings
from minishuffle.plan.graph import JobSettings
from minishuffle.protocol.credit import BufferKind, ReceiveCredit, SendCredit

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "minishuffle", ROOT / "deploy")
DOCUMENTS = [ROOT / "README.md", *sorted(path for folder in FOLDERS for path in folder.rglob("README.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
FIRST_BYTES_MAX = 9_000
"""Of the first document: what a newcomer reads in ten minutes."""

WORDS = (
    "buffer",
    "segment",
    "credit",
    "backlog",
    "gate",
    "channel",
    "split",
    "slot",
    "exclusive",
    "floating",
)

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^    .*$", re.MULTILINE)
GENERATED = re.compile(r"<!-- metrics:begin -->.*<!-- metrics:end -->", re.DOTALL)
UNCLEAR = re.compile(
    r"\b(mend|visitors?|strangers?|story|figures?|(?<!long )polls|ending|asked|farewell|hang up"
    r"|(?<!--take-)over|told|said again|of another's|who comes|no workers|at this worker's door"
    r"|promised to jobs)\b"
    r"|(?:^|[.:;] )Of ",
    re.MULTILINE,
)
"""Words that leave a reader guessing; the field has its own for each."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """What stands below that heading, up to the next one of the same level."""
    found = text_of(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"{name} has no section {title!r}"
    return found


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_there_is_one_document_for_each_part() -> None:
    parts = {"", "api", "spark", "observe", "cli", "bench"}
    assert set(NAMES) >= {"README.md", *(Path("minishuffle", part, "README.md").as_posix() for part in parts)}


# --- the first document ----------------------------------------------------------------------------


def test_the_first_document_is_short() -> None:
    assert len(text_of("README.md").encode()) <= FIRST_BYTES_MAX


def test_the_first_job_has_twelve_lines_of_code_at_most() -> None:
    code = re.findall(r"^```python\n(.*?)^```$", text_of("README.md"), re.MULTILINE | re.DOTALL)[0]
    assert 0 < len([line for line in code.splitlines() if line]) <= 12


def test_the_text_of_the_picture_says_what_the_picture_says() -> None:
    """And names what it draws; draw it anew, and its text is to be written anew."""
    [(text, file)] = re.findall(r"!\[([^\]]+)\]\(([^)]+\.svg)\)", text_of("README.md"))
    drawn = " ".join(re.findall(r"<text[^>]*>([^<]+)</text>", text_of(file)))
    durations = re.findall(r"\d[\d.]* m?s\b", text)
    assert len(durations) == 4 and set(durations) == set(re.findall(r"\d[\d.]* m?s\b", drawn))
    assert re.findall(r"\d+ failures", text) == [f"{re.findall(r'longest of (.+?):', drawn)[0]} failures"]


def test_the_words_come_first_in_the_document_of_how_it_works() -> None:
    title, table = re.findall(
        r"^## ([^\n]+)\n(.*?)^## ", text_of("minishuffle/README.md"), re.MULTILINE | re.DOTALL
    )[0]
    assert title == "Ten words"
    words = [row[0] for row in rows(table)]
    assert len(words) == len(WORDS)
    assert {word for word in WORDS if any(each.startswith(word) for each in words)} == set(WORDS)


def test_the_first_document_links_to_all_others() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", text_of("README.md")))
    assert linked >= set(NAMES) - {"README.md"}


# --- links and names -------------------------------------------------------------------------------


def anchors(name: str) -> set[str]:
    """The anchors of a document's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(name)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(name: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", FENCED.sub("", text_of(name))):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if not there.is_file() or not there.is_relative_to(ROOT):
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(there.relative_to(ROOT).as_posix()):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_every_link_and_anchor_resolves(name: str) -> None:
    assert list(broken_links(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_file_and_module_that_is_named_exists(name: str) -> None:
    text = text_of(name)
    files = set(re.findall(r"`((?:[\w.]+/)+[\w.-]+\.(?:py|txt|toml))`", text))
    modules = set(re.findall(r"`(minishuffle(?:\.[a-z_]+)+)`", text))
    missing = {file for file in files if not any((base / file).is_file() for base in bases(name))}
    missing |= {module for module in modules if not importable(module)}
    assert not missing


def bases(name: str) -> list[Path]:
    return [ROOT, ROOT / "minishuffle", (ROOT / name).parent]


def importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", NAMES)
def test_documents_use_the_words_of_the_field(name: str) -> None:
    prose = PRINTED.sub("", FENCED.sub("", GENERATED.sub("", text_of(name))))
    assert [match[0] for match in UNCLEAR.finditer(prose)] == []


# --- commands, targets, settings -------------------------------------------------------------------


def commands(name: str) -> set[str]:
    """Every line with minishuffle that somebody may type, without its comment."""
    lines = re.findall(r"^(?:    |\$ )minishuffle (.+?)(?:  +#.*)?$", text_of(name), re.MULTILINE)
    inline = re.findall(r"`minishuffle ([^`]+)`", text_of(name))
    return {line.rstrip() for line in (*lines, *inline) if not line.startswith("COMMAND")}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_that_is_named_exists(name: str) -> None:
    for line in commands(name):
        command: click.Command | None = cli
        for word in line.split():
            if isinstance(command, click.Group) and not word.startswith("-"):
                command = command.get_command(click.Context(command), word)
        assert command is not None and not isinstance(command, click.Group), line
        flags = {flag for taker in (cli, command) for parameter in taker.params for flag in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", line)) <= flags, line


def test_every_command_is_named() -> None:
    named = {
        " ".join(re.findall(r"^[a-z]+(?: [a-z][a-z-]*)?", line))
        for line in commands("minishuffle/cli/README.md")
    }
    for word in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), word)
        if not isinstance(command, click.Group):
            assert any(name.split()[0] == word for name in named), word
        elif word != "bench":  # Its commands have a document of their own.
            for below in command.commands:
                assert any(name.startswith(f"{word} {below}") for name in named), f"{word} {below}"


def test_every_make_target_that_is_named_exists() -> None:
    text = "\n".join(map(text_of, NAMES))
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE))
    assert named >= {"demo", "test", "test-fast", "fmt", "lint", "types", "soak", "bench"}
    assert named <= set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))


def test_the_settings_and_their_defaults_are_those_of_the_code() -> None:
    text = section("minishuffle/cli/README.md", "Settings")
    listed = {re.sub("`", "", name): json.loads(default) for name, default, _ in rows(text)}
    assert listed == {name: field.default for name, field in ClusterSettings.model_fields.items()}
    for name, field in JobSettings.model_fields.items():
        assert re.search(rf"`{name}`\s+\({re.escape(str(field.default))}[ );]", text), name


# --- one recovery ---------------------------------------------------------------------------------


def test_the_recovery_is_quoted_from_its_transcripts() -> None:
    text = section("minishuffle/README.md", "One recovery, step by step")
    quoted = re.findall(r"^```text\n(.*?\n)```$", text, re.MULTILINE | re.DOTALL)
    files = [f"tests/{part}/transcripts/recovery.txt" for part in ("coordinator", "worker")]
    assert len(quoted) == len(files)
    assert all(quote in text_of(file) for quote, file in zip(quoted, files, strict=True))


# --- the credit exchange ---------------------------------------------------------------------------


class Exchange:
    """A producer with full buffers, a consumer with exclusive ones, and the floating ones of its gate."""

    def __init__(self, exclusive: int, floating: int, backlog: int) -> None:
        self.receive: ReceiveCredit[int] = ReceiveCredit(list(range(exclusive)))
        self.send = SendCredit(exclusive)
        self.backlog = backlog
        self.gate = list(range(exclusive, exclusive + floating))
        self.arrived: list[tuple[BufferKind, int]] = []

    def buffer(self) -> None:
        """One BufferResponse, and what the channel borrows for the backlog in its header."""
        self.send.spend()
        self.backlog -= 1
        self.arrived.append(self.receive.on_buffer())
        for _ in range(self.receive.on_backlog(self.backlog)):
            if not self.gate:
                self.receive.waiting = True
                break
            self.receive.on_floating(self.gate.pop())
        self.receive.waiting &= self.receive.idle < self.receive.required

    def consume(self) -> None:
        """The task gives its oldest buffer back."""
        kind, buffer = self.arrived.pop(0)
        if kind is BufferKind.FLOATING:
            self.gate.append(buffer)
        else:
            assert self.receive.on_consumed(buffer) is None

    def announce(self) -> int:
        """One AddCredit."""
        credit = self.receive.take_unannounced()
        self.send.grant(credit)
        return credit

    def state(self) -> list[int]:
        self.receive.validate()
        receive = self.receive
        free = [len(receive.exclusive), len(receive.floating), len(self.gate)]
        return [self.send.available, self.backlog, *free]


def test_the_credit_exchange_is_what_the_ledgers_do() -> None:
    exchange = Exchange(exclusive=2, floating=3, backlog=6)
    seen = [exchange.state()]
    exchange.buffer()
    assert (exchange.backlog, exchange.receive.required, exchange.receive.waiting) == (5, 7, True)
    seen.append(exchange.state())
    assert exchange.announce() == 3
    seen.append(exchange.state())
    for _ in range(4):
        exchange.buffer()
    seen.append(exchange.state())
    exchange.consume()
    assert exchange.announce() == 1
    seen.append(exchange.state())
    exchange.buffer()
    assert not exchange.receive.waiting
    seen.append(exchange.state())
    for _ in range(3):
        exchange.consume()
    assert exchange.receive.unannounced == 0
    seen.append(exchange.state())
    for _ in range(2):
        exchange.consume()
    assert exchange.announce() == 2
    seen.append(exchange.state())
    chapter = section("minishuffle/README.md", "How flow control works")
    table = rows(chapter.partition("### One credit exchange\n")[2].partition("\n### ")[0])
    assert [[int(cell) for cell in row[1:]] for row in table] == seen

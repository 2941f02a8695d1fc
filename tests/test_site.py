"""The site that ``make docs`` builds: links, names that are found, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import minishuffle
from minishuffle.cli.explanations import explanations
from minishuffle.errors import ShuffleError
from support.browser import chromium, shown

pytestmark = [pytest.mark.extra, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".site" / "built"
DRAFT = re.compile(r":\w+:<code>|::</p>|<p>[^<]*\n- ")
"""What docstrings and documents hold that Markdown does not know, or reads otherwise than GitHub."""


class Page(HTMLParser):
    """A page's anchors, the links in it, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if "href" in given:
            (self.links if tag == "a" else self.loaded).append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    """By file, once the site is built; strictly, so that a warning is an error."""
    command = [sys.executable, "scripts/build-docs"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return {path: Page(path) for path in SITE.rglob("*.html")}


def test_every_link_leads_to_something_and_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # Its links begin at the root of a server.
            continue
        assert not [each for each in page.loaded if urlsplit(each).netloc], path
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = pages[target].anchors | {""} if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in there:
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert broken == []


def test_each_document_is_a_page_that_reads_as_on_github(pages: dict[Path, Page]) -> None:
    documents = [path for room in ("minishuffle", "deploy") for path in (ROOT / room).rglob("README.md")]
    for path in (ROOT / "README.md", *documents):
        assert SITE / path.relative_to(ROOT).with_name("index.html") in pages
    recipes = [*(ROOT / "minishuffle" / "examples" / "recipes").glob("[!_]*.py")]
    assert recipes
    for path in recipes:
        assert SITE / path.relative_to(ROOT).with_suffix(".html") in pages
    drafts = {path: DRAFT.search(path.read_text(encoding="utf-8")) for path in pages}
    assert {str(path): found[0] for path, found in drafts.items() if found} == {}


def test_public_names_commands_and_errors_are_found(pages: dict[Path, Page]) -> None:
    index = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles: defaultdict[str, set[str]] = defaultdict(set)
    for entry in index["docs"]:
        titles[entry["title"]].add(entry["location"].partition("#")[0])
    for name in set(minishuffle.__all__) - {"__version__"}:
        value = getattr(minishuffle, name)
        if not (isinstance(value, type) and issubclass(value, ShuffleError)):
            assert f"minishuffle.{name}" in pages[SITE / "reference" / f"{name}.html"].anchors
    assert "reference/Stream.html" in titles["flat_map"]
    assert titles["minishuffle jobs show"] == {"commands.html"}
    for each in explanations():
        assert titles[f"{each.number} {each.name}"] == {"minishuffle/cli/explanations.html"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(pages: dict[Path, Page]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_reader_finds_an_error_by_its_code(served: str) -> None:
    with chromium() as browser, shown(browser, f"{served}/index.html") as found:
        elsewhere: list[str] = []
        page = found.page
        page.on(
            "request",
            lambda request: None if request.url.startswith(served) else elsewhere.append(request.url),
        )
        search = page.get_by_placeholder("Search")
        search.click()  # Loads the index: what is typed before it is there may go unseen.
        found.see("Type to start searching", within=".md-search-result__meta")
        search.press_sequentially("PeerLost")  # The page looks when a key is let go.
        page.locator(".md-search-result__item a").get_by_text("MS-140 PeerLost").first.click()
        found.see("is gone or was never there")
        assert found.console == []
        assert elsewhere == []

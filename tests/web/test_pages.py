"""The files of the page: they are what the sources give, name nothing outside, and are served with care."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from multidict import CIMultiDictProxy

from minishuffle.web.pages import page_files
from minishuffle.web.server import WebServer, serve_coordinator_web
from support.accesses import access
from support.coordinators import ScriptedCoordinator
from support.sources import ROOT

BUILD_SECONDS_MAX = 120


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    started = await serve_coordinator_web(ScriptedCoordinator(), 0, access())
    yield started
    await started.close()


async def get(server: WebServer, path: str, **headers: str) -> tuple[int, CIMultiDictProxy[str], bytes]:
    url = f"http://127.0.0.1:{server.port}{path}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.get(url, headers=named) as response:
        return response.status, response.headers, await response.read()


@pytest.mark.extra
def test_what_is_committed_is_what_the_sources_give(tmp_path: Path) -> None:
    """With the packages that package-lock.json names; scripts/bootstrap --tests has installed them."""
    environment = {name: os.environ[name] for name in ("HOME", "PATH")}
    command = [ROOT / "scripts" / "build-page", tmp_path]
    built = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX
    )
    assert built.returncode == 0, built.stderr
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = page_files()
    assert found.keys() == committed.keys()
    stale = [name for name, content in found.items() if content != committed[name]]
    assert stale == [], "run scripts/build-page and commit what it makes"


def test_scripts_and_styles_are_files_of_this_server_alone() -> None:
    page = page_files()["index.html"].decode()
    names = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sorted(names) == ["page/app.js", "page/icon.svg", "page/style.css"]
    assert {name.removeprefix("page/") for name in names} <= page_files().keys()
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", page)
    for name in ("app.js", "style.css"):
        text = page_files()[name].decode()
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org"}, "names of formats, which nobody fetches"
        assert "eval(" not in text
        assert "new Function" not in text


async def test_browsers_get_the_page_and_others_a_list(server: WebServer) -> None:
    status, headers, body = await get(server, "/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body == page_files()["index.html"]
    status, headers, body = await get(server, "/")
    assert headers["Content-Type"].startswith("text/plain")
    assert b"/openapi.json" in body


@pytest.mark.parametrize(
    ("name", "kind"),
    [("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")],
)
async def test_files_say_what_may_be_done_with_them(server: WebServer, name: str, kind: str) -> None:
    status, headers, body = await get(server, f"/page/{name}")
    assert (status, body) == (200, page_files()[name])
    assert headers["Content-Type"].startswith(kind)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    again = await get(server, f"/page/{name}", If_None_Match=headers["ETag"])
    assert (again[0], again[2]) == (304, b"")


async def test_nothing_else_is_served(server: WebServer) -> None:
    for path in ("/page/", "/page/../pages.py", "/page/%2e%2e/pages.py", "/page/app.tsx"):
        assert (await get(server, path))[0] == 404

"""Errors below ``/api/`` are JSON, whatever went wrong; elsewhere they stay as they are."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from minishuffle.errors import AuthenticationError, ShuffleError, UnknownName, UsageError
from minishuffle.web.guard import check_host, check_reader
from minishuffle.web.refusals import answer_failures
from minishuffle.wire.requests import Failure
from support.accesses import TOKEN, access

PATH = "/api/v1/jobs"


async def broken(_request: web.Request) -> web.Response:
    raise RuntimeError("not today")


@asynccontextmanager
async def asked(path: str, method: str = "GET", **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer of a server whose every handler raises."""
    app = web.Application(middlewares=[answer_failures, check_host(access()), check_reader(access())])
    app.router.add_get(PATH, broken)
    app.router.add_get("/metrics", broken)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.request(method, server.make_url(path), headers=named) as response,
    ):
        yield response


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "code", "text"),
    [
        ("/api/v2", "GET", {}, 404, UnknownName.code, "there is no /api/v2: /openapi.json describes"),
        ("/api/%0a%1b%ff", "GET", {}, 404, UnknownName.code, "there is no /api/%0A%1B%FF: "),
        (
            PATH,
            "PUT",
            {"Authorization": f"Bearer {TOKEN}"},
            405,
            UsageError.code,
            f"{PATH} takes GET, HEAD, not PUT",
        ),
        (
            PATH,
            "POST",
            {},
            401,
            AuthenticationError.code,
            "this needs the token: 'minishuffle cluster token'",
        ),
        (PATH, "GET", {"Host": "evil.example"}, 403, AuthenticationError.code, "this server answers as"),
        (
            PATH,
            "GET",
            {"Sec_Fetch_Site": "cross-site"},
            403,
            AuthenticationError.code,
            "pages of other sites",
        ),
        (PATH, "GET", {}, 500, ShuffleError.code, "an error in the server"),
    ],
)
async def test_what_goes_wrong_is_a_failure(
    path: str, method: str, headers: dict[str, str], status: int, code: int, text: str
) -> None:
    async with asked(path, method, **headers) as response:
        assert (response.status, response.content_type) == (status, "application/json")
        found = Failure.model_validate_json(await response.read())
        assert (found.code, found.text[: len(text)]) == (code, text)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert ("WWW-Authenticate" in response.headers, "Allow" in response.headers) == (
            status == 401,
            status == 405,
        )


async def test_what_is_broken_in_here_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with asked(PATH):
        pass
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == f"GET {PATH} failed"
    assert record.exc_info is not None and "not today" in str(record.exc_info[1])


async def test_other_paths_answer_as_text() -> None:
    async with asked("/api") as response:
        assert (response.status, response.content_type) == (404, "text/plain")
    async with asked("/metrics") as response:
        assert (response.status, response.content_type) == (500, "text/plain")

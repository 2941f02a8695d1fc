"""Who is let in: by where a request comes from, what it wants, and what it has."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from minishuffle.config import web_token
from minishuffle.web.guard import check_reader

TOKEN = web_token(b"secret")
HOST = "127.0.0.1:8472"


async def status_of(
    method: str = "GET", path: str = "/api/v1/jobs", peer: str = "127.0.0.1", **headers: str
) -> int:
    transport = Mock()
    transport.get_extra_info = {"peername": (peer, 4711), "sockname": ("127.0.0.1", 8472)}.get
    named = {"Host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = make_mocked_request(method, path, headers=named, transport=transport)

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    try:
        return (await check_reader(TOKEN)(request, handler)).status
    except web.HTTPException as refused:
        return refused.status


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
async def test_this_machine_reads_without_a_token(peer: str) -> None:
    assert await status_of(peer=peer) == 200
    assert await status_of("POST", peer=peer) == 401
    assert await status_of("DELETE", peer=peer) == 401


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0", ""])
async def test_others_need_the_token(peer: str) -> None:
    assert await status_of(peer=peer) == 401
    assert await status_of(peer=peer, Authorization="Bearer wrong") == 401
    assert await status_of(peer=peer, Authorization=f"Bearer {TOKEN}") == 200
    assert await status_of("POST", peer=peer, Authorization=f"Bearer {TOKEN}") == 200
    assert await status_of(path="/metrics", peer=peer) == 200, "as before"


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer x", f"bearer {TOKEN}", TOKEN, "Bearer sch\u00f6n"])
async def test_a_wrong_token_is_refused_even_where_none_is_needed(given: str) -> None:
    assert await status_of(Authorization=given) == 401


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HOST}", 200),
        ("http://127.0.0.1:9000", 403),
        ("http://evil.example", 403),
        (f"http://{HOST}.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
async def test_pages_of_other_origins_get_nothing(origin: str, status: int) -> None:
    assert await status_of(Origin=origin) == status
    assert await status_of("POST", Origin=origin, Authorization=f"Bearer {TOKEN}") == status


@pytest.mark.parametrize(
    ("site", "status"), [("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)]
)
async def test_what_the_browser_says_of_the_site_counts(site: str, status: int) -> None:
    assert await status_of(Sec_Fetch_Site=site) == status


def test_the_token_follows_from_the_secret_alone() -> None:
    assert web_token(b"secret") == TOKEN != web_token(b"other")
    assert "secret" not in TOKEN
    assert len(TOKEN) == 64

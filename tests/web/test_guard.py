"""Who is let in: by what a request wants, what it has, and under which name it comes."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from minishuffle.config import ClusterSettings, read_token, web_token
from minishuffle.web.guard import HEALTH, WebAccess, check_host, check_reader
from support.accesses import READ_TOKEN, TOKEN, access, worker_access

HOST = "127.0.0.1:8472"
API = "/api/v1/jobs"
FULL, READ = f"Bearer {TOKEN}", f"Bearer {READ_TOKEN}"
OPEN, GUARDED = access(), access(reads_are_open=False)
SHOWN = {"subjectAltName": (("DNS", "prometheus"),)}
BROWSER = "text/html,application/xhtml+xml"


async def answered(
    given: WebAccess,
    method: str = "GET",
    path: str = API,
    certificate: dict[str, object] | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Status and text."""
    transport = Mock()
    known = {"peername": ("10.0.0.7", 4711), "sockname": ("10.0.0.1", 8472), "peercert": certificate}
    transport.get_extra_info = known.get
    named = {"Host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = make_mocked_request(method, path, headers=named, transport=transport)

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def read(request: web.Request) -> web.StreamResponse:
        return await check_reader(given)(request, handler)

    try:
        return (await check_host(given)(request, read)).status, ""
    except web.HTTPException as refused:
        return refused.status, refused.text or ""


async def status_of(given: WebAccess, method: str = "GET", path: str = API, **headers: str) -> int:
    return (await answered(given, method, path, **headers))[0]


@pytest.mark.parametrize("path", [API, "/metrics", "/sd/prometheus", "/", "/nothing"])
async def test_reads_take_a_token_where_they_are_not_open(path: str) -> None:
    assert await status_of(OPEN, path=path) == 200
    assert await status_of(GUARDED, path=path) == 401
    assert await status_of(GUARDED, path=path, Authorization=FULL) == 200
    assert await status_of(GUARDED, path=path, Authorization=READ) == 200
    assert await status_of(GUARDED, path=path, Authorization="Bearer wrong") == 401
    assert await status_of(GUARDED, "HEAD", path) == 401


@pytest.mark.parametrize("given", [OPEN, GUARDED], ids=["open", "guarded"])
async def test_changes_take_the_token_that_does_not_only_read(given: WebAccess) -> None:
    for method in ("POST", "DELETE", "PUT"):
        assert await status_of(given, method) == 401
        status, text = await answered(given, method, Authorization=READ)
        assert (status, text) == (401, "that token only reads: 'minishuffle cluster token' prints it\n")
        assert await status_of(given, method, Authorization=FULL) == 200


async def test_a_worker_takes_no_token_that_changes_anything() -> None:
    guarded = worker_access(reads_are_open=False)
    assert await status_of(guarded, Authorization=READ) == 200
    status, text = await answered(guarded, Authorization=FULL)
    assert (status, "cluster token --read" in text) == (401, True)
    assert await status_of(worker_access(), "POST", Authorization="Bearer None") == 401


@pytest.mark.parametrize("reads_are_open", [True, False])
async def test_a_certificate_may_be_wanted_of_all_but_probes(reads_are_open: bool) -> None:
    strict = access(reads_are_open=reads_are_open, certificates=True)
    assert await status_of(strict, path=HEALTH) == 200
    for path in (API, "/metrics", "/page/app.js", "/"):
        status, text = await answered(strict, path=path, Authorization=FULL)
        assert (status, "needs a certificate of the cluster's CA" in text) == (403, True)
        assert (await answered(strict, path=path, certificate=SHOWN))[0] == 200
        assert (await answered(strict, path=path, certificate=SHOWN, Authorization=READ))[0] == 200
    assert (await answered(strict, "POST", certificate=SHOWN))[0] == 401
    assert (await answered(strict, "POST", certificate=SHOWN, Authorization=FULL))[0] == 200


@pytest.mark.parametrize(
    ("path", "accept"),
    [(HEALTH, ""), ("/openapi.json", ""), ("/page/app.js", ""), ("/", BROWSER)],
)
async def test_what_is_the_same_in_every_cluster_is_open(path: str, accept: str) -> None:
    assert await status_of(GUARDED, path=path, Accept=accept) == 200


async def test_probes_may_name_any_host() -> None:
    assert await status_of(GUARDED, path=HEALTH, Host="balancer.example") == 200
    assert await status_of(GUARDED, path="/metrics", Host="balancer.example", Authorization=READ) == 403


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer x", f"bearer {TOKEN}", TOKEN, "Bearer sch\u00f6n"])
async def test_a_wrong_token_is_refused_even_where_none_is_needed(given: str) -> None:
    assert await status_of(OPEN, Authorization=given) == 401


ORIGINS = [
    (f"http://{HOST}", 200),
    ("http://127.0.0.1:9000", 403),
    ("http://evil.example", 403),
    (f"http://{HOST}.evil.example", 403),
    ("null", 403),
    ("", 403),
    ("http://[", 403),
]


@pytest.mark.parametrize(("origin", "status"), ORIGINS)
async def test_pages_of_other_origins_get_nothing(origin: str, status: int) -> None:
    assert await status_of(OPEN, Origin=origin) == status
    assert await status_of(OPEN, "POST", Origin=origin, Authorization=FULL) == status


@pytest.mark.parametrize(
    ("site", "status"), [("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)]
)
async def test_what_the_browser_says_of_the_site_counts(site: str, status: int) -> None:
    assert await status_of(OPEN, Sec_Fetch_Site=site) == status


@pytest.mark.parametrize("host", ["shuffle.example", "SHUFFLE.example:443", HOST, "10.0.0.1:8472"])
async def test_a_proxy_gives_a_server_further_names(host: str) -> None:
    behind = access(hosts=frozenset({"shuffle.example"}))
    assert await status_of(behind, Host=host) == 200
    # The proxy passes the name on that the browser used, or puts the server's in its place.
    assert await status_of(behind, Host=host, Origin="https://shuffle.example") == 200
    assert await status_of(behind, Host=host, Origin="https://other.example") == 403


async def test_other_names_are_refused_with_the_setting() -> None:
    status, text = await answered(OPEN, Host="shuffle.example")
    assert (status, "web_hosts" in text) == (403, True)


@pytest.mark.parametrize(
    ("web_auth", "bound", "reads_are_open"),
    [
        ("auto", "127.0.0.1", True),
        ("auto", "localhost", True),
        ("auto", "::1", True),
        ("auto", "::ffff:127.0.0.1", True),
        ("auto", "0.0.0.0", False),
        ("auto", "10.0.0.7", False),
        ("auto", "::", False),
        ("auto", "fe80::1%eth0", False),
        ("open", "10.0.0.7", True),
        ("token", "127.0.0.1", False),
    ],
)
def test_the_port_and_the_setting_say_who_reads(web_auth: str, bound: str, reads_are_open: bool) -> None:
    settings = ClusterSettings(web_auth=web_auth, web_hosts=" a.example, B.example ,")  # type: ignore[arg-type]
    for made in (
        WebAccess.of_coordinator(settings, bound, b"secret"),
        WebAccess.of_worker(settings, bound, b"secret"),
    ):
        assert made.reads_are_open is reads_are_open
        assert made.hosts == {"a.example", "b.example"}
        assert made.read_token == read_token(b"secret")
    worker = WebAccess.of_worker(settings, bound, b"secret", "Node.example")
    assert (worker.token, worker.hosts) == (None, {"a.example", "b.example", "node.example"})


def test_the_tokens_follow_from_the_secret_alone() -> None:
    assert web_token(b"secret") != web_token(b"other")
    assert read_token(b"secret") not in (web_token(b"secret"), read_token(b"other"))
    for token in (web_token(b"secret"), read_token(b"secret")):
        assert "secret" not in token
        assert len(token) == 64


def test_tokens_stand_in_no_log() -> None:
    settings, secret = ClusterSettings(), b"s" * 32
    access = WebAccess.of_coordinator(settings, "127.0.0.1", secret)
    assert access.token and not {access.token, access.read_token} & set(
        re.findall(r"[0-9a-f]+", repr(access))
    )

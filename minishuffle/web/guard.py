"""Access to the HTTP servers.

A server that listens only on loopback is readable by everyone; any other requires a token for reading. Every
change requires the coordinator's token. With TLS, a certificate of the cluster's CA may replace the token for
reading.

There are two tokens, so that a client that only reads (Prometheus, another process of the cluster) cannot
change anything. Both are derived from the cluster's secret, and do not reveal it. ``/healthz`` is open to
all, and so are files that are the same in every cluster of a release: the page's files and the description of
the REST interface.

Three checks keep web pages of other sites out: ``Host`` must be a name of this server (DNS rebinding),
``Origin`` and ``Sec-Fetch-Site`` must not name another site (CSRF), and the token is in a header, which no
browser adds by itself.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from minishuffle.config import ClusterSettings, read_token, web_token
from minishuffle.ids import Address
from minishuffle.web.refusals import API
from minishuffle.wire.advertised import is_loopback, parse_host

__all__ = [
    "HEALTH",
    "PAGE",
    "SECURITY_HEADERS",
    "WebAccess",
    "check_host",
    "check_reader",
    "reached_at",
    "wants_page",
]

HEALTH: Final = "/healthz"
PAGE: Final = "/page/"
DOCUMENT_PATH: Final = "/openapi.json"

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""For what browsers show; scripts and styles come from files of this server alone."""


@dataclass(frozen=True, slots=True)
class WebAccess:
    """Who may ask one server for what."""

    bound: str
    """The host that it listens on."""
    hosts: frozenset[str]
    """Further names under which it is reached, in small letters."""
    reads_are_open: bool
    read_token: str = field(repr=False)
    """Opens what is read."""
    token: str | None = field(repr=False)
    """Opens everything; None: the server changes nothing, and is to see no token that does."""
    certificates: bool = False
    """A certificate of the cluster's CA opens what is read, and nothing but ``/healthz`` is open without."""

    @classmethod
    def of_coordinator(cls, settings: ClusterSettings, bound: str, secret: bytes) -> WebAccess:
        return cls(
            bound,
            _names(settings),
            _reads_are_open(settings, bound),
            read_token(secret),
            web_token(secret),
            settings.tls_http_clients == "certificate",
        )

    @classmethod
    def of_worker(
        cls, settings: ClusterSettings, bound: str, secret: bytes, advertised: str = ""
    ) -> WebAccess:
        names = _names(settings) | ({advertised.lower()} if advertised else set())
        return cls(
            bound,
            names,
            _reads_are_open(settings, bound),
            read_token(secret),
            None,
            settings.tls_http_clients == "certificate",
        )

    def opens(self, authorization: str, *, for_change: bool) -> bool:
        """Whether that header does."""
        # Bytes that are no text come as surrogates.
        given = authorization.encode(errors="surrogateescape")
        tokens = [self.token] if for_change else [self.read_token, self.token]
        right = [hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens if token]
        return any(right)

    def is_named(self, host: str, local: str) -> bool:
        """Whether that is a name of this server: loopback's by name or address, the host that it is bound to,
        the address reached (``local``), or one of the settings."""
        address = parse_host(host)
        by_address = address is not None and address.is_loopback
        return host in ("localhost", self.bound.lower(), local) or host in self.hosts or by_address


def _names(settings: ClusterSettings) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in settings.web_hosts.split(",") if name.strip())


def _reads_are_open(settings: ClusterSettings, bound: str) -> bool:
    return settings.web_auth == "open" or (settings.web_auth == "auto" and is_loopback(bound))


def check_host(access: WebAccess) -> Middleware:
    """Refuses requests that name another host than one of the server's names."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Probes name whatever they are configured with, and what they get is worth nothing.
        if request.path != HEALTH:
            name = _host_of(request.headers.get("Host", ""))
            if not access.is_named(name, reached_at(request).host):
                raise web.HTTPForbidden(
                    text=f"this server answers as {access.bound} or as localhost only; the setting web_hosts "
                    "gives it further names\n"
                )
        return await handler(request)

    return check


def check_reader(access: WebAccess) -> Middleware:
    """Refuse requests without a valid token where one is required, and requests below ``/api/`` from other
    sites."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if access.certificates and request.path != HEALTH and not request.get_extra_info("peercert"):
            raise web.HTTPForbidden(
                text="this needs a certificate of the cluster's CA: give one with its key (curl: --cert, "
                "--key), or set tls_http_clients to token\n"
            )
        below_api = request.path.startswith(API)
        if below_api and _is_of_another_site(request, access.hosts):
            raise web.HTTPForbidden(text="pages of other sites get nothing here\n")
        reads_are_open = access.reads_are_open or access.certificates
        if below_api or not (reads_are_open or _is_the_same_everywhere(request)):
            given = request.headers.get("Authorization")
            changes = request.method not in ("GET", "HEAD")
            open_to_all = reads_are_open and not changes
            if not (open_to_all if given is None else access.opens(given, for_change=changes)):
                raise _unauthorized(access, given, for_change=changes)
        return await handler(request)

    return check


def wants_page(request: web.Request) -> bool:
    """Whether a browser asks, which is shown the page."""
    return "text/html" in request.headers.get("Accept", "")


def _is_the_same_everywhere(request: web.Request) -> bool:
    """In all clusters, so that nobody learns anything from it."""
    path = request.path
    return path in (HEALTH, DOCUMENT_PATH) or path.startswith(PAGE) or (path == "/" and wants_page(request))


def _unauthorized(access: WebAccess, given: str | None, *, for_change: bool) -> web.HTTPUnauthorized:
    command = "minishuffle cluster token" if for_change else "minishuffle cluster token --read"
    if given is None:
        why = "this needs the token"
    elif for_change and access.opens(given, for_change=False):
        why = "that token only reads"
    else:
        why = "that is not the cluster's token"
    return web.HTTPUnauthorized(
        text=f"{why}: '{command}' prints it\n", headers={"WWW-Authenticate": "Bearer"}
    )


def reached_at(request: web.Request) -> Address:
    """The address of ours that the client's connection leads to."""
    name = request.get_extra_info("sockname")
    if name is None:
        raise web.HTTPBadRequest(text="the connection is closed\n")
    return Address(name[0], name[1])


def _host_of(netloc: str) -> str:
    """The host of ``host:port``, in small letters."""
    return (netloc[1:].partition("]")[0] if netloc.startswith("[") else netloc.partition(":")[0]).lower()


def _is_of_another_site(request: web.Request, hosts: frozenset[str]) -> bool:
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return True
    origin = request.headers.get("Origin")
    if origin is None:
        return False
    try:
        named = urlsplit(origin).netloc.lower()
    except ValueError:  # It is no address at all.
        return True
    # A proxy may pass on its own name or put the server's in its place.
    return named != request.headers.get("Host", "").lower() and _host_of(named) not in hosts

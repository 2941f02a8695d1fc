"""Who may ask the HTTP servers for what.

Reads are open over loopback, elsewhere they need the token, and every change does. The token follows from
the cluster's secret, so that whoever has the secret has it, and does not give the secret away. Three checks
keep web pages of others out: ``Host`` must be a name of this server (DNS rebinding), ``Origin`` and
``Sec-Fetch-Site`` must not say that another site asks (CSRF), and the token stands in a header, which no
browser adds by itself.
"""

from __future__ import annotations

import hmac
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from minishuffle.ids import Address
from minishuffle.web.refusals import API

__all__ = ["SECURITY_HEADERS", "check_host", "check_reader", "reached_at"]

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


def check_host(bound: str) -> Middleware:
    """Refuses requests that name another host than the one that the server is bound to, or was reached at."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _host_allowed(request.headers.get("Host", ""), bound, reached_at(request).host):
            raise web.HTTPForbidden(text=f"this server answers as {bound} or as localhost only\n")
        return await handler(request)

    return check


def check_reader(token: str) -> Middleware:
    """Refuses requests below ``/api/`` that come from other sites, or need the token and do not have it."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(API):
            if _is_of_another_site(request):
                raise web.HTTPForbidden(text="pages of other sites get nothing here\n")
            given = request.headers.get("Authorization")
            wanted = f"Bearer {token}".encode()
            # Bytes that are no text come as surrogates.
            right = given is not None and hmac.compare_digest(given.encode(errors="surrogateescape"), wanted)
            open_to_all = request.method in ("GET", "HEAD") and _is_over_loopback(request)
            if not right and not (open_to_all and given is None):
                why = "that is not the cluster's token" if given is not None else "this needs the token"
                raise web.HTTPUnauthorized(
                    text=f"{why}: 'minishuffle cluster token' prints it\n",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return check


def reached_at(request: web.Request) -> Address:
    """The address of ours that the client's connection leads to."""
    name = request.get_extra_info("sockname")
    if name is None:
        raise web.HTTPBadRequest(text="the connection is closed\n")
    return Address(name[0], name[1])


def _host_allowed(header: str, bound: str, local: str) -> bool:
    """Loopback by name or address, the host that we were bound to, or the address reached."""
    name = (header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]).lower()
    return name in ("localhost", bound.lower(), local) or _is_loopback(name)


def _is_of_another_site(request: web.Request) -> bool:
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return True
    origin = request.headers.get("Origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower()
    except ValueError:  # It is no address at all.
        return True


def _is_over_loopback(request: web.Request) -> bool:
    peer = request.get_extra_info("peername")
    return peer is not None and _is_loopback(peer[0])


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback

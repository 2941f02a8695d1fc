"""Who may ask a web server of a test for what."""

from __future__ import annotations

from minishuffle.web.guard import WebAccess

HOST = "127.0.0.1"
TOKEN = "open sesame"
READ_TOKEN = "only look"


def access(
    *,
    reads_are_open: bool = True,
    bound: str = HOST,
    hosts: frozenset[str] = frozenset(),
    certificates: bool = False,
) -> WebAccess:
    """As a coordinator has it."""
    return WebAccess(bound, hosts, reads_are_open, READ_TOKEN, TOKEN, certificates)


def worker_access(*, reads_are_open: bool = True, bound: str = HOST) -> WebAccess:
    return WebAccess(bound, frozenset(), reads_are_open, READ_TOKEN, None)

"""The web page: files that are built from ``page/`` and shipped with the package.

``page/README.md`` says how they are built. They are few, so they are read once and served from memory.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import Final

from aiohttp import web

from minishuffle.web.guard import SECURITY_HEADERS

__all__ = ["PageFile", "page_files"]

_TYPES: Final = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}


def page_files() -> dict[str, bytes]:
    """The built files by name."""
    folder = files("minishuffle.web") / "page" / "built"
    return {each.name: each.read_bytes() for each in folder.iterdir()}


class PageFile:
    """A file; a browser that has it already gets a short answer."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._type = _TYPES[name.rpartition(".")[2]]
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'

    async def serve(self, request: web.Request) -> web.Response:
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": self._tag}
        if request.headers.get("If-None-Match") == self._tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._content, content_type=self._type, charset="utf-8", headers=headers)

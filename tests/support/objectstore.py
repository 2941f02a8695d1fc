"""An object store with the requests of S3 that reading needs: list, head and get with a range.

Servers that know all of S3 bring forty packages with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["object_store"]


def _listing(objects: dict[str, bytes], bucket: str, query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    keys = sorted(key.removeprefix(f"{bucket}/") for key in objects if key.startswith(f"{bucket}/{prefix}"))
    folders, contents = dict[str, None](), []
    for key in keys:
        head, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
        if found:
            folders[prefix + head + delimiter] = None
        else:
            contents.append(key)
    files = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[f'{bucket}/{key}'])}</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in contents
    )
    prefixes = "".join(
        f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        f"{files}{prefixes}</ListBucketResult>"
    ).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path).strip("/")
        bucket, _, inside = key.partition("/")
        if not inside:
            self._answer(200, _listing(self.objects, bucket, parse_qs(parts.query)))
        elif key not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif wanted := self.headers.get("Range"):
            data = self.objects[key]
            first, last = wanted.removeprefix("bytes=").split("-")
            piece = data[int(first) : int(last) + 1]
            self._answer(206, piece, f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        else:
            self._answer(200, self.objects[key])

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def object_store(objects: dict[str, bytes]) -> Iterator[str]:
    """Serves ``bucket/key`` by name on loopback; gives the options that a URI needs."""
    handler = type("Handler", (_Handler,), {"objects": objects})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=here"
        finally:
            server.shutdown()
            thread.join()

"""An object store with the requests of S3 that files need: list, head, get with a range, put in parts, and
delete.

Servers that know all of S3 bring twenty packages with them, among them older ones than others here need.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

__all__ = ["Faults", "object_store"]


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


def _joined(file: BinaryIO) -> bytes:
    """Chunks, each behind a line with its length, and what follows the last one, which is left out."""
    data = b""
    while size := int(file.readline().partition(b";")[0], 16):
        data += file.read(size)
        file.readline()
    while file.readline().strip():
        pass
    return data


class Faults:
    """What goes wrong with requests, by a part of the method and path, as ``POST /bucket``."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        """They are answered by 503."""
        self.late: set[str] = set()
        """They are not answered before :attr:`released`."""
        self.released = threading.Event()
        self.refusals = 0
        """How many requests were refused."""

    def are_in(self, asked: str) -> bool:
        """Whether a request is to be refused; waits with one that is late."""
        if any(each in asked for each in self.late):
            self.released.wait(60)
        is_refused = any(each in asked for each in self.refused)
        self.refusals += is_refused
        return is_refused


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    faults: Faults
    parts: dict[str, dict[int, bytes]]
    """Those of uploads that are under way, by key."""

    def parse_request(self) -> bool:
        """Whether the request is to be answered."""
        if not super().parse_request():
            return False
        if self.faults.are_in(f"{self.command} {self.path}"):
            self._body()
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return False
        return True

    def _body(self) -> bytes:
        """In chunks of HTTP, or of S3, which has checksums behind them, or of both."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = _joined(self.rfile)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return (
            _joined(io.BytesIO(data)) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data
        )

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).removeprefix("/"), parse_qs(parts.query, keep_blank_values=True)

    def do_PUT(self) -> None:
        key, query = self._asked()
        if "partNumber" in query:
            self.parts[key][int(query["partNumber"][0])] = self._body()
        else:
            self.objects[key] = self._body()
        self._answer(200, b"")

    def do_POST(self) -> None:
        """Begin or end an upload, or delete several objects."""
        key, query = self._asked()
        body = self._body()
        if "uploads" in query:
            self.parts[key] = {}
            upload = f"<UploadId>{key}</UploadId>"
            self._answer(
                200, f"<InitiateMultipartUploadResult>{upload}</InitiateMultipartUploadResult>".encode()
            )
        elif "uploadId" in query:
            self.objects[key] = b"".join(data for _, data in sorted(self.parts.pop(key).items()))
            self._answer(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")
        else:
            for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.objects.pop(f"{key.rstrip('/')}/{unescape(name)}", None)
            self._answer(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        self.objects.pop(self._asked()[0], None)
        self._answer(204, b"")

    def do_GET(self) -> None:
        key, query = self._asked()
        bucket, _, inside = key.partition("/")
        if not inside:
            self._answer(200, _listing(self.objects, bucket, query))
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
def object_store(objects: dict[str, bytes], faults: Faults | None = None) -> Iterator[str]:
    """Serves ``bucket/key`` by name on loopback; gives the options that a URI needs."""
    given = {"objects": objects, "faults": faults or Faults(), "parts": {}}
    handler = type("Handler", (_Handler,), given)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=here"
        finally:
            server.shutdown()
            thread.join()

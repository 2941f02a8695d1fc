"""Errors of the HTTP servers as the JSON object of every error of the REST interface.

Clients of ``/api/`` parse JSON, so unknown paths and methods, missing tokens and internal errors are answered
with a ``Failure`` too.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from minishuffle.errors import AuthenticationError, ShuffleError, UnknownName, UsageError
from minishuffle.wire.requests import Failure

__all__ = ["API", "answer_failures", "json_answer"]

API: Final = "/api/"
_CODES: Final = {401: AuthenticationError.code, 403: AuthenticationError.code, 404: UnknownName.code}
"""By HTTP status; see ``errors``."""

_log = logging.getLogger(__name__)


def json_answer(answer: BaseModel, status: int, headers: dict[str, str] | None = None) -> web.Response:
    """A response that no cache keeps and no browser takes for a page."""
    return web.Response(
        body=answer.model_dump_json().encode(),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})},
    )


@web.middleware
async def answer_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Below ``/api/``, answer what is refused or fails with a ``Failure``."""
    if not request.path.startswith(API):
        return await handler(request)
    try:
        return await handler(request)
    except web.HTTPException as refused:
        code = _CODES.get(refused.status, UsageError.code)
        kept = {
            name: refused.headers[name] for name in ("Allow", "WWW-Authenticate") if name in refused.headers
        }
        return json_answer(Failure(code=code, text=_text(request, refused)), refused.status, kept)
    except Exception:
        _log.exception("%s %s failed", request.method, _escaped(request.path))
        text = "an error in the server, which its log shows"
        return json_answer(Failure(code=ShuffleError.code, text=text), HTTPStatus.INTERNAL_SERVER_ERROR)


def _escaped(path: str) -> str:
    """A path for a line of text, escaped again."""
    return quote(path, safe="/:@!$&'()*+,;=~%")


def _text(request: web.Request, refused: web.HTTPException) -> str:
    path = _escaped(request.path)
    if isinstance(refused, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(refused.allowed_methods))
        return f"{path} takes {allowed}, not {request.method}: /openapi.json describes every path"
    if isinstance(refused, web.HTTPNotFound):
        return f"there is no {path}: /openapi.json describes every path"
    return (refused.text or refused.reason).strip()

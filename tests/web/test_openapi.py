"""The document at /openapi.json: it is valid, complete, and every answer is as it says."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from minishuffle.web.openapi import NoQuery, Operation, openapi_document
from minishuffle.web.rest import RestInterface
from minishuffle.web.server import serve_coordinator_web
from minishuffle.wire.requests import Accepted
from support.accesses import TOKEN, access
from support.coordinators import ScriptedCoordinator

HOST = "127.0.0.1"


async def test_every_answer_is_as_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minishuffle.web.rest.LATE_SECONDS_MAX", 0.0)  # Its tasks never report.
    coordinator = ScriptedCoordinator()
    job = coordinator.submit(parallelism=2)
    server = await serve_coordinator_web(coordinator, 0, access())
    base = f"http://{HOST}:{server.port}"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            async with session.get(f"{base}/openapi.json") as response:
                document = await response.json()
            checked = 0
            # The job is cancelled last, since one that is cancelled is neither paused nor resumed.
            for path, operations in sorted(document["paths"].items(), key=lambda each: "cancel" in each[0]):
                for method, operation in operations.items():
                    query = "?seconds=0.1" if path.endswith(("/diagnosis", "/tap", "/profile")) else ""
                    query = "?into=/tmp" if path.endswith("/savepoint") else query
                    url = f"{base}{path.format(job=job, worker=1)}{query}"
                    async with session.request(method.upper(), url) as response:
                        assert response.status == 200, path
                        valid(document, operation["responses"]["200"], await response.json())
                    async with session.request(
                        method.upper(), f"{base}{path.format(job='j9', worker=1)}"
                    ) as response:
                        if "{job}" in path:
                            valid(
                                document, operation["responses"][str(response.status)], await response.json()
                            )
                    checked += 1
            assert checked == 20
    finally:
        await server.close()


def test_every_path_that_is_served_is_described() -> None:
    app = web.Application()
    interface = RestInterface(ScriptedCoordinator(), "1.0", TOKEN)
    interface.add_to(app)
    served = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
    assert served == {*interface.document["paths"], "/openapi.json"}


def valid(document: dict[str, Any], response: dict[str, Any], answer: object) -> None:
    schema = {**response["content"]["application/json"]["schema"], "components": document["components"]}
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize(("method", "security"), [("GET", [{}, {"token": []}]), ("POST", [{"token": []}])])
def test_changes_need_the_token(method: Any, security: list[dict[str, Any]]) -> None:
    async def handle(job: str, query: NoQuery) -> Accepted:
        raise AssertionError

    operation = Operation(method, "/api/v1/jobs/{job}/end", "End it", Accepted, handle)
    document = openapi_document([operation], "1.0")
    described = document["paths"]["/api/v1/jobs/{job}/end"][method.lower()]
    assert described["security"] == security
    assert described["operationId"] == f"{method.lower()}_job_end"
    assert described["parameters"] == [
        {"name": "job", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    assert json.loads(json.dumps(document)) == document

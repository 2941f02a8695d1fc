"""Operations of a REST interface, and their OpenAPI document.

An operation declares its parameters and result as pydantic models. The document is derived from these, so it
always matches the served interface.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from minishuffle.wire.requests import Failure

__all__ = ["NoQuery", "Operation", "openapi_document"]

OPENAPI_VERSION: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{model}"


class NoQuery(BaseModel):
    """The empty query of an operation without parameters."""

    model_config = ConfigDict(extra="forbid")


Handle: TypeAlias = Callable[[str, Any], Awaitable[BaseModel]]
"""Takes the job or worker of the path, or an empty text, and the query."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path; ``{job}`` or ``{worker}`` in the path is its parameter."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[BaseModel]
    handle: Handle
    query: type[BaseModel] = NoQuery

    @property
    def changes(self) -> bool:
        return self.method != "GET"


def openapi_document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The document as plain maps and lists."""
    models = {operation.answer for operation in operations} | {Failure}
    ordered = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "serialization") for model in ordered], ref_template=_REFERENCE
    )
    schemas = {model: references[model, "serialization"] for model in ordered}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _described(operation, schemas[operation.answer], schemas[Failure])
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "minishuffle",
            "version": version,
            "description": (
                "Jobs, workers and buffers of one cluster. Reads are open where it listens on loopback "
                "alone; elsewhere they take a token, and every change takes one that does not only read."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, answer: dict[str, Any], failure: dict[str, Any]) -> dict[str, Any]:
    failed = {"content": {"application/json": {"schema": failure}}}
    words = re.findall(r"\w+", operation.path.removeprefix("/api/v1").replace("jobs/{job}", "job"))
    return {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "security": [{"token": []}] if operation.changes else [{}, {"token": []}],
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": answer}}},
            "400": {"description": "A parameter is not what it should be", **failed},
            "401": {"description": "The token is missing or wrong", **failed},
            "403": {"description": "Another site asks, or under a name that is not this server's", **failed},
            "404": {"description": "There is no such job or worker", **failed},
            "409": {"description": "Not in the state that the job or cluster is in", **failed},
            "500": {"description": "An error in the server, which its log shows", **failed},
            "503": {"description": "Some limit is reached", **failed},
        },
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    schema = query.model_json_schema()
    return [
        {"name": name, "in": "query", "required": False, "schema": each}
        for name, each in schema.get("properties", {}).items()
    ]

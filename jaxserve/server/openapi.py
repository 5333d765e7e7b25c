"""The OpenAPI document: bodies are parsed by Service.parse, so their schemas are added here."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from jaxserve.server.errors import json_response

router = APIRouter(include_in_schema=False)

_bodies: dict[str, type] = {}
REFUSALS = {
    "400": "The request is not valid; error.param names the field.",
    "401": "The API key is missing or wrong.",
    "404": "No such model, or no such path.",
    "408": "The request arrived too slowly.",
    "409": "Something else is in the way; see the message.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests are waiting; see Retry-After.",
    "431": "The headers are too large.",
    "500": "The engine failed.",
    "503": "The server is starting, draining or broken; see Retry-After.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def takes(model: type, *, streams: bool = False) -> dict:
    """Arguments for a route whose JSON body is a `model`; streams: it may answer with events."""
    _bodies[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    route = {"openapi_extra": {"requestBody": {"required": True, "content": content}}}
    if streams:
        route["responses"] = {200: {"content": {"text/event-stream": {"schema": {}}}}}
    return route


@router.get("/openapi.json")
async def openapi(request: Request):
    app = request.app
    if app.openapi_schema is None:
        app.openapi_schema = _build(app)
    return json_response(app.openapi_schema)


def _build(app: FastAPI) -> dict:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = [(model, "validation") for model in _bodies.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    schemas["Error"], schemas["AnthropicError"] = _ERROR, _ANTHROPIC_ERROR
    for path, operations in document["paths"].items():
        name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        for operation in operations.values():
            for status, text in REFUSALS.items():
                operation["responses"].setdefault(status, {"description": text, "content": content})
            operation["responses"].pop("422", None)
    return document

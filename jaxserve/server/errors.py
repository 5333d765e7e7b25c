"""Errors as clients see them: OpenAI's shape, and nothing of the server's insides.

Every refusal is an ApiError; every other exception becomes a bare 500 with a request id, and its
traceback goes to the log without its message, which may quote a prompt.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback

import orjson
import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import EngineFailed, EngineStopped, RequestRefused

logger = logging.getLogger("jaxserve.server")

LOGGED_FRAMES = 6
QUOTED_CHARS = 80  # of an offending value shown in a message
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_REFUSAL_STATUS = {"queue_full": 429, "rate_limited": 429, "shutting_down": 503}


@dataclasses.dataclass
class ApiError(Exception):
    """An answer other than success. close: also end the connection (the body may be unread)."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    close: bool = False
    more_headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__init__(self.message)

    def body(self) -> dict:
        """{"error": {...}} as OpenAI writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = dict(self.more_headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.close:
            headers["Connection"] = "close"
        return headers

    def response(self, path: str = "") -> Response:
        """The answer to a request for `path`: Anthropic's paths have another dialect."""
        body = anthropic_body(self) if path.startswith("/v1/messages") else self.body()
        return json_response(body, status=self.status, headers=self.headers())


class ClientGone(Exception):
    """The client has left, or reads nothing any more: there is nobody to answer."""


def json_response(content, *, status: int = 200, headers: dict | None = None) -> Response:
    """content as JSON. orjson refuses what JSON has no word for, so no NaN ever leaves."""
    return Response(orjson.dumps(content), status, headers=headers, media_type="application/json")


def anthropic_body(error: ApiError) -> dict:
    """{"type": "error", ...} as Anthropic writes it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def from_exception(error: BaseException, request_id: str = "") -> ApiError:
    """The ApiError that tells a client of any exception; unknown ones are logged and kept vague."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            status = _REFUSAL_STATUS.get(error.code, 400)
            retry = error.retry_after if status == 400 else error.retry_after or 1.0
            return ApiError(status, str(error), error.code, error.param, retry, close=status == 503)
        case pydantic.ValidationError():
            return from_validation(error)
        case EngineStopped():
            message = (
                "The server was shut down before it could finish this; send it to another one."
            )
            return ApiError(503, message, "shutting_down", retry_after=1, close=True)
        case EngineFailed():
            logger.error("request %s: the engine failed", request_id)
            message = f"The engine failed while it ran this request (id {request_id}); try again."
            return ApiError(500, message, "engine_failed")
        case HTTPException():
            return _from_http(error)
    frames = "".join(traceback.format_tb(error.__traceback__)[-LOGGED_FRAMES:])
    logger.error("request %s: %s\n%s", request_id, type(error).__name__, frames)
    logger.debug("request %s: %s", request_id, error)
    return ApiError(500, f"Internal error (request id {request_id}).", "internal_error")


def _from_http(error: HTTPException) -> ApiError:
    known = {
        404: ("There is no such path here; /openapi.json lists what there is.", "not_found"),
        405: ("This path does not take that method; see /openapi.json.", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), "http_error"))
    return ApiError(error.status_code, message, code, more_headers=dict(error.headers or {}))


def from_validation(error: pydantic.ValidationError) -> ApiError:
    """One sentence that names the field, the value and the rule.

    A union (prompt, stop) reports each of its branches; the branch that got deepest was meant.
    """
    details = error.errors(include_url=False, include_context=False)
    worst = max(details, key=lambda detail: len(detail["loc"]))
    path = [str(part) for part in worst["loc"] if not _is_branch(part)]
    value = worst["input"] if worst["type"] != "missing" else None
    shown = "" if worst["type"] == "missing" else f"={quote(value)}"
    message = f"{'.'.join(path) or 'the body'}{shown}: {worst['msg']}"
    return ApiError(400, message, "invalid_value", path[0] if path else None)


def _is_branch(part) -> bool:
    """pydantic names union branches in the path ("list[int]", "str"); clients know only fields."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def quote(value) -> str:
    """A value as a client would write it, cut short."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "…"


HANDLED = (ApiError, RequestRefused, pydantic.ValidationError, EngineFailed, HTTPException)


async def handle(request: Request, error: Exception) -> Response:
    """Exception handler of the application for the HANDLED kinds; Guard sees to all others."""
    request_id = request.scope.get("state", {}).get("request_id", "")
    return from_exception(error, request_id).response(request.scope["path"])

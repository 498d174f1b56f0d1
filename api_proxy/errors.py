"""Errors in the format of OpenAI's API.

    ApiError          any refusal: HTTP status and the body {"error": {message, type, param, code}}

One class, and one function for each kind of refusal. They are raised anywhere below a route and
turned into a response here; messages name the field at fault and never repeat the content of a
request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from api_proxy.server import request_ids
from rollout_bridge.local_requests import Refusal

logger = logging.getLogger(__name__)
_MOST_NAMES = 20
_NO_SUCH_PATH = (
    "This endpoint has no such path. The base URL of an OpenAI client ends in /v1, that of an "
    "Anthropic client in the port; a browser finds the pages at /ui."
)


class ApiError(Exception):
    """A request that gets an error instead of a completion; `limit` is the one that it exceeds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: a field has a value that cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    """400: a field of OpenAI's API that this endpoint does not implement."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(model: str, names: Sequence[str]) -> ApiError:
    """404: another model than the one served here under `names`."""
    known = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    message = (
        f"The model {model[:200]!r} does not exist or is not served here. Served: {known}. An "
        "agent with a fixed name can be served too: add the name to proxy.model_aliases."
    )
    return ApiError(404, message, param="model", code="model_not_found")


def too_long_to_record(limit: int) -> ApiError:
    """400: more text than is searched for secrets before it is stored."""
    message = (
        f"The messages and tools contain more than {limit} characters of text, the most that this "
        "endpoint records of a request. Please reduce their length."
    )
    return ApiError(400, message, param="messages", code="string_above_max_length")


def context_length_exceeded(num_prompt_tokens: int, context_length: int) -> ApiError:
    """400: the prompt leaves no room for a reply."""
    message = (
        f"This model's maximum context length is {context_length} tokens, but your messages "
        f"resulted in {num_prompt_tokens} tokens. Please reduce the length of the messages."
    )
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def beyond(limit: str, message: str, param: str | None, code: str) -> ApiError:
    """400: more of something than a request may contain."""
    return ApiError(400, message, param=param, code=code, limit=limit)


def cannot_fit(num_bytes: int, context_length: int, bytes_per_token: int) -> ApiError:
    """400: so long that it cannot fit, which is known without counting tokens."""
    message = (
        f"This model's maximum context length is {context_length} tokens, but your request has "
        f"{num_bytes} bytes, and a token stands for {bytes_per_token} at most. Please reduce the "
        "length of the messages."
    )
    return beyond("characters", message, "messages", "context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    """413: the request is longer than the endpoint reads."""
    message = f"The request body exceeds {limit} bytes."
    return ApiError(413, message, code="request_too_large", limit="body")


def bodies_too_large(retry_after_s: int, *, is_own: bool) -> ApiError:
    """429 or 503: the requests in progress hold as much as the endpoint keeps in memory."""
    whose = "Your requests" if is_own else "The requests"
    return ApiError(
        429 if is_own else 503,
        f"{whose} in progress already hold as many bytes as are allowed. Please try again.",
        kind="rate_limit_error" if is_own else "server_error",
        code="too_many_bytes_in_progress",
        headers={"Retry-After": str(retry_after_s)},
        limit="tenant_bodies" if is_own else "bodies",
    )


def no_key() -> ApiError:
    """401: a request without a key."""
    return ApiError(
        401,
        "You didn't provide an API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key'.",
        code="missing_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def invalid_key() -> ApiError:
    """401: an unknown or revoked key, without saying which."""
    return ApiError(
        401,
        "Incorrect API key provided.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def admin_key_needed() -> ApiError:
    """403: a client's key on a route for admins."""
    return ApiError(403, "This needs an admin key.", code="admin_key_needed")


def foreign_request(refusal: Refusal) -> ApiError:
    """403 or 415: no key exists, and the request may come from a web page."""
    return ApiError(refusal.status, refusal.message, code=f"foreign_{refusal.check}")


def over_limit(name: str, limit: int, retry_after_s: int) -> ApiError:
    """429: a key has used up its limit."""
    return ApiError(
        429,
        f"This API key's limit is reached: {name} = {limit}. Try again in {retry_after_s} s.",
        kind="rate_limit_error",
        code="quota_exceeded" if name == "tokens_per_day" else "rate_limit_exceeded",
        headers={"Retry-After": str(retry_after_s)},
    )


def queue_full(retry_after_s: int) -> ApiError:
    """429: the queue of waiting requests is full."""
    return ApiError(
        429,
        "Too many requests are waiting. Please try again.",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def shutting_down(retry_after_s: int) -> ApiError:
    """503: this process is stopping."""
    return ApiError(
        503,
        "The server is shutting down. Please try again.",
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": str(retry_after_s)},
    )


def body_too_slow(limit_s: float) -> ApiError:
    """408: the request takes too long to arrive."""
    message = f"The request body did not arrive within {limit_s:g} s."
    return ApiError(408, message, code="request_timeout")


def client_gone() -> ApiError:
    """499: the client is gone, and nobody reads this."""
    return ApiError(499, "The client closed the connection.", code="client_closed_request")


def engine_unavailable(retry_after_s: int) -> ApiError:
    """503: the engine does not answer; the agent may try again."""
    return ApiError(
        503,
        "The model server does not answer at the moment. Please try again.",
        kind="server_error",
        code="engine_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def store_unavailable(
    retry_after_s: int, message: str = "The store does not answer at the moment. Please try again."
) -> ApiError:
    """503: what the request refers to cannot be read; the agent may try again."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="store_unavailable",
        headers={"Retry-After": str(retry_after_s)},
    )


def turn_not_kept(retry_after_s: int) -> ApiError:
    """503: a reply that the database refused, or that neither it nor the spill file could take."""
    return ApiError(
        503,
        "The reply was not recorded: neither the database nor the spill file took it. The disk is "
        "full, or the conversation was deleted meanwhile. Please try again.",
        kind="server_error",
        code="turn_not_kept",
        headers={"Retry-After": str(retry_after_s)},
    )


def internal_error() -> ApiError:
    """500: a fault of this server."""
    return ApiError(500, "The server had an error.", kind="server_error", code="internal_error")


Shape: TypeAlias = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""HTTP status and body of an error, in the format of one API."""


class ErrorShapes:
    """Puts errors into OpenAI's shape, or into the one of `shapes` whose key the path begins with;
    or into a page, if `is_page` holds for the path.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        is_page: Callable[[str], bool],
        page: Callable[[ApiError], Response],
    ) -> None:
        self._shapes = shapes
        self._is_page = is_page
        self._page = page

    def response(self, path: str, error: ApiError) -> Response:
        """The response to a request for `path`."""
        if self._is_page(path):
            return self._page(error)
        for prefix, shape in self._shapes.items():
            if path.startswith(prefix):
                status, body = shape(error)
                return JSONResponse(body, status_code=status, headers=error.headers)
        return error.response()


def install(app: FastAPI, shapes: ErrorShapes) -> None:
    """Give every error response of `app` one of these shapes."""

    def respond(request: Request, error: ApiError) -> Response:
        return shapes.response(request.url.path, error)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return respond(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        headers = dict(error.headers) if error.headers else {}
        message = _NO_SUCH_PATH if code == "unknown_url" else str(error.detail)
        refusal = ApiError(error.status_code, message, code=code, headers=headers)
        return respond(request, refusal)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        logger.error("request failed: %s", type(error).__name__)
        response = respond(request, internal_error())
        # Sent past the middleware that adds the id to all other responses.
        request_id = getattr(request.state, "request_id", None)
        response.headers.update(request_ids.headers_of(request_id) if request_id else {})
        return response

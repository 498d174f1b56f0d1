"""Errors in the format of Anthropic's API: {"type": "error", "error": {...}, "request_id": ...}."""

from __future__ import annotations

from typing import Any

from api_proxy.errors import ApiError
from api_proxy.server import request_ids

_KINDS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUSES = {503: 529}
"""Anthropic's clients expect a status of its own for "try again later"."""


def refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _KINDS.get(error.status, default)
    fault = {"type": kind, "message": error.message}
    body: dict[str, Any] = {"type": "error", "error": fault}
    if (request_id := request_ids.current()) is not None:
        body["request_id"] = request_id
    return _STATUSES.get(error.status, error.status), body

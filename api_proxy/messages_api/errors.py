"""Errors as Anthropic's API words them: {"type": "error", "error": {type, message}}."""

from __future__ import annotations

from typing import Any

from api_proxy.errors import ApiError

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
"""Anthropic's clients know "try again later" by a status of its own."""


def refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _KINDS.get(error.status, default)
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return _STATUSES.get(error.status, error.status), body

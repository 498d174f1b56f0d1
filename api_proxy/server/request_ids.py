"""The id of the request that is being answered: in its response, and in what is logged meanwhile.

A client's own id is kept if it is a plain word, so that its logs and ours can be read together.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from uuid import uuid4

_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def begin(sent: str | None) -> str:
    """The id of a request that begins; `sent` is what its client calls it."""
    is_kept = sent is not None and _PLAIN.fullmatch(sent)
    request_id = sent if is_kept and sent else f"req_{uuid4().hex}"
    _current.set(request_id)
    return request_id


def current() -> str | None:
    """The id of the request that is being answered."""
    return _current.get()


def headers_of(request_id: str) -> dict[str, str]:
    """The response's headers that name it, as OpenAI's and as Anthropic's clients read it."""
    return {"x-request-id": request_id, "request-id": request_id}


def mark(record: logging.LogRecord) -> bool:
    """A filter of logging handlers: sets `request` to the id in brackets, "" outside a request."""
    request_id = _current.get()
    record.request = f"[{request_id}] " if request_id else ""
    return True

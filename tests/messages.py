"""Messages that many tests send."""

from __future__ import annotations

from records.messages import Message


def user(text: str) -> Message:
    """What somebody says."""
    return {"role": "user", "content": text}

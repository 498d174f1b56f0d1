"""Compressed request bodies, in the two formats that the standard library reads.

A decompressed body has the same limits as an uncompressed one. It is decompressed in a thread.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from api_proxy.access.body_budget import HeldBody
from api_proxy.errors import ApiError, invalid

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_STEP_BYTES = 2**20


def check_encoding(encoding: str) -> str | None:
    """The encoding's plain name; None for an uncompressed body. Raises ApiError 415."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _WINDOW_BITS:
        raise ApiError(
            415,
            f"Content-Encoding {name[:100]!r} is not supported; send gzip, deflate or none.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    return name


async def decoded(raw: bytes, encoding: str, check: Callable[[int], None], held: HeldBody) -> bytes:
    """The body compressed in `raw`. Raises what `check` raises for its length, ApiError 429 or 503
    if too much is held already, 400 if it is damaged.
    """
    reader = zlib.decompressobj(_WINDOW_BITS[encoding])
    parts: list[bytes] = []
    size = 0
    try:
        while raw and not reader.eof:
            part = await asyncio.to_thread(reader.decompress, raw, _STEP_BYTES)
            raw = reader.unconsumed_tail
            size += len(part)
            check(size)
            held.add(len(part))
            parts.append(part)
    except zlib.error:
        raise _damaged(encoding) from None
    if not reader.eof or reader.unused_data:
        raise _damaged(encoding)
    return b"".join(parts)


def _damaged(encoding: str) -> ApiError:
    return invalid(f"The request body is not one whole {encoding} stream.", code="invalid_encoding")

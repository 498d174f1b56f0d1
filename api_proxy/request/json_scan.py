"""How large and how deep a JSON text is, before anything is built from it.

A parser makes objects for every bracket and comma while it holds the interpreter's lock; this only
looks at the bytes, a block at a time, with numpy (which lets other threads run). It does not check
that the text is JSON: the parser does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 18
"""Bytes looked at together: bounds the memory that a large text takes here."""
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_STEPS = np.zeros(256, dtype=np.int8)
"""What a byte outside of strings does to the nesting."""
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSize:
    """`num_values` counts containers and what is between commas; `depth` open containers."""

    num_values: int
    depth: int


def is_surely_within(raw: bytes, most: JsonSize) -> bool:
    """Whether a JSON text cannot be larger or deeper, whatever of it is inside strings."""
    num_open = raw.count(b"[") + raw.count(b"{")
    return num_open <= most.depth and 1 + num_open + raw.count(b",") <= most.num_values


def json_size(raw: bytes) -> JsonSize:
    """The size of a JSON text, in time and memory linear in its length at most."""
    num_values, depth, deepest = 1, 0, 0
    is_inside, is_escaped = False, False
    for start in range(0, len(raw), _BLOCK):
        block = np.frombuffer(
            raw, dtype=np.uint8, count=min(_BLOCK, len(raw) - start), offset=start
        )
        quotes, is_escaped = _quotes(block, is_escaped)
        inside = np.logical_xor(np.cumsum(quotes, dtype=np.int32) & 1, is_inside)
        is_inside = bool(inside[-1])
        outside = block[~inside]
        steps = _STEPS[outside]
        num_values += int((steps == 1).sum()) + int((outside == _COMMA).sum())
        depths = np.cumsum(steps, dtype=np.int32)
        if len(depths):
            deepest = max(deepest, depth + int(depths.max()))
            depth += int(depths[-1])
    return JsonSize(num_values=num_values, depth=deepest)


def _quotes(block: np.ndarray, is_escaped: bool) -> tuple[np.ndarray, bool]:
    """Where strings begin and end, and whether the block's last byte escapes the next block's
    first; `is_escaped` is that of the block before.
    """
    quotes = block == _QUOTE
    slashes = block == _BACKSLASH
    if not slashes.any():
        if is_escaped:
            quotes[0] = False
        return quotes, False
    # A backslash escapes what follows it if it is the first, third, ... of its run.
    places = np.arange(len(block))
    last_other = np.maximum.accumulate(np.where(slashes, -1, places))
    run = places - last_other
    if is_escaped:
        # The run that begins the block continues from a backslash before it.
        run[last_other < 0] += 1
    escapes = slashes & (run & 1 == 1)
    escaped = np.empty_like(escapes)
    escaped[0] = is_escaped
    escaped[1:] = escapes[:-1]
    return quotes & ~escaped, bool(escapes[-1])

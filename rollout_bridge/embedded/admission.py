"""Which waiting requests are computed together: in order of arrival, within work and memory.

Rows of one computation are padded to the longest, so requests that would mostly be padding wait for
the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from rollout_bridge.embedded.prefix_cache import Match
from rollout_bridge.embedded.request import EngineRequest
from rollout_bridge.embedded.rows import Rows

_MAX_SCORED_TOGETHER = 16
_SMALL = 256
"""Padded tokens below which waste does not matter."""


def take_prefill_group(
    waiting: deque[EngineRequest],
    running: Sequence[EngineRequest],
    rows: Rows,
    max_batch: int,
    max_tokens: int,
) -> list[tuple[EngineRequest, Match]]:
    """Remove from `waiting` what to prefill now, with the prefix known of each.

    A request whose first unknown block another one of the group is about to compute waits for the
    next group, where it finds that block known: equal prompts are computed once.
    """
    group: list[tuple[EngineRequest, Match]] = []
    pending = set()
    rests: list[int] = []
    longest_row = max((request.expected_length for request in running), default=0)
    for request in list(islice(waiting, max(max_batch - len(running), 0))):
        match = rows.match(request.sequence[:-1], request.cache_namespace)
        rest = request.num_tokens - 1 - match.num_tokens
        longest_row = max(longest_row, request.expected_length)
        if not rows.fits(len(running) + len(group) + 1, longest_row):
            break
        if _wasteful([*rests, rest], max_tokens):
            break
        if match.next_key is not None:
            if match.next_key in pending:
                continue
            pending.add(match.next_key)
        waiting.remove(request)
        group.append((request, match))
        rests.append(rest)
    return group


def take_score_group(
    waiting: deque[EngineRequest], num_running: int, longest_row: int, rows: Rows, max_tokens: int
) -> list[EngineRequest]:
    """Remove from `waiting` what to score now, on rows after the running ones."""
    group: list[EngineRequest] = []
    while waiting and len(group) < _MAX_SCORED_TOGETHER:
        lengths = [request.num_tokens for request in (*group, waiting[0])]
        needed = max(*lengths, longest_row)
        fits = rows.fits(num_running + len(lengths), needed)
        if group and (not fits or _wasteful(lengths, max_tokens)):
            break
        group.append(waiting.popleft())
    return group


def _wasteful(lengths: list[int], max_tokens: int) -> bool:
    """Whether the last of these lengths should not be computed together with the others."""
    padded = max(lengths) * len(lengths)
    too_much = padded > max_tokens
    mostly_padding = padded > _SMALL + 1.5 * sum(lengths)
    return len(lengths) > 1 and (too_much or mostly_padding)

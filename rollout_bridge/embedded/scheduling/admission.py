"""Which waiting requests are computed together: in order of arrival, within work and memory.

Rows of one computation are padded to the longest, so requests that would mostly be padding wait for
the next one. A prompt, or a sequence to be scored, whose computation would take longer than others
should wait is computed separately (`next_long`) and does not hold up those after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from rollout_bridge.embedded.model.prefix_cache import Match
from rollout_bridge.embedded.model.rows import Rows
from rollout_bridge.embedded.scheduling.request import EngineRequest

_MAX_SCORED_TOGETHER = 16
_LOOKED_UP = 4
"""Most waiting long prompts whose known prefix is looked up: that is work too."""
_SMALL = 256
"""Padded tokens below which waste does not matter."""


def take_prefill_group(
    waiting: deque[EngineRequest],
    running: Sequence[EngineRequest],
    rows: Rows,
    max_batch: int,
    max_tokens: int,
    max_cost: int,
) -> list[tuple[EngineRequest, Match]]:
    """Remove from `waiting` what to prefill now, each with its known prefix; long prompts stay.

    If another request of the group is about to compute a request's first unknown block, the request
    waits for the next group, when that block is known: equal prompts are computed once.
    """
    group: list[tuple[EngineRequest, Match]] = []
    pending = set()
    rests: list[int] = []
    longest_row = max((request.expected_length for request in running), default=0)
    num_long, cost = 0, 0
    for request in list(waiting):
        if len(running) + len(group) >= max_batch:
            break
        if num_long >= _LOOKED_UP and request.num_tokens**2 > max_cost:
            continue
        match = rows.match(request)
        rest = request.num_tokens - 1 - match.num_tokens
        if is_long(request, match, max_cost):
            num_long += 1
            continue
        cost = max(cost, rest * request.num_tokens)
        if group and cost * (len(group) + 1) > max_cost:
            break
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


def next_long(
    waiting: deque[EngineRequest], known: Callable[[EngineRequest], Match], max_cost: int
) -> tuple[EngineRequest, Match] | None:
    """Remove the first long request from `waiting`; returned with its prefix, from `known`."""
    likely = (request for request in waiting if request.num_tokens**2 > max_cost)
    for request in list(islice(likely, _LOOKED_UP)):
        match = known(request)
        if is_long(request, match, max_cost):
            waiting.remove(request)
            return request, match
    return None


def is_long(request: EngineRequest, match: Match, max_cost: int) -> bool:
    """Whether computing the unknown part of a request takes longer than others should wait."""
    return (request.num_tokens - 1 - match.num_tokens) * request.num_tokens > max_cost


def take_score_group(
    waiting: deque[EngineRequest],
    num_running: int,
    longest_row: int,
    rows: Rows,
    max_tokens: int,
    max_cost: int,
) -> list[tuple[EngineRequest, Match]]:
    """Remove from `waiting` what to score now, on rows after the running ones, each with its known
    prefix; long sequences stay.
    """
    group: list[tuple[EngineRequest, Match]] = []
    lengths: list[int] = []
    num_long, cost = 0, 0
    for request in list(waiting):
        if len(group) >= _MAX_SCORED_TOGETHER:
            break
        if num_long >= _LOOKED_UP and request.num_tokens**2 > max_cost:
            continue
        match = rows.match_scored(request)
        if is_long(request, match, max_cost):
            num_long += 1
            continue
        lengths.append(request.num_tokens)
        cost = max(cost, (request.num_tokens - match.num_tokens) * request.num_tokens)
        fits = rows.fits(num_running + len(lengths), max(*lengths, longest_row))
        too_slow = cost * len(lengths) > max_cost
        if group and (not fits or too_slow or _wasteful(lengths, max_tokens)):
            break
        waiting.remove(request)
        group.append((request, match))
    return group


def _wasteful(lengths: list[int], max_tokens: int) -> bool:
    """Whether the last of these lengths should not be computed together with the others."""
    padded = max(lengths) * len(lengths)
    too_much = padded > max_tokens
    mostly_padding = padded > _SMALL + 1.5 * sum(lengths)
    return len(lengths) > 1 and (too_much or mostly_padding)

"""Fills rows of the key-value cache for requests: prefix reuse, prefill, scoring.

It sits between the scheduler, which decides what is computed when, and the runner, which computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch

from rollout_bridge.embedded.model.adapters import Adapter, RowPlan
from rollout_bridge.embedded.model.kv_cache import RowCache
from rollout_bridge.embedded.model.prefix_cache import Match, PrefixCache
from rollout_bridge.embedded.model.runner import ModelRunner
from rollout_bridge.embedded.model.sampling import top_logprobs
from rollout_bridge.embedded.scheduling.request import EngineRequest

_LEAST_PIECE = 32
"""Fewest tokens in a piece of a long request: smaller pieces would cost more than they save."""


@dataclass(slots=True, kw_only=True, eq=False)
class LongRequest:
    """A request computed piece by piece, on a row of its own until it is complete.

    From token `scored_from` of `sequence` on, the log-probs of what follows are recorded.
    """

    request: EngineRequest
    sequence: list[int]
    match: Match
    cache: RowCache
    num_done: int
    scored_from: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether the request can run, or is scored."""
        return self.num_done == len(self.sequence)


class Rows:
    """The cache, the known prefixes and the computations that fill them."""

    def __init__(self, runner: ModelRunner, cache: RowCache, prefixes: PrefixCache):
        self.device = runner.device
        self._runner = runner
        self._cache = cache
        self._prefixes = prefixes

    def match(self, request: EngineRequest) -> Match:
        """The known prefix of what a request needs before its next token is sampled."""
        return self._match(request, request.sequence[:-1])

    def match_scored(self, request: EngineRequest) -> Match:
        """The known prefix of the tokens before those to be scored."""
        return self._match(request, request.scored_context)

    def _match(self, request: EngineRequest, ids: Sequence[int]) -> Match:
        known = self._prefixes.match(ids, request.prefix_namespace)
        return known if request.adapter is None else replace(known, adapter=request.adapter)

    def plan(self, adapters: Sequence[Adapter | None]) -> RowPlan:
        """Which adapters rows 0.. add to the base, for `decode`."""
        return self._runner.adapters.plan(adapters)

    def remember(self, ids: Sequence[int], row: int, namespace: str) -> None:
        """Keep the keys and values of `ids`, which are in `row`, for other requests."""
        self._prefixes.insert(ids, self._cache, row, namespace)

    def forget(self) -> None:
        """Drop all known prefixes."""
        self._prefixes.clear()

    def fits(self, num_rows: int, length: int) -> bool:
        """Whether there is memory for this many rows of this length."""
        return self._cache.fits(num_rows, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` positions over another row's."""
        self._cache.move(source, target, length)

    def prefill(self, first_row: int, sequences: list[list[int]], matches: list[Match]) -> int:
        """Fill rows `first_row`.. with `sequences`; returns the padded tokens computed.

        Known prefixes are copied, the rest is computed, whole blocks of it are remembered.
        """
        starts = [match.num_tokens for match in matches]
        length = self._runner.padded_length(sequences, starts)
        self._cache.ensure(first_row + len(matches), length + 1, num_used=first_row)
        for row, match in enumerate(matches, start=first_row):
            self._prefixes.load(match, self._cache, row)
        work = (length - max(starts)) * len(sequences)
        if work:
            self._use([match.adapter for match in matches])
            self._runner.prefill(self._cache, first_row, sequences, starts)
            filled = zip(sequences, matches, strict=True)
            for row, (sequence, match) in enumerate(filled, start=first_row):
                self.remember(sequence, row, match.namespace)
        return work

    def begin_long(
        self, request: EngineRequest, match: Match, *, is_scored: bool = False
    ) -> LongRequest:
        """A prompt for `advance` to compute or score, with its known prefix copied."""
        sequence = request.input_ids[:-1] if is_scored else request.sequence[:-1]
        cache = RowCache(self._cache.shape, len(sequence))
        cache.ensure(1, len(sequence), num_used=0)
        self._prefixes.load(match, cache, 0)
        return LongRequest(
            request=request,
            sequence=sequence,
            match=match,
            cache=cache,
            num_done=match.num_tokens,
            scored_from=len(request.scored_context) if is_scored else None,
        )

    def advance(self, long: LongRequest, max_cost: int) -> None:
        """Compute a piece of about `max_cost` (tokens times positions that they attend to)."""
        start = long.num_done
        size = max(max_cost // max(start, isqrt(max_cost)), _LEAST_PIECE)
        end = min(start + size, len(long.sequence))
        self._use([long.request.adapter])
        if long.scored_from is None or start < long.scored_from:
            end = min(end, long.scored_from or end)
            self._runner.prefill(long.cache, 0, [long.sequence[:end]], [start])
        else:
            self._score_piece(long, start, end)
        long.num_done = end
        if end == long.scored_from:
            self._prefixes.insert(long.sequence[:end], long.cache, 0, long.match.namespace)

    def _score_piece(self, long: LongRequest, start: int, end: int) -> None:
        """Compute tokens `start`..`end` of a long request, and record what they predict."""
        sequence = long.request.input_ids[: end + 1]
        for logits_BTV, norms_BT, positions in self._runner.score(
            long.cache, 0, [sequence], [start + 1]
        ):
            _record(long.request, logits_BTV[0], norms_BT[0], positions[0])

    def adopt(self, long: LongRequest, row: int) -> None:
        """Move a finished prompt to a row, after the rows in use, and remember it."""
        assert long.is_done
        length = len(long.sequence)
        self._cache.ensure(row + 1, length + 1, num_used=row)
        self._cache.keys[:, row, :length] = long.cache.keys[:, 0, :length]
        self._cache.values[:, row, :length] = long.cache.values[:, 0, :length]
        self.remember(long.sequence, row, long.match.namespace)

    def score(self, first_row: int, group: list[tuple[EngineRequest, Match]]) -> None:
        """Record the input log-probs that the requests ask for; uses rows `first_row`.. .

        Each comes with the known prefix of its `scored_context`.
        """
        requests = [request for request, _ in group]
        matches = [match for _, match in group]
        contexts = [request.scored_context for request in requests]
        starts = [len(context) + 1 for context in contexts]
        self.prefill(first_row, contexts, matches)
        sequences = [request.input_ids for request in requests]
        length = self._runner.padded_length(sequences, [start - 1 for start in starts])
        last_row = first_row + len(requests)
        self._use([request.adapter for request in requests])
        self._cache.ensure(last_row, length + 1, num_used=last_row)
        for logits_BTV, norms_BT, positions in self._runner.score(
            self._cache, first_row, sequences, starts
        ):
            for row, request in enumerate(requests):
                _record(request, logits_BTV[row], norms_BT[row], positions[row])
        for request, match in zip(requests, matches, strict=True):
            request.cached_tokens = match.num_tokens

    def decode(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, length: int, plan: RowPlan
    ) -> torch.Tensor:
        """Logits [B, V] after one more token in each of rows 0..B-1."""
        self._runner.adapters.use(plan)
        count = len(tokens_B1)
        self._cache.ensure(count, length, num_used=count)
        return self._runner.forward(
            self._cache, 0, tokens_B1, positions_B1, length, logits_to_keep=1
        )[:, -1]

    def _use(self, adapters: Sequence[Adapter | None]) -> None:
        self._runner.adapters.use(self._runner.adapters.plan(adapters))


def _record(
    request: EngineRequest, logits_TV: torch.Tensor, norms_T: torch.Tensor, positions: range
) -> None:
    """Append the log-probs of the tokens at `positions`, which the first columns predict."""
    count = len(positions)
    if count == 0:
        return
    logits_TV, norms_T = logits_TV[:count], norms_T[:count]
    targets_T = torch.tensor(
        request.input_ids[positions.start : positions.stop], device=norms_T.device
    )
    chosen_T = logits_TV.gather(1, targets_T[:, None])[:, 0] - norms_T
    request.input_logprobs.extend(chosen_T.tolist())
    if request.num_top:
        request.input_top.extend(top_logprobs(logits_TV - norms_T[:, None], request.num_top))
    if request.token_ids:
        columns = logits_TV[:, list(request.token_ids)] - norms_T[:, None]
        request.input_chosen.extend(columns.tolist())

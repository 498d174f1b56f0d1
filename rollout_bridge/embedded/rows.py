"""Rows of the key-value cache filled for requests: prefix reuse, prefill, scoring.

Between the scheduler, which decides who computes when, and the runner, which computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_bridge.embedded.kv_cache import RowCache
from rollout_bridge.embedded.prefix_cache import Match, PrefixCache
from rollout_bridge.embedded.request import EngineRequest
from rollout_bridge.embedded.runner import ModelRunner
from rollout_bridge.embedded.sampling import top_logprobs


class Rows:
    """The cache, the known prefixes and the computations that fill them."""

    def __init__(self, runner: ModelRunner, cache: RowCache, prefixes: PrefixCache):
        self.device = runner.device
        self._runner = runner
        self._cache = cache
        self._prefixes = prefixes

    def match(self, ids: Sequence[int], namespace: str) -> Match:
        """The known prefix of `ids`."""
        return self._prefixes.match(ids, namespace)

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
            self._runner.prefill(self._cache, first_row, sequences, starts)
            filled = zip(sequences, matches, strict=True)
            for row, (sequence, match) in enumerate(filled, start=first_row):
                self.remember(sequence, row, match.namespace)
        return work

    def score(self, first_row: int, requests: list[EngineRequest]) -> None:
        """Record the input log-probs that the requests ask for; uses rows `first_row`.. ."""
        starts = [request.score_from or 1 for request in requests]
        contexts = [r.input_ids[: start - 1] for r, start in zip(requests, starts, strict=True)]
        matches = [
            self.match(context, request.cache_namespace)
            for context, request in zip(contexts, requests, strict=True)
        ]
        self.prefill(first_row, contexts, matches)
        sequences = [request.input_ids for request in requests]
        length = self._runner.padded_length(sequences, [start - 1 for start in starts])
        last_row = first_row + len(requests)
        self._cache.ensure(last_row, length + 1, num_used=last_row)
        for logits_BTV, norms_BT, positions in self._runner.score(
            self._cache, first_row, sequences, starts
        ):
            for row, request in enumerate(requests):
                _record(request, logits_BTV[row], norms_BT[row], positions[row])
        for request, match in zip(requests, matches, strict=True):
            request.cached_tokens = match.num_tokens

    def decode(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Logits [B, V] after one more token in each of rows 0..B-1."""
        count = len(tokens_B1)
        self._cache.ensure(count, length, num_used=count)
        return self._runner.forward(
            self._cache, 0, tokens_B1, positions_B1, length, logits_to_keep=1
        )[:, -1]


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

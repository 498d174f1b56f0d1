"""Sampling of one token for every running request at once.

Log-probabilities are log_softmax(logits / temperature) of the whole vocabulary: truncation (top-p,
top-k, min-p) decides what can be sampled and does not renormalise them; penalties, biases and a
grammar change the logits themselves, as in SGLang. Temperature 0 takes the most probable token and
reports its log-probability at temperature 1.

Shape legend: B requests, V vocabulary.
"""

from __future__ import annotations

import torch

from rollout_bridge.embedded.model.logprobs import normalise
from rollout_bridge.embedded.scheduling.request import EngineRequest, TopLogprobs


class Sampler:
    """Settings of the running requests as tensors; `use` whenever the requests change."""

    def __init__(self, device: torch.device, seed: int | None):
        self._device = device
        self._generator = torch.Generator(device=device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self.use([])

    def use(self, requests: list[EngineRequest]) -> None:
        """The next calls of `sample` are for these requests, in this order."""
        self._requests = requests
        settings = [request.sampling for request in requests]
        temperatures = [item.temperature or 1.0 for item in settings]
        greedy = [item.temperature == 0 for item in settings]
        self._temperatures_B1 = torch.tensor(temperatures, device=self._device)[:, None]
        self._scales = any(value != 1 for value in temperatures)
        self._all_greedy = all(greedy)
        self._greedy_B1 = (
            torch.tensor(greedy, device=self._device)[:, None] if any(greedy) else None
        )
        self._truncated = [row for row, item in enumerate(settings) if item.truncates]
        self._adjusted = [row for row, item in enumerate(settings) if item.adjusts]
        self._constrained = [row for row, item in enumerate(requests) if item.matcher is not None]
        wants = [request.num_top or request.token_ids for request in requests]
        self._detailed = [row for row, want in enumerate(wants) if want]
        self._seeded = [
            (row, item.seed) for row, item in enumerate(settings) if item.seed is not None
        ]

    def sample(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [B] and their log-probabilities [B]; records top log-probs where asked for."""
        logits_BV = logits_BV.float()
        for row in self._adjusted:
            _adjust(logits_BV[row], self._requests[row])
        for row in self._constrained:
            matcher = self._requests[row].matcher
            assert matcher is not None
            matcher.mask(logits_BV[row])
        if self._scales:
            logits_BV = logits_BV / self._temperatures_B1
        below_BV, norms_B = normalise(logits_BV)
        logprobs_BV = below_BV.sub_(norms_B[:, None])
        scores_BV = logprobs_BV
        if self._truncated:
            scores_BV = scores_BV.clone()
            for row in self._truncated:
                _truncate(scores_BV[row], self._requests[row])
        ids_B1 = self._choose(scores_BV)
        if self._detailed:
            self._record_details(logprobs_BV)
        return ids_B1[:, 0], logprobs_BV.gather(1, ids_B1)[:, 0]

    def _choose(self, scores_BV: torch.Tensor) -> torch.Tensor:
        if self._greedy_B1 is None:
            return draw(scores_BV, self._uniforms(len(scores_BV)))
        likeliest_B1 = scores_BV.argmax(dim=-1, keepdim=True)
        if self._all_greedy:
            return likeliest_B1
        drawn_B1 = draw(scores_BV, self._uniforms(len(scores_BV)))
        return torch.where(self._greedy_B1, likeliest_B1, drawn_B1)

    def _uniforms(self, count: int) -> torch.Tensor:
        """One number in [0, 1) for each row, [B, 1]. That of a request with a seed depends only on
        the seed and on the place in the sequence, so an interrupted and continued reply is the one
        it would have been.
        """
        uniforms_B1 = torch.rand(
            (count, 1), generator=self._generator, dtype=torch.float64, device=self._device
        )
        for row, seed in self._seeded:
            uniforms_B1[row] = _uniform(seed, self._requests[row].num_tokens)
        return uniforms_B1

    def _record_details(self, logprobs_BV: torch.Tensor) -> None:
        for row in self._detailed:
            request = self._requests[row]
            if request.num_top:
                request.output_top.append(top_logprobs(logprobs_BV[row], request.num_top)[0])
            if request.token_ids:
                request.output_chosen.append(logprobs_BV[row, list(request.token_ids)].tolist())


def top_logprobs(logprobs_TV: torch.Tensor, count: int) -> list[TopLogprobs]:
    """The `count` largest of each row (or of the only row) with their ids, largest first."""
    values, ids = torch.atleast_2d(logprobs_TV).topk(min(count, logprobs_TV.shape[-1]), dim=-1)
    return [
        list(zip(row, row_ids, strict=True))
        for row, row_ids in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def draw(scores_BV: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """Ids [B, 1] of which each has a probability proportional to exp(its score): the first whose
    cumulative probability exceeds the row's number in [0, 1).

    In float64, since adding up a large vocabulary in float32 would move its later ids by 1e-5.
    """
    cumulative_BV = scores_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    totals_B1 = cumulative_BV[:, -1:]
    # Rounded up to the total itself, nothing would exceed it.
    targets_B1 = (uniforms_B1 * totals_B1).minimum(totals_B1.nextafter(totals_B1.new_zeros(())))
    found_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    # A row that is not a number (a grammar that allows nothing) must not fail the others.
    return found_B1.clamp_max_(scores_BV.shape[-1] - 1)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for each place in each sequence (splitmix64's finaliser)."""
    mask = 2**64 - 1
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return ((value ^ (value >> 31)) >> 11) * 2.0**-53


def _adjust(logits_V: torch.Tensor, request: EngineRequest) -> None:
    """Apply penalties for the response so far, biases, and the minimum length; in place."""
    sampling = request.sampling
    if request.output_ids:
        said = torch.tensor(request.output_ids, device=logits_V.device)
        counts_V = torch.bincount(said, minlength=logits_V.shape[0]).to(logits_V.dtype)
        if sampling.repetition_penalty != 1:
            penalised = torch.where(
                logits_V > 0,
                logits_V / sampling.repetition_penalty,
                logits_V * sampling.repetition_penalty,
            )
            logits_V.copy_(torch.where(counts_V > 0, penalised, logits_V))
        logits_V -= sampling.frequency_penalty * counts_V
        logits_V -= sampling.presence_penalty * (counts_V > 0)
    for token_id, bias in sampling.logit_bias:
        logits_V[token_id] += bias
    if len(request.output_ids) < sampling.min_new_tokens and sampling.stop_token_ids:
        logits_V[list(sampling.stop_token_ids)] = -torch.inf


def _truncate(logprobs_V: torch.Tensor, request: EngineRequest) -> None:
    """Set what top-k, then top-p, then min-p leave out to -inf, in place."""
    sampling = request.sampling
    if sampling.min_p > 0:
        floor = logprobs_V.max() + torch.tensor(sampling.min_p).log().item()
    if 0 < sampling.top_k < logprobs_V.shape[0]:
        smallest = logprobs_V.topk(sampling.top_k).values[-1]
        logprobs_V[logprobs_V < smallest] = -torch.inf
    if sampling.top_p < 1:
        probs, order = logprobs_V.softmax(dim=-1).sort(descending=True)
        # A token stays while the ones before it have not reached top_p: the first always stays.
        left_out = probs.cumsum(dim=-1) - probs >= sampling.top_p
        logprobs_V[order[left_out]] = -torch.inf
    if sampling.min_p > 0:
        logprobs_V[logprobs_V < floor] = -torch.inf

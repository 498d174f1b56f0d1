"""At start: is this model computed correctly through the engine's cache?

Padded rows of different lengths, prefill in two parts and single steps must give the logits of one
plain forward pass. Windows are narrowed meanwhile, so that a short text goes beyond them. A model
that does something else with its cache, mask or positions is refused here, instead of giving wrong
log-probabilities later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollout_bridge.embedded.errors import UnsupportedModel
from rollout_bridge.embedded.model.kv_cache import CacheShape, RowCache
from rollout_bridge.embedded.model.runner import ModelRunner

_LENGTHS = (20, 13)
_FIRST_PART = (9, 4)
_NARROW = 6
_TOLERANCE = {torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.5


@torch.inference_mode()
def check_cached_forward(runner: ModelRunner, shape: CacheShape) -> None:
    """Raises UnsupportedModel when cached and plain log-probs differ by more than rounding."""
    kind = runner.model.config.model_type
    try:
        with _narrow_window(runner.model.config):
            gap = _largest_gap(ModelRunner(runner.model, runner.context_length), shape)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        # Raised by models that cannot take this cache, mask or positions.
        raise UnsupportedModel(f"{kind}: cannot use the engine's cache: {error}") from error
    tolerance = _TOLERANCE.get(shape.dtype, _LOW_PRECISION_TOLERANCE)
    if not gap <= tolerance:
        raise UnsupportedModel(
            f"{kind}: log-probs through the engine's cache differ from a plain forward pass by "
            f"{gap:.3g} (allowed {tolerance:g})"
        )


def _largest_gap(runner: ModelRunner, shape: CacheShape) -> float:
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, runner.vocab_size, (length,), generator=generator).tolist()
        for length in _LENGTHS
    ]
    cache = RowCache(shape, max_tokens=1024)
    cache.ensure(len(sequences), 64, num_used=0)
    parts = [ids[:first] for ids, first in zip(sequences, _FIRST_PART, strict=True)]
    runner.prefill(cache, 0, parts, [0] * len(parts))
    contexts = [ids[:-1] for ids in sequences]
    runner.prefill(cache, 0, contexts, list(_FIRST_PART))
    last_B1 = torch.tensor([ids[-1:] for ids in sequences], device=runner.device)
    positions_B1 = torch.tensor([[length - 1] for length in _LENGTHS], device=runner.device)
    cached_BV = runner.forward(cache, 0, last_B1, positions_B1, max(_LENGTHS), 1)[:, -1]
    gaps = []
    for row, ids in enumerate(sequences):
        plain_V = runner.model(torch.tensor([ids], device=runner.device)).logits[0, -1]
        gaps.append(_gap(cached_BV[row], plain_V))
    # Not max(): it can lose a NaN.
    return float(torch.tensor(gaps).max())


@contextmanager
def _narrow_window(config: Any) -> Iterator[None]:
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window:
        text.sliding_window = min(window, _NARROW)
    try:
        yield
    finally:
        if window:
            text.sliding_window = window


def _gap(one_V: torch.Tensor, other_V: torch.Tensor) -> float:
    """Largest gap among the 20 most probable tokens."""
    one_V, other_V = one_V.float().log_softmax(-1), other_V.float().log_softmax(-1)
    likely = other_V.topk(min(20, other_V.shape[0])).indices
    return float((one_V[likely] - other_V[likely]).abs().max())

"""Which experts a mixture-of-experts engine sent each token to, for replay in training.

An engine that was started for it returns them as base64 of int32 [T, layers, topk], T = P + R - 1:
the last sampled token went through no layer (ALGORITHMS 6.7). No reply fails because of them: if
they are absent or odd, the result is None, and a trainer that must replay reports it. Pure.
"""

from __future__ import annotations

import base64
import binascii
import logging
from typing import Any

import numpy as np

from records.types import Experts

logger = logging.getLogger(__name__)


def read_experts(value: Any, num_tokens: int, topk: int) -> Experts | None:
    """The experts of `num_tokens` tokens [T, layers, topk] as int16 if they fit, else int32.

    None if the engine gave none, or something that cannot be of T = num_tokens - 1 tokens.
    """
    if not isinstance(value, str) or not value or topk < 1 or num_tokens < 2:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        logger.warning("routed experts are not base64 of int32: %s", error)
        return None
    if not flat.size or flat.size % ((num_tokens - 1) * topk):
        logger.warning(
            "%d routed experts do not fit %d tokens with %d per layer: is routed_experts_topk that "
            "of the model?",
            flat.size,
            num_tokens - 1,
            topk,
        )
        return None
    fits = np.iinfo(np.int16).min <= flat.min() and flat.max() <= np.iinfo(np.int16).max
    return flat.astype(np.int16 if fits else np.int32).reshape(num_tokens - 1, -1, topk)


def joined_experts(earlier: Experts | None, later: Experts | None) -> Experts | None:
    """The experts of a continued reply: for each token, those of when it was first computed.

    `later` covers all tokens so far; those in `earlier` were computed a second time.
    """
    if earlier is None or later is None or earlier.shape[1:] != later.shape[1:]:
        return later
    return np.concatenate([earlier, later[len(earlier) :]])

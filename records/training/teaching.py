"""What an objective may need besides a turn's own tokens: teachers' views of it, side samples.

Value types with their shapes checked on construction. Shapes: P prompt tokens, R response tokens,
K most probable tokens and m side samples at each of the R positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from records.names import SideSource

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Experts = NDArray[np.int16 | np.int32]

UNSCORED = ""
"""Teacher version of a hinted prompt that no engine scored: a teacher inside the trainer will do
it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """A teacher's view of a turn under one hint candidate.

    hinted_prompt_ids [P]; teacher_logprobs [R] at temperature 1, None if no engine scored them
    (`teacher_version` is then UNSCORED); topk_ids int32 and topk_logprobs float32 [R, K], or None.
    `candidate` is the hint's place among the turn's candidates.
    """

    candidate: int
    hint: str
    teacher: str
    teacher_version: str
    hinted_prompt_ids: Ids
    teacher_logprobs: Logprobs | None = None
    topk_ids: Ids | None = None
    topk_logprobs: Logprobs | None = None

    def check(self, turn_id: str, length: int) -> None:
        """Raises ValueError unless it belongs to a response of `length` tokens."""
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != length:
            raise ValueError(
                f"turn {turn_id}: candidate {self.candidate} has {len(self.teacher_logprobs)} "
                f"teacher log-probs for {length} response ids"
            )
        check_topk(turn_id, length, self.topk_ids, self.topk_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSamples:
    """m further tokens at each of R response positions, of `policy_version`: the version that
    sampled the turn, or that served when it was scored.

    ids [R, m] int32, drawn independently from the untruncated distribution, or the m likeliest;
    rollout_logprobs [R, m] float32 under the distribution that they come from; teacher_logprobs
    [R, m] float32 at temperature 1, NaN where no teacher has scored them (ALGORITHMS 5.2, 5.4).
    """

    ids: Ids
    rollout_logprobs: Logprobs
    teacher_logprobs: Logprobs
    policy_version: int
    source: SideSource = SideSource.POLICY

    def __post_init__(self) -> None:
        shapes = (self.ids.shape, self.rollout_logprobs.shape, self.teacher_logprobs.shape)
        if len(set(shapes)) != 1 or self.ids.ndim != 2 or not self.ids.size:
            raise ValueError(
                "side samples: ids, rollout and teacher log-probs must have one shape [R, m], got "
                f"{', '.join(map(str, shapes))}"
            )
        if not np.isfinite(self.rollout_logprobs).all():
            raise ValueError("side samples: a rollout log-prob is not finite; do not save them")
        if np.isinf(self.teacher_logprobs).any():
            raise ValueError("side samples: a teacher log-prob is infinite; do not save them")

    def check(self, turn_id: str, length: int) -> None:
        """Raises ValueError unless they are at `length` positions."""
        if len(self.ids) != length:
            raise ValueError(
                f"turn {turn_id}: side samples at {len(self.ids)} positions of {length}"
            )


def check_topk(turn_id: str, length: int, ids: Ids | None, logprobs: Logprobs | None) -> None:
    """Raises ValueError unless both are None, or both are [length, K] with K > 0."""
    if ids is None and logprobs is None:
        return
    if ids is None or logprobs is None:
        raise ValueError(f"turn {turn_id}: top-k ids and log-probs belong together")
    if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != length or not ids.size:
        raise ValueError(
            f"turn {turn_id}: top-k ids and log-probs must have one shape [{length}, K], "
            f"got {ids.shape} and {logprobs.shape}"
        )


def check_experts(turn_id: str, experts: Experts, num_tokens: int) -> None:
    """Raises ValueError unless they are int16 or int32 [num_tokens - 1, layers, topk]."""
    if experts.dtype not in (np.int16, np.int32):
        raise ValueError(f"turn {turn_id}: routed experts are int16 or int32, got {experts.dtype}")
    if experts.ndim != 3 or len(experts) != num_tokens - 1 or not experts.size:
        raise ValueError(
            f"turn {turn_id}: routed experts must have the shape [{num_tokens - 1}, layers, topk], "
            f"got {experts.shape}"
        )

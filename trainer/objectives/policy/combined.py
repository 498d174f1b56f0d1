"""Advantages of a teacher's hint and of a reward, added per token.

    A = opd_valid w_opd sg(lt - lb) + w_rl A_rl                                   (ALGORITHMS 3.2)

A turn without teacher carries `opd_valid` 0. It never gets the rollout engine's log-probs in the
teacher's place: their gap to the trainer's would pass for an advantage (9 item 5). One turn is one
sample, whether it has a hint, a reward or both.

Shapes: B rows, T tokens; N turns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def combined_advantages(
    teacher_logprobs_BT: Tensor,
    student_logprobs_BT: Tensor,
    reward_advantages_BT: Tensor,
    opd_valid_BT: Tensor,
    mask_BT: Tensor,
    *,
    opd_coef: float = 1.0,
    reward_coef: float = 1.0,
) -> Tensor:
    """The sum of both advantages [B, T], 0 at mask 0; log-probs at temperature 1.

    The teacher's log-probs where `opd_valid_BT` is 0 (NaN) are ignored. Raises ValueError for a
    flag that is neither 0 nor 1 at a token at mask 1.
    """
    used_BT = mask_BT > 0
    flags = opd_valid_BT[used_BT]
    if bool(((flags != 0) & (flags != 1)).any()):
        raise ValueError("opd_valid must be 0 or 1 at every policy token; 1 where a teacher scored")
    taught_BT = used_BT & (opd_valid_BT > 0)
    zeros_BT = torch.zeros_like(student_logprobs_BT)
    gap_BT = torch.where(taught_BT, teacher_logprobs_BT - student_logprobs_BT, zeros_BT)
    reward_BT = torch.where(used_BT, reward_advantages_BT, zeros_BT)
    return opd_coef * gap_BT + reward_coef * reward_BT


def term_ratio(term: float, coefficient: float, pg_loss: float) -> float:
    """|coefficient x term| / |pg_loss|: above 1 the term dominates (ALGORITHMS 7.4).

    NaN where the policy gradient's loss is 0, as it is in mean at ratio 1 with centred advantages.
    """
    return abs(coefficient * term / pg_loss) if pg_loss != 0 else math.nan

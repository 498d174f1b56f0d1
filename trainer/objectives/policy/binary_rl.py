"""A judge's verdict on a turn as the advantage of all its tokens, and which turns train.

Formulas: ALGORITHMS 3.1. Nothing is normalised, because there is one rollout per prompt. How votes
become a verdict is the judge's affair (judge/votes/rewards.py).

Shapes: N turns in the order in which they happened; B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

REWARDS = (-1.0, 0.0, 1.0)


@torch.no_grad()
def binary_advantages(rewards_N: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor) -> Tensor:
    """A = r of the token's turn [B, T], 0 at mask 0; `turn_ids_BT` index the turns.

    Raises ValueError for a reward of a turn with tokens that is none of -1, 0 and 1, and for a
    policy token without turn.
    """
    used_BT = mask_BT > 0
    turns = turn_ids_BT[used_BT]
    if turns.numel() and (int(turns.min()) < 0 or int(turns.max()) >= len(rewards_N)):
        raise ValueError(f"a policy token's turn id is outside 0..{len(rewards_N) - 1}")
    rewards = rewards_N[turns]
    if not bool(torch.isin(rewards, rewards.new_tensor(REWARDS)).all()):
        raise ValueError("a reward is none of -1, 0 and 1; a turn without verdict must not train")
    advantages_BT = torch.zeros_like(mask_BT)
    advantages_BT[used_BT] = rewards.to(mask_BT.dtype)
    return advantages_BT


@torch.no_grad()
def binary_trains(rewards_N: Tensor, has_next_state_N: Tensor, sessions_N: Tensor) -> Tensor:
    """Bool [N]: the turns that train, given turns in order and the session [N] of each.

    A turn without next state, such as the last of a session, does not train, nor does one of reward
    0 or NaN. But a session's first turn with a next state trains whatever its reward, as long as no
    earlier one of the session did: with reward 0 only the KL acts on it.
    """
    trains_N = torch.zeros(len(rewards_N), dtype=torch.bool, device=rewards_N.device)
    started: set[int] = set()
    rewards = rewards_N.nan_to_num(nan=0.0).tolist()
    turns = zip(rewards, has_next_state_N.tolist(), sessions_N.tolist(), strict=True)
    for index, (reward, has_next_state, session) in enumerate(turns):
        if has_next_state and (reward != 0 or session not in started):
            trains_N[index] = True
            started.add(session)
    return trains_N

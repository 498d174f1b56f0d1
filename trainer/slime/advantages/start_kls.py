"""How far each turn's response is from the start weights, where rewards are charged for it.

slime scores the batch under the start (--ref-load) before it asks for advantages. Every rank needs
the figure of every turn, because turns are compared by what is left of their rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout_bridge.slime.carrier import RowCarrier
from trainer.slime.ranks import Ranks


def start_kls(
    rollout_data: dict[str, Any], carriers: Sequence[RowCarrier], ranks: Ranks
) -> list[float]:
    """Of each turn of the batch, in nats: its response's log-prob under the policy minus that under
    the start, at temperature 1, without tokens that have none.

    Raises ValueError if slime has no log-probs of the start.
    """
    if not rollout_data.get("ref_log_probs"):
        raise ValueError(
            "trainer.objective.reward_kl_coef is above 0 and slime has no log-probs of the start: "
            "set --use-kl-loss and --ref-load"
        )
    own: dict[int, float] = {}
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    pairs = zip(rollout_data["log_probs"], rollout_data["ref_log_probs"], strict=True)
    for carrier, (policy, start), (total, response) in zip(carriers, pairs, lengths, strict=True):
        apart = ranks.join(policy - start, total, response)
        for turn in carrier.turns:
            tokens = apart[turn.start - carrier.prompt_length : turn.end - carrier.prompt_length]
            own[turn.index] = float(tokens[torch.isfinite(tokens)].sum())
    found = {index: nats for part in ranks.of_all(own) for index, nats in part.items()}
    return [found[index] for index in sorted(found)]

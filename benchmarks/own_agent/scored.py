"""Log-probs of answers, by a model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from records.types import Ids, Logprobs
from trainer.model.token_states import LogprobModel, TokenRequest

ROWS = 32
CHUNK_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probs [R] of an answer at temperature 1, and top-k [R, K] if requested."""

    logprobs: Logprobs
    topk_ids: Ids | None = None
    topk_logprobs: Logprobs | None = None


@torch.no_grad()
def scored(model: LogprobModel, rows: Sequence[tuple[Ids, Ids]], *, top_k: int = 0) -> list[Scored]:
    """The scores of each answer after its prompt, in order."""
    found: list[Scored] = []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        longest = max(len(prompt) + len(answer) for prompt, answer in part)
        ids_BT = torch.zeros((len(part), longest), dtype=torch.long)
        mask_BT = torch.zeros((len(part), longest))
        for row, (prompt, answer) in enumerate(part):
            end = len(prompt) + len(answer)
            ids_BT[row, :end] = torch.from_numpy(np.concatenate([prompt, answer])).long()
            mask_BT[row, len(prompt) : end] = 1
        seen = model.token_logprobs(ids_BT, mask_BT, None, TokenRequest(top_k=top_k))
        for row, (prompt, answer) in enumerate(part):
            place = slice(len(prompt), len(prompt) + len(answer))
            ids, values = None, None
            if seen.topk_ids_BTK is not None and seen.topk_BTK is not None:
                ids = seen.topk_ids_BTK[row, place].numpy().astype(np.int32)
                values = seen.topk_BTK[row, place].numpy().astype(np.float32)
            logprobs = seen.logprobs_BT[row, place].numpy().astype(np.float32)
            found.append(Scored(logprobs=logprobs, topk_ids=ids, topk_logprobs=values))
    return found

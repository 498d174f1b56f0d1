"""The worked batch of ALGORITHMS 4.7: three rows of 4, 3 and 2 tokens."""

import torch

RATIOS = torch.tensor(
    [[1, 2, 4, 0.5], [0.25, 1, 1, 1], [1.1, 0.9, 1, 1]],
    dtype=torch.float64,
)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.float64)
ROLLOUT = torch.full_like(RATIOS, -1.0)
TRAIN = ROLLOUT + RATIOS.log()

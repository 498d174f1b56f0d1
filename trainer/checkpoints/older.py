"""The policy as it was at versions whose weights are kept, next to the one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import HeldDtype, TrainerConfig
from trainer.model.lora import adapter_state
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.token_states import LogprobModel


class OlderPolicies:
    """One version at a time. With adapters, the policy uses the older one meanwhile, so that the
    base is in memory once. Without, all weights are loaded a second time.
    """

    def __init__(self, config: TrainerConfig, checkpoints: Checkpoints, policy: Policy):
        self._config, self._checkpoints, self._policy = config, checkpoints, policy

    def has(self, version: int) -> bool:
        """Whether the weights of `version` are kept."""
        return self._checkpoints.has_weights(version)

    @contextmanager
    def at(self, version: int) -> Iterator[LogprobModel]:
        """The policy at `version`, for scoring. The policy that trains is the same afterwards."""
        if self._config.lora is None:
            path = self._checkpoints.full_weights(version)
            assert path is not None, "`has` was asked before"
            yield load_frozen(self._config, path)
        elif version == 0:
            yield WithoutAdapters(self._policy)
        else:
            worn = adapter_state(self._policy.base_model)
            kept = {name: tensor.detach().clone() for name, tensor in worn.items()}
            try:
                self._checkpoints.load_adapters(version, self._policy)
                yield self._policy
            finally:
                with torch.no_grad():
                    for name, tensor in adapter_state(self._policy.base_model).items():
                        tensor.copy_(kept[name])


def load_frozen(config: TrainerConfig, path: str, base_dtype: HeldDtype = "float32") -> Policy:
    """The weights in a folder, frozen; any adapters were merged into them."""
    return Policy.load(
        path,
        device=config.device,
        dtype=config.dtype,
        chunk_tokens=config.logprob_chunk_tokens,
        base_dtype=base_dtype,
    ).freeze()

"""The policy as it was at versions whose weights are kept, next to the one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.model.lora import adapter_state, load_adapter
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
            yield Policy.load(
                path,
                device=self._config.device,
                dtype=self._config.dtype,
                chunk_tokens=self._config.logprob_chunk_tokens,
            ).freeze()
        elif version == 0:
            yield WithoutAdapters(self._policy)
        else:
            worn = adapter_state(self._policy.base_model)
            kept = {name: tensor.detach().clone() for name, tensor in worn.items()}
            try:
                load_adapter(self._policy.model, self._checkpoints.folder(version))
                yield self._policy
            finally:
                with torch.no_grad():
                    for name, tensor in adapter_state(self._policy.base_model).items():
                        tensor.copy_(kept[name])

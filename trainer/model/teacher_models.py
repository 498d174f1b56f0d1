"""Teachers inside the trainer: models that score the hinted prompt with the trainer's own weights.

    frozen        the start weights
    current       the policy as it is now
    ema           a moving average of the policy's weights     (ALGORITHMS 2.7)
    trust_region  logits between the start's and the policy's  (ALGORITHMS 2.7)

An engine scores only the tokens that it is asked for; these models score any token, which some
objectives need. They are called under no_grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.model.policy import Policy
from trainer.model.token_states import (
    PLAIN,
    Head,
    LogprobModel,
    TokenLogprobs,
    TokenRequest,
    token_logprobs,
)
from trainer.objectives.distributions.kl import at_least_float32


class StateModel(LogprobModel, Protocol):
    """A model that gives its hidden states and its output layer separately."""

    @property
    def chunk_tokens(self) -> int:
        """Policy tokens whose logits exist at the same time."""
        ...

    @property
    def head(self) -> Head:
        """The output layer."""
        ...

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[N, H] states of the rows that score the tokens at mask 1."""
        ...


class EmaTeacher:
    """The moving average of what trains in `policy`; `follow` moves it, once per successful step.

    During a call that scores, the averaged tensors replace the policy's: only what trains is held
    twice, with full weights and with adapters alike.
    """

    def __init__(self, policy: Policy, rate: float):
        if not 0 < rate <= 1:
            raise ValueError(f"the rate of a moving average lies in (0, 1], got {rate}")
        self._policy = policy
        self._rate = rate
        self._parameters: list[nn.Parameter] = policy.trainable_parameters()
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def follow(self) -> None:
        """average <- (1 - rate) average + rate policy."""
        for average, parameter in zip(self._average, self._parameters, strict=True):
            average.lerp_(parameter.detach(), self._rate)

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """As `Policy.token_logprobs`, under the averaged weights."""
        with self._in_place():
            return self._policy.token_logprobs(ids_BT, mask_BT, temperatures_BT, request)

    def state(self) -> list[Tensor]:
        """The averaged tensors, in the order of the policy's trainable parameters."""
        return self._average

    def load_state(self, state: list[Tensor]) -> None:
        """Put `state()` back. Raises ValueError where the shapes are another model's."""
        if [tensor.shape for tensor in state] != [tensor.shape for tensor in self._average]:
            raise ValueError("the checkpoint's averaged teacher is not of this model")
        for own, loaded in zip(self._average, state, strict=True):
            own.copy_(loaded)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        learned = [parameter.data for parameter in self._parameters]
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.data = average
        try:
            yield
        finally:
            for parameter, own in zip(self._parameters, learned, strict=True):
                parameter.data = own


class TrustRegionTeacher:
    """Logits (1 - alpha) reference + alpha policy, both under the hinted prompt.

    The mixture of two linear layers is one linear layer on both states side by side, so that its
    log-probs are computed in chunks like any other model's.
    """

    def __init__(self, reference: StateModel, policy: StateModel, alpha: float):
        if not 0 <= alpha <= 1:
            raise ValueError(f"the policy's share of the logits lies in [0, 1], got {alpha}")
        self._reference = reference
        self._policy = policy
        self._alpha = alpha

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """As `Policy.token_logprobs`, of the mixture."""
        start, now = self._reference.head, self._policy.head
        if start.weight_VH.shape[0] != now.weight_VH.shape[0]:
            raise ValueError("a trust region needs two models of one vocabulary")
        if start.softcap is not None or now.softcap is not None:
            raise ValueError("a trust region needs models that do not cap their logits")
        share = self._alpha
        parts = [
            (1 - share) * at_least_float32(self._reference.hidden_states(ids_BT, mask_BT)),
            share * at_least_float32(self._policy.hidden_states(ids_BT, mask_BT)),
        ]
        # With adapters both share one output layer, and nothing of it is copied.
        is_shared = start.weight_VH is now.weight_VH
        states = parts[0] + parts[1] if is_shared else torch.cat(parts, dim=-1)
        mixed = now if is_shared else _side_by_side(start, now, share)
        return token_logprobs(
            states,
            mixed,
            ids_BT,
            mask_BT > 0,
            temperatures_BT,
            request,
            chunk_tokens=self._policy.chunk_tokens,
        )


def _side_by_side(start: Head, now: Head, share: float) -> Head:
    """The output layer of both models' states, one after the other."""
    biases = [
        scale * head.bias_V
        for scale, head in ((1 - share, start), (share, now))
        if head.bias_V is not None
    ]
    return Head(
        weight_VH=torch.cat([at_least_float32(head.weight_VH) for head in (start, now)], dim=-1),
        bias_V=torch.stack(biases).sum(dim=0) if biases else None,
    )

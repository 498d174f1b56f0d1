"""The model that learns, and the frozen start it is held to: token log-probs from a causal LM.

Log-probs are computed only for policy tokens, from hidden states, a chunk of tokens at a time: the
[N, V] logits of a batch never exist at once. Knows no loss, no samples' meaning and no files beyond
loading.

Shapes: B rows, T tokens, N policy tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trainer.config import LoraConfig
from trainer.errors import StartupError

_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """[B, T], 0 outside the mask: log-probs at temperature 1, at the sampling temperature (the same
    tensor if that is 1 everywhere), entropy at temperature 1.
    """

    logprobs_BT: Tensor
    logprobs_sampled_BT: Tensor
    entropy_BT: Tensor


class LogprobModel(Protocol):
    """What gives log-probs of tokens: a `Policy`, or one seen without its adapters."""

    def token_logprobs(self, ids_BT: Tensor, mask_BT: Tensor) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1."""
        ...


class Policy:
    """A causal LM in float32 whose forward pass may run in bfloat16; dropout is always off."""

    def __init__(self, model: nn.Module, *, dtype: str, chunk_tokens: int):
        self.model = model.eval()
        self.chunk_tokens = chunk_tokens
        self._autocast_dtype = torch.bfloat16 if dtype == "bfloat16" else None
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.base_model = base
        self._decoder: nn.Module = base.get_decoder()
        self._head: nn.Module = base.get_output_embeddings()
        self._check_head()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        device: str,
        dtype: str,
        chunk_tokens: int,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ) -> Policy:
        """Load a Hugging Face folder or hub id; with `lora`, freeze it and add adapters.

        Raises StartupError for a model whose head is not a plain linear layer on hidden states.
        """
        # A bar per checkpoint would fill the log.
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.to(device)
        if lora is not None:
            from trainer.lora import add_adapters

            model = add_adapters(model, lora, seed)
        return cls(model, dtype=dtype, chunk_tokens=chunk_tokens)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.base_model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: ids must be below."""
        return int(self.base_model.get_input_embeddings().weight.shape[0])

    def freeze(self) -> Policy:
        """No parameter of it trains."""
        self.model.requires_grad_(False)
        return self

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Parameters with gradients, in the order of the model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        *,
        entropy_gradient: bool = False,
    ) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1. Call under no_grad for values without a graph.

        `temperatures_BT` are positive; None or all 1 computes one log-prob per token. A token at
        mask 1 in column 0 raises ValueError: no row scores it.
        """
        wanted_BT = mask_BT > 0
        if bool(wanted_BT[:, 0].any()):
            raise ValueError("the first token of a sequence has no log-prob")
        # The last token predicts nothing that is asked for.
        with self._autocast():
            hidden_BTH = self._decoder(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH[wanted_BT[:, 1:]]
        targets_N = ids_BT[wanted_BT]
        temperatures_N = None
        if temperatures_BT is not None:
            selected = temperatures_BT[wanted_BT]
            temperatures_N = None if bool((selected == 1.0).all()) else selected
        plain_N, sampled_N, entropy_N = self._head_logprobs(
            hidden_NH, targets_N, temperatures_N, entropy_gradient
        )
        plain_BT = _scatter(plain_N, wanted_BT)
        same = sampled_N is plain_N
        return TokenLogprobs(
            logprobs_BT=plain_BT,
            logprobs_sampled_BT=plain_BT if same else _scatter(sampled_N, wanted_BT),
            entropy_BT=_scatter(entropy_N, wanted_BT),
        )

    def _head_logprobs(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = self.chunk_tokens
        num_chunks = max(1, -(-len(targets_N) // size))
        recompute = num_chunks > 1 and torch.is_grad_enabled() and hidden_NH.requires_grad
        plain, sampled, entropy = [], [], []
        for start in range(0, num_chunks * size, size):
            part = slice(start, start + size)
            temperatures = None if temperatures_N is None else temperatures_N[part]
            arguments = (hidden_NH[part], targets_N[part], temperatures, entropy_gradient)
            # With several chunks the logits are computed again in the backward pass, so that only
            # one chunk's exist at a time.
            outputs = (
                checkpoint(self._chunk, *arguments, use_reentrant=False)
                if recompute
                else self._chunk(*arguments)
            )
            plain.append(outputs[0])
            sampled.append(outputs[1])
            entropy.append(outputs[2])
        plain_N = torch.cat(plain)
        sampled_N = plain_N if temperatures_N is None else torch.cat(sampled)
        return plain_N, sampled_N, torch.cat(entropy)

    def _chunk(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with self._autocast(enabled=False):
            logits_NV = self._head(hidden_NH.float()).float()
        targets_N1 = targets_N.unsqueeze(-1)
        normaliser_N = torch.logsumexp(logits_NV, dim=-1)
        target_logits_N = logits_NV.gather(-1, targets_N1).squeeze(-1)
        plain_N = target_logits_N - normaliser_N
        sampled_N = plain_N
        if temperatures_N is not None:
            scaled_NV = logits_NV / temperatures_N.unsqueeze(-1)
            sampled_N = target_logits_N / temperatures_N - torch.logsumexp(scaled_NV, dim=-1)
        with nullcontext() if entropy_gradient else torch.no_grad():
            probabilities_NV = torch.exp(logits_NV - normaliser_N.unsqueeze(-1))
            entropy_N = normaliser_N - (probabilities_NV * logits_NV).sum(dim=-1)
        return plain_N, sampled_N, entropy_N

    def _autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype, enabled=enabled)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some models scale or cap logits after the head: refuse rather than train on others."""
        ids_BT = torch.arange(8, device=self.device).remainder(self.vocab_size).unsqueeze(0)
        with self._autocast():
            expected = self.base_model(input_ids=ids_BT, use_cache=False).logits.float()
            hidden = self._decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
        with self._autocast(enabled=False):
            actual = self._head(hidden.float()).float()
        tolerance = _PROBE_TOLERANCE if self._autocast_dtype is None else 0.5
        if not torch.allclose(actual, expected, atol=tolerance, rtol=tolerance):
            raise StartupError(
                f"{type(self.base_model).__name__} changes its logits after the output layer; "
                "the trainer supports models whose logits are that layer's output"
            )


class WithoutAdapters:
    """The start weights of a policy that trains adapters: the same model, adapters switched off."""

    def __init__(self, policy: Policy):
        self._policy = policy

    def token_logprobs(self, ids_BT: Tensor, mask_BT: Tensor) -> TokenLogprobs:
        """As `Policy.token_logprobs`, at temperature 1."""
        model: Any = self._policy.model
        with model.disable_adapter():
            return self._policy.token_logprobs(ids_BT, mask_BT)


def _scatter(values_N: Tensor, wanted_BT: Tensor) -> Tensor:
    """Values at the wanted places in row order, 0 elsewhere."""
    result_BT = values_N.new_zeros(wanted_BT.shape)
    return result_BT.masked_scatter(wanted_BT, values_N)

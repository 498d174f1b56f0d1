"""The model that learns, and the frozen start it is held to: token log-probs from a causal LM.

Log-probs are computed only for policy tokens, from hidden states (token_states.py). It knows no
loss, no meaning of samples, and no files except for loading.

Shapes: B rows, T tokens, N policy tokens, H hidden size.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollout_bridge.embedded.model.supported import context_limit
from trainer.config import HeldDtype, LoraConfig
from trainer.errors import StartupError
from trainer.model.frozen_weights import hold_in_bfloat16
from trainer.model.recomputation import recompute_layers
from trainer.model.token_states import (
    PLAIN,
    Head,
    TokenLogprobs,
    TokenRequest,
    shared_length,
    states_behind,
    token_logprobs,
)

logger = logging.getLogger(__name__)

_PROBE_TOLERANCE = 1e-3


class Policy:
    """A causal LM whose forward pass may run in bfloat16; dropout is always off. Trained weights
    are float32, frozen ones may be bfloat16. `recomputes`: layers are computed again for their
    gradients. `shares_prefixes`: the beginning that rows share is computed once, if its model can.
    """

    def __init__(self, model: nn.Module, *, dtype: str, chunk_tokens: int):
        self.model = model.eval()
        self.chunk_tokens = chunk_tokens
        self._autocast_dtype = torch.bfloat16 if dtype == "bfloat16" else None
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self.base_model = base
        self._decoder: nn.Module = base.get_decoder()
        self._scale, softcap = _after_head(base.config)
        self._head: Any = base.get_output_embeddings()
        bias_V = getattr(self._head, "bias", None)
        self.head = Head(weight_VH=self._head.weight, bias_V=bias_V, softcap=softcap)
        """The output layer's own tensors."""
        self._position_limit = context_limit(base.config.get_text_config().to_dict())
        self.recomputes = False
        self._check_head()
        self.shares_prefixes = self._check_sharing()

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
        base_dtype: HeldDtype = "float32",
        recompute: bool = False,
    ) -> Policy:
        """Load a Hugging Face folder or hub id; with `lora`, freeze it and add adapters.

        With `base_dtype` bfloat16 the weights are frozen and held in it; with `recompute`, every
        layer is computed again for gradients.

        Raises StartupError for a model whose head is not a plain linear layer on hidden states.
        """
        # A bar per checkpoint would fill the log.
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, base_dtype))
        if base_dtype == "bfloat16":
            hold_in_bfloat16(model)
        model.to(device)
        if lora is not None:
            from trainer.model.lora import add_adapters

            model = add_adapters(model, lora, seed)
        policy = cls(model, dtype=dtype, chunk_tokens=chunk_tokens)
        if recompute:
            policy.recompute_layers()
        return policy

    def recompute_layers(self) -> None:
        """Keep only each layer's input for the backward pass, which computes the rest again."""
        self.recomputes = bool(recompute_layers(self._decoder))
        if not self.recomputes:
            logger.warning(
                "%s: no known decoder layer can be computed again; "
                "trainer.gradient_checkpointing saves no memory",
                type(self.base_model).__name__,
            )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.base_model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: ids must be below."""
        return int(self.base_model.get_input_embeddings().weight.shape[0])

    def freeze(self) -> Policy:
        """Let no parameter train."""
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
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1. Call under no_grad for values without a graph.

        A token at mask 1 in column 0 raises ValueError: no row scores it.
        """
        return token_logprobs(
            self.hidden_states(ids_BT, mask_BT),
            self.head,
            ids_BT,
            mask_BT > 0,
            temperatures_BT,
            request,
            chunk_tokens=self.chunk_tokens,
        )

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[N, H] states of the rows that score the tokens at mask 1, in row order."""
        wanted_BT = mask_BT > 0
        if bool(wanted_BT[:, 0].any()):
            raise ValueError("the first token of a sequence has no log-prob")
        # In a longer text, positions mean something else than in its beginning alone.
        is_short = self._position_limit is None or ids_BT.shape[1] <= self._position_limit
        shared = shared_length(ids_BT, mask_BT) if self.shares_prefixes and is_short else 0
        # The last token predicts nothing that is asked for.
        with self._autocast():
            hidden_BTH = states_behind(self._decoder, ids_BT[:, :-1], shared)
        hidden_NH = hidden_BTH[wanted_BT[:, 1 + shared :]]
        return hidden_NH if self._scale == 1 else hidden_NH * self._scale

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    @torch.no_grad()
    def _check_sharing(self) -> bool:
        """Whether states after a shared prefix are those of whole rows."""
        ids_BT = torch.arange(16, device=self.device).remainder(self.vocab_size).reshape(2, 8)
        ids_BT[1, :4] = ids_BT[0, :4]
        try:
            with self._autocast():
                whole, behind = (states_behind(self._decoder, ids_BT, n) for n in (0, 4))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            logger.info("the beginning that rows share is computed for each of them: %s", error)
            return False
        tolerance = _PROBE_TOLERANCE if self._autocast_dtype is None else 0.5
        return torch.allclose(whole[:, 4:].float(), behind.float(), atol=tolerance, rtol=tolerance)

    @torch.no_grad()
    def _check_head(self) -> None:
        """What a model does to its logits after the head must be known (`_after_head`): refuse it
        rather than train on other logits.
        """
        ids_BT = torch.arange(8, device=self.device).remainder(self.vocab_size).unsqueeze(0)
        with self._autocast():
            expected = self.base_model(input_ids=ids_BT, use_cache=False).logits.float()
            hidden = self._decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
        with torch.autocast(ids_BT.device.type, enabled=False):
            actual = self._head(self._scale * hidden.float()).float()
            if (softcap := self.head.softcap) is not None:
                actual = softcap * torch.tanh(actual / softcap)
        tolerance = _PROBE_TOLERANCE if self._autocast_dtype is None else 0.5
        if not torch.allclose(actual, expected, atol=tolerance, rtol=tolerance):
            raise StartupError(
                f"{type(self.base_model).__name__} changes its logits after the output layer; the "
                "trainer supports models whose logits are that layer's output, scaled or capped"
            )


def _after_head(model_config: Any) -> tuple[float, float | None]:
    """How a model changes its logits: a factor, and a soft cap (Gemma 2)."""
    text = model_config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0
    return scale, getattr(text, "final_logit_softcapping", None)


class WithoutAdapters:
    """The start weights of a policy that trains adapters: the same model, adapters switched off."""

    def __init__(self, policy: Policy):
        self._policy = policy

    @property
    def head(self) -> Head:
        """The output layer, which has no adapter."""
        return self._policy.head

    @property
    def chunk_tokens(self) -> int:
        """As the policy's."""
        return self._policy.chunk_tokens

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """As `Policy.hidden_states`, of the start weights."""
        model: Any = self._policy.model
        with model.disable_adapter():
            return self._policy.hidden_states(ids_BT, mask_BT)

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """As `Policy.token_logprobs`, of the start weights."""
        model: Any = self._policy.model
        with model.disable_adapter():
            return self._policy.token_logprobs(ids_BT, mask_BT, temperatures_BT, request)

"""The parts of a model's `config.json` that determine how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError
from trainer.model.model_config import config_value, stated_values

_TWO_MATRICES = ("gpt2", "gpt_neox", "opt", "phi", "starcoder2")
"""Families whose feed-forward layers have no gate."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder's parts; `inner` is the width of a feed-forward layer, of one expert's in
    a mixture of `num_experts` (1: no mixture).
    """

    num_layers: int
    width: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool
    num_matrices: int
    """Matrices of a feed-forward layer: 3 with a gate, 2 without."""
    num_experts: int
    context_length: int
    """Most tokens of a text."""

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, which is also the head if they are tied."""
        return self.vocab_size * self.width

    @property
    def num_parameters(self) -> int:
        """All weights except norms and biases, which are less than one in a thousand."""
        attention = 2 * self.width * self.head_size * (self.num_heads + self.num_kv_heads)
        feed_forward = self.num_matrices * self.width * self.inner * self.num_experts
        router = self.width * self.num_experts if self.num_experts > 1 else 0
        ends = self.embedding_parameters * (1 if self.is_tied else 2)
        return ends + self.num_layers * (attention + feed_forward + router)

    def adapter_parameters(self, rank: int) -> int:
        """Weights of adapters on all linear layers except the head: rank times each one's inputs
        and outputs.
        """
        heads = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention = 4 * self.width + heads
        feed_forward = self.num_matrices * (self.width + self.inner) * self.num_experts
        return rank * self.num_layers * (attention + feed_forward)

    def cache_bytes(self, itemsize: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * itemsize

    def layer_values(self) -> int:
        """Numbers that a layer computes for one token, backward pass included: its input, norms,
        queries, keys, values, the output of attention, and the inner values of the feed-forward
        layer.
        """
        attention = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        return 6 * self.width + 2 * attention + 2 * self.num_matrices * self.inner


def shape_of(model: str) -> ModelShape:
    """The shape of a model, a local folder with a `config.json` or a hub id.

    Raises ConfigError if it cannot be read or does not state its sizes.
    """
    try:
        whole = stated_values(model)
        stated = {**whole, **(whole.get("text_config") or {})}
        context = config_value(model, "max_position_embeddings")
        heads = _number(model, "num_attention_heads")
        width = _number(model, "hidden_size")
        experts = next((int(stated[key]) for key in _EXPERTS if stated.get(key)), 1)
        inner = stated.get("moe_intermediate_size") if experts > 1 else None
        return ModelShape(
            num_layers=_number(model, "num_hidden_layers"),
            width=width,
            inner=int(inner or _number(model, "intermediate_size")),
            num_heads=heads,
            num_kv_heads=int(stated.get("num_key_value_heads") or heads),
            head_size=int(stated.get("head_dim") or width // heads),
            vocab_size=_number(model, "vocab_size"),
            is_tied=bool(config_value(model, "tie_word_embeddings")),
            num_matrices=2 if stated.get("model_type") in _TWO_MATRICES else 3,
            num_experts=experts,
            context_length=context if isinstance(context, int) else _number(model, "n_positions"),
        )
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model: cannot read '{model}': {str(error).splitlines()[0]}") from None


def _number(model: str, key: str) -> int:
    value: Any = config_value(model, key)
    if not isinstance(value, int):
        raise ConfigError(f"model: '{model}' does not state its {key}; is it a causal LM?")
    return value

"""A model's architecture: Hugging Face's config.json -> Megatron's flags.

Keys are those of config.json. slime compares most of them with its flags when it starts; derived
flags cannot disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from trainer.errors import StartupError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
Flag = tuple[str, ...]
"""A flag and its values."""


class ArchitectureError(StartupError):
    """The model's config.json is missing, incomplete, or of an unknown family."""


class Architecture(BaseModel):
    """What Megatron must know about a model, under the names of config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model_type: Family
    """Family; it decides where biases and norms are."""
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    rope_theta: PositiveFloat
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool
    max_position_embeddings: PositiveInt
    """Context length; no flag, since rotary positions need none."""
    num_experts: PositiveInt | None = None
    """Experts of each layer; unset in a dense model, as are the three below."""
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool | None = None
    """Whether the weights of the chosen experts are made to sum to 1."""

    @property
    def is_moe(self) -> bool:
        """Whether this is a mixture of experts."""
        return self.model_type == "qwen3_moe"


_MOE_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def read_architecture(folder: Path) -> Architecture:
    """Read a model folder's config.json. Raises ArchitectureError: what is wrong, what to do."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArchitectureError(
            f"model: no {path}; give the folder of the weights, or copy the values of its "
            "config.json into [cluster.architecture]"
        ) from None
    except (OSError, ValueError) as error:
        raise ArchitectureError(f"model: cannot read {path}: {error}") from None
    return from_config_json(values, str(path))


def from_config_json(values: dict[str, Any], where: str) -> Architecture:
    """The values of a config.json, in its old or new layout. Raises ArchitectureError."""
    family = values.get("model_type")
    if family not in get_args(Family):
        raise ArchitectureError(
            f"{where}: model_type {family!r} is not one of {', '.join(get_args(Family))}; write "
            "Megatron's flags for it into cluster.model_flags"
        )
    _refuse_what_flags_cannot_say(values, where)
    taken = {key: values[key] for key in Architecture.model_fields if values.get(key) is not None}
    if family != "qwen3_moe":
        taken = {key: value for key, value in taken.items() if key not in _MOE_KEYS}
    rope = values.get("rope_parameters") or {}
    theta = rope.get("rope_theta", values.get("rope_theta"))
    if theta is not None:
        taken["rope_theta"] = float(theta)
    taken.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    taken.setdefault("tie_word_embeddings", False)
    if "head_dim" not in taken and values.get("num_attention_heads"):
        taken["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    try:
        return Architecture.model_validate(taken)
    except ValidationError as error:
        lines = [f"{item['loc'][0]}: {item['msg']}" for item in error.errors()]
        raise ArchitectureError(f"{where}: {'; '.join(lines)}") from None


def _refuse_what_flags_cannot_say(values: dict[str, Any], where: str) -> None:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    odd = {
        f"rope scaling {kind!r}": kind != "default",
        "sliding window attention": bool(values.get("use_sliding_window")),
        "dense layers between layers of experts": bool(values.get("mlp_only_layers"))
        or values.get("decoder_sparse_step", 1) != 1,
    }
    found = [name for name, present in odd.items() if present]
    if found:
        raise ArchitectureError(
            f"{where}: {' and '.join(found)} cannot be derived; write Megatron's flags for this "
            "model into cluster.model_flags"
        )


def megatron_flags(model: Architecture) -> list[Flag]:
    """The architecture flags of Megatron-LM for this model."""
    flags: list[Flag] = [
        ("--num-layers", str(model.num_hidden_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.intermediate_size)),
        ("--num-attention-heads", str(model.num_attention_heads)),
        ("--group-query-attention",),
        ("--num-query-groups", str(model.num_key_value_heads)),
        ("--kv-channels", str(model.head_dim)),
        ("--vocab-size", str(model.vocab_size)),
        ("--swiglu",),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", f"{model.rms_norm_eps:g}"),
        ("--position-embedding-type", "rope"),
        ("--rotary-base", str(int(model.rope_theta))),
        ("--disable-bias-linear",),
    ]
    if model.model_type == "qwen2":
        flags.append(("--add-qkv-bias",))
    if model.model_type.startswith("qwen3"):
        flags.append(("--qk-layernorm",))
    if not model.tie_word_embeddings:
        flags.append(("--untie-embeddings-and-output-weights",))
    return flags + (_expert_flags(model) if model.is_moe else [])


def _expert_flags(model: Architecture) -> list[Flag]:
    if None in (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size):
        raise ArchitectureError(
            "cluster.architecture: a mixture of experts needs num_experts, num_experts_per_tok and "
            "moe_intermediate_size"
        )
    flags: list[Flag] = [
        ("--num-experts", str(model.num_experts)),
        ("--moe-router-topk", str(model.num_experts_per_tok)),
        ("--moe-ffn-hidden-size", str(model.moe_intermediate_size)),
        ("--moe-layer-freq", f"[{','.join(['1'] * model.num_hidden_layers)}]"),
        ("--moe-router-score-function", "softmax"),
        ("--moe-router-dtype", "fp32"),
        ("--moe-aux-loss-coeff", "0"),
        ("--moe-token-dispatcher-type", "alltoall"),
        ("--moe-token-drop-policy", "probs"),
        ("--moe-grouped-gemm",),
        ("--moe-permute-fusion",),
    ]
    # Softmax over only the chosen experts makes their weights sum to 1; softmax before the choice
    # leaves them their share of all.
    return flags if model.norm_topk_prob else [*flags, ("--moe-router-pre-softmax",)]

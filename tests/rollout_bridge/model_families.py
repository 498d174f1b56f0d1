"""Tiny random models of the architectures that people use, by the name of the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 96
WINDOW = 24
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen 2.5": ("Qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "Qwen 2, windows": ("Qwen2", _WINDOWS),
    "Qwen 3": ("Qwen3", {}),
    "Qwen 3, windows": ("Qwen3", _WINDOWS),
    "Qwen 3, experts": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4}),
    "Gemma": ("Gemma", {}),
    "Gemma 2": ("Gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "Gemma 3": (
        "Gemma3Text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Mistral, a window": ("Mistral", {"sliding_window": WINDOW}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "Ministral": ("Ministral", {"sliding_window": WINDOW}),
    "Phi-3": ("Phi3", {"sliding_window": WINDOW}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "Granite": ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}),
    "Olmo 2": ("Olmo2", {}),
    "Olmo 3": ("Olmo3", {"sliding_window": WINDOW}),
    "gpt-oss": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "Cohere 2": ("Cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25}),
    "StarCoder 2": ("Starcoder2", {"sliding_window": WINDOW}),
    "EXAONE 4": ("Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "GLM 4": ("Glm4", {}),
    "Seed-OSS": ("SeedOss", {}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "Hunyuan": ("HunYuanDenseV1", {}),
    "StableLM": ("StableLm", {}),
    "Phi": ("Phi", {}),
}
"""Name: transformers' class without its ending, and what its configuration says besides."""


def config_of(family: str) -> Any:
    """The family's configuration, in the size of the tests."""
    kind, changes = FAMILIES[family]
    return getattr(transformers, f"{kind}Config")(**{**_SHAPE, **changes})


def model_of(family: str) -> Any:
    """A random model of the family in float32, the same each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()


def save_model(family: str, folder: Path) -> Path:
    """The random model as a folder."""
    model_of(family).save_pretrained(folder)
    return folder

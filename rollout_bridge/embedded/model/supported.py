"""Which architectures the embedded engine serves, from a model's configuration alone.

It needs no torch, so that whoever starts an engine can check first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL_BELOW = 512
"""Models below this hidden size are small; others gain from threads and need to save memory."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers that are served, by transformers' names."""
_OTHER_LAYERS = (
    *("full_attention_interval", "attn_layer_period", "hybrid_override_pattern"),
    *("mamba_d_state", "state_size", "ssm_cfg"),
)
"""Keys of a `config.json` that show that the model has other layers than attention."""
_POSITIONS_IN_MASK = ("bloom", "mpt")
_OTHER_HEADS = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Architectures that no key of the configuration reveals."""
_ONLY = "only attention to all earlier positions, or to a window of them, is served"


def unsupported(model_config: Any) -> str | None:
    """Why the key-value rows of this engine cannot serve a model of this configuration
    (transformers'); None if they can.
    """
    text = model_config.get_text_config()
    name = model_config.model_type
    if getattr(model_config, "is_encoder_decoder", False):
        return f"{name}: encoder-decoder models are not served"
    types = getattr(text, "layer_types", None)
    return _other_attention(name, types, vars(text))


def unsupported_as_stated(stated: Mapping[str, Any]) -> str | None:
    """`unsupported`, as far as a `config.json` shows it for certain. None may also mean that only
    the configuration's class can tell.
    """
    name, text = str(stated.get("model_type")), stated
    if isinstance(part := stated.get("text_config"), Mapping):
        text = part
    if stated.get("is_encoder_decoder"):
        return f"{name}: encoder-decoder models are not served"
    types = text.get("layer_types")
    if (reason := _other_attention(name, types, text)) is not None or types:
        return reason
    if (key := next((key for key in _OTHER_LAYERS if text.get(key)), None)) is not None:
        return f"{name}: not every layer is an attention layer (config.json has {key!r}); {_ONLY}"
    return None


def context_limit(text: Mapping[str, Any]) -> int | None:
    """Most tokens for which a position means the same in a text of any length; None: no such limit.

    `text` is the text part of a configuration. A model with LongRoPE (Phi-3 with 128k) uses other
    angles for all positions once a text is longer: what was cached of the shorter text is then
    wrong, and so are the other rows of its batch.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return None
    # Families with several kinds of layers have an entry for each.
    kinds = [one for one in rope.values() if isinstance(one, Mapping)]
    if kinds:
        limits = [context_limit({**text, "rope_parameters": one}) for one in kinds]
        return min(filter(None, limits), default=None)
    if (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su", "dynamic"):
        return None
    key = "original_max_position_embeddings"
    return rope.get(key) or text.get(key) or text.get("max_position_embeddings")


def _other_attention(name: str, layer_types: Any, text: Mapping[str, Any]) -> str | None:
    if name in _POSITIONS_IN_MASK or text.get("alibi"):
        return f"{name}: its attention mask contains the positions (ALiBi), which is not served"
    if name in _OTHER_HEADS:
        return f"{name}: its layers differ in the size of a head, which is not served"
    others = sorted(set(layer_types or ()) - {FULL, SLIDING})
    if others:
        return f"{name}: layers of type {', '.join(others)} need another cache; {_ONLY}"
    if layer_types and len(layer_types) != text.get("num_hidden_layers", len(layer_types)):
        return f"{name}: layer_types names {len(layer_types)} layers, num_hidden_layers differs"
    if SLIDING in (layer_types or ()) and not text.get("sliding_window"):
        return f"{name}: it has layers of type {SLIDING} but does not state their sliding_window"
    if text.get("use_bidirectional_attention"):
        return f"{name}: its tokens attend to later ones (use_bidirectional_attention); {_ONLY}"
    if text.get("num_kv_shared_layers"):
        return f"{name}: layers share keys and values of others (num_kv_shared_layers); {_ONLY}"
    return None

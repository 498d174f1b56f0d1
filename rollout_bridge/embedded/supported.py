"""Which architectures the embedded engine serves, from a model's configuration alone.

It needs no torch, so that whoever starts an engine can ask first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OTHER_LAYERS = (
    *("full_attention_interval", "attn_layer_period", "hybrid_override_pattern"),
    *("mamba_d_state", "state_size", "ssm_cfg"),
)
"""Keys of a `config.json` whose model has layers besides those of attention."""


def unsupported(model_config: Any) -> str | None:
    """Why the key-value rows of this engine cannot serve a model of this configuration
    (transformers'); None if they can.
    """
    text = model_config.get_text_config()
    name = model_config.model_type
    if getattr(model_config, "is_encoder_decoder", False):
        return f"{name}: encoder-decoder models are not served"
    types = getattr(text, "layer_types", None)
    if (reason := _other_layers(name, types)) is not None:
        return reason
    window = getattr(text, "sliding_window", None)
    if window and not types and getattr(text, "use_sliding_window", True):
        return _window(name, window)
    return None


def unsupported_as_stated(stated: Mapping[str, Any], *, has_window_switch: bool) -> str | None:
    """`unsupported` as far as a `config.json` tells it for certain: None may also mean that its
    class must be asked. `has_window_switch`: its class may leave a stated window unused.
    """
    name, text = stated.get("model_type"), stated
    if isinstance(part := stated.get("text_config"), Mapping):
        text = part
    if stated.get("is_encoder_decoder"):
        return f"{name}: encoder-decoder models are not served"
    types = text.get("layer_types")
    if types:
        return _other_layers(str(name), types)
    if (key := next((key for key in _OTHER_LAYERS if text.get(key)), None)) is not None:
        return (
            f"{name}: not every layer is one of attention (config.json has {key!r}); only full "
            "attention in every layer is served"
        )
    window = text.get("sliding_window")
    return _window(str(name), window) if window and not has_window_switch else None


def _other_layers(name: str, layer_types: Any) -> str | None:
    others = set(layer_types or ()) - {"full_attention"}
    if not others:
        return None
    return (
        f"{name}: layers of type {', '.join(sorted(others))} need another cache; only full "
        "attention in every layer is served"
    )


def _window(name: str, window: int) -> str:
    return (
        f"{name}: attention is limited to a window of {window} tokens; only full attention is "
        "served"
    )

"""Names what made token ids: two renderings with one fingerprint give the same text the same ids.

It covers the tokenizer, its chat template and the renderer's settings, but not their location.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering


def renderer_fingerprint(rendering: Rendering, config: RendererConfig) -> str:
    """Hex SHA-256 of `rendering`'s tokenizer and chat template, and of `config`."""
    parts = {
        "tokenizer": _tokenizer(rendering.tokenizer),
        "chat_template": rendering.tokenizer.chat_template,
        "renderer": config.model_dump(mode="json"),
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _tokenizer(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python has no such description
        return {
            "class": type(tokenizer).__name__,
            "vocabulary": tokenizer.get_vocab(),
            "special": sorted(tokenizer.all_special_tokens),
        }
    described = json.loads(backend.to_str())
    # Settings of the last call, not of the tokenizer.
    return {key: value for key, value in described.items() if key not in ("padding", "truncation")}

"""Which token ids end a reply of a model: one set, for engine, renderer and parser alike.

A model states it in several places, not always consistently: `generation_config.json` and
`config.json` (`eos_token_id`, one or several), its tokenizer, and its chat template, which shows
the token that ends a turn. Knows no torch and no messages.
"""

from __future__ import annotations

from typing import Any

import jinja2

from rollout_bridge.rendering.tokenizer import ModelFiles, control_texts

_REPLY = "Zanzibar"
"""Text of an assistant's message that no template writes by itself."""


def model_stop_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a reply of `model`, a local folder or a hub id.

    The template's end token counts only if no `generation_config.json` written for the model names
    one: some families end messages inside a reply with a token that does not end the reply.
    """
    files = ModelFiles(model)
    said = files.json("generation_config.json") or {}
    generation = _ids(said)
    is_own = generation and not said.get("_from_model_config")
    shown = None if is_own else _shown_end(tokenizer)
    own = tokenizer.eos_token_id
    ids = (*generation, *_ids(files.json("config.json")), own, shown)
    num_ids = len(tokenizer)
    return tuple(dict.fromkeys(one for one in ids if one is not None and one < num_ids))


def _ids(values: dict[str, Any] | None) -> list[int]:
    found: list[int] = []
    for part in (values, (values or {}).get("text_config")):
        ids = part.get("eos_token_id") if isinstance(part, dict) else None
        found += [ids] if isinstance(ids, int) else list(ids or ())
    return found


def _shown_end(tokenizer: Any) -> int | None:
    """The first control token that the template writes after a reply."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": "b"},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError):
        return None
    before, found, after = text.rpartition(_REPLY)
    if not found or not before:
        return None
    controls = {tokenizer.convert_tokens_to_ids(one) for one in control_texts(tokenizer)}
    ids = tokenizer.encode(after, add_special_tokens=False)
    return next((one for one in ids if one in controls), None)

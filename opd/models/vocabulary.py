"""Does every id of a model's tokenizer have a row in its weights? It reads only files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from trainer.errors import StartupError

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


def check_vocabulary(folder: Path) -> None:
    """Raise StartupError if the tokenizer has ids that the weights have no rows for.

    Added tokens that no prompt contains are not an error: text models of the Gemma 3 family keep
    the placeholder for an image, one id beyond their weights.
    """
    if not (folder / _TOKENIZER).is_file():
        return
    config = orjson.loads((folder / _CONFIG).read_bytes())
    text = config.get("text_config")
    size = config.get("vocab_size") or (isinstance(text, dict) and text.get("vocab_size"))
    if not isinstance(size, int):
        return  # left to the class's defaults
    tokenizer = orjson.loads((folder / _TOKENIZER).read_bytes())
    ids = [*_own_ids(tokenizer), *_added_ids(folder, tokenizer, size)]
    largest = max(ids, default=0)
    if largest >= size:
        raise StartupError(
            f"model: {folder / _TOKENIZER} has ids up to {largest}, but the weights have rows for "
            f"{size} (vocab_size): it is another model's tokenizer, or tokens were added without "
            "resize_token_embeddings"
        )


def _own_ids(tokenizer: dict[str, Any]) -> list[int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        added = {one["content"] for one in tokenizer.get("added_tokens") or ()}
        return [token for text, token in vocabulary.items() if text not in added]
    return [len(vocabulary) - 1] if isinstance(vocabulary, list) else []


def _added_ids(folder: Path, tokenizer: dict[str, Any], size: int) -> list[int]:
    """Ids of added tokens that a template or a setting writes."""
    added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}
    beyond = {text: token for text, token in added.items() if token >= size}
    if not beyond:
        return []
    files = [folder / name for name in _TEMPLATES if (folder / name).is_file()]
    written = "".join(file.read_text(encoding="utf-8") for file in files)
    # Gemma's settings name the placeholder for an image or a sound, which no text contains.
    return [
        token for text, token in beyond.items() if text in written and "_soft_token" not in text
    ]

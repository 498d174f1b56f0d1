"""A model's tokenizer and chat template, read from its files with the package `tokenizers` alone.

transformers and torch take 150 MB and seconds. What a proxy, a judge and a scorer need is in
`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. `ChatTokenizer` has the
attributes of a transformers tokenizer that `rendering` and the package `renderers` use, with the
same values. A model without these files (a SentencePiece model, code of its own) is loaded by
transformers, and the log says so. Nothing here knows conversations.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from rollout_bridge.rendering.control_text import is_control_text
from rollout_bridge.rendering.templates.chat_template import render_template

logger = logging.getLogger(__name__)

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NAMED_KEYS = tuple(f"{name}_token" for name in _NAMED)
_TOKENIZER_FILE = "tokenizer.json"


class ChatTokenizer:
    """Text to ids and back, and the chat template's text.

    `special_tokens` names the special tokens (`eos_token`: its text, ...), `extra_special_tokens`
    lists those without a name. `chat_template` is one template, several by name, or None.
    """

    is_fast = True

    def __init__(
        self,
        core: Tokenizer,
        *,
        name_or_path: str,
        special_tokens: Mapping[str, str],
        extra_special_tokens: Sequence[str] = (),
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        self.backend_tokenizer = core
        self.name_or_path = name_or_path
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self.all_special_tokens = list(
            dict.fromkeys((*special_tokens.values(), *extra_special_tokens))
        )
        core.no_truncation()
        core.no_padding()

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence."""
        return self._named_id("eos_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown text."""
        unknown = self.special_tokens_map.get("unk_token")
        return None if unknown is None else self.backend_tokenizer.token_to_id(unknown)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> token, for tokens that are searched in a text before it is split into others."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """Text -> id of all tokens."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control texts in it become their tokens."""
        # A batch lets other threads run, a single text does not.
        batch = self.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return batch[0].ids

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, list[Any]]:
        """`input_ids` of `text`, and on request the offsets where each begins and ends in it."""
        if not return_offsets_mapping:
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        batch = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return {"input_ids": batch[0].ids, "offset_mapping": batch[0].offsets}

    def decode(
        self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False, **_: Any
    ) -> str:
        """Text of `token_ids`, nothing tidied."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token's text, or of each; that of the unknown token if there is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The token of an id as the vocabulary writes it; None for an id that it does not have."""
        return self.backend_tokenizer.id_to_token(int(ids))

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The template's text of `messages`, as ids if `tokenize`.

        Raises ValueError without messages or template, jinja2.TemplateError if the template does.
        """
        if return_dict:
            raise ValueError("return_dict is not supported: ids come as a list")
        if not messages:
            raise ValueError("No messages provided.")
        template = self._template(tools)
        variables = {"documents": None, "add_generation_prompt": False, **variables}
        text = render_template(
            template, messages, tools, **{**self.special_tokens_map, **variables}
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _template(self, tools: Any) -> str:
        template = self.chat_template
        if isinstance(template, dict):
            name = "tool_use" if tools is not None and "tool_use" in template else "default"
            template = template.get(name)
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        return template

    def _named_id(self, key: str) -> int | None:
        text = self.special_tokens_map.get(key)
        return None if text is None else self.convert_tokens_to_ids(text)


def control_texts(tokenizer: Any) -> frozenset[str]:
    """Texts that become one structural token wherever the tokenizer finds them."""
    special = set(tokenizer.all_special_tokens)
    return frozenset(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if is_control_text(token.content, is_special=token.special or token.content in special)
    )


def load_tokenizer(model: str) -> Any:
    """The tokenizer of `model`, a local folder or a hub id.

    A transformers tokenizer if only that package's Python code can split text. Raises OSError or
    ValueError if there is none.
    """
    files = ModelFiles(model)
    core_file = files.path(_TOKENIZER_FILE)
    settings = files.json("tokenizer_config.json") or {}
    if core_file is None or "auto_map" in settings:
        logger.info(
            "tokenizer of %r: loaded by transformers, it has code or files of its own", model
        )
        return _from_transformers(model)
    try:
        core = Tokenizer.from_file(str(core_file))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{core_file} is not readable: {error}") from error
    return _from_files(core, settings, files, model)


def _from_transformers(model: str) -> Any:
    from renderers.base import load_tokenizer as load_by_transformers

    loaded = load_by_transformers(model)
    if not loaded.is_fast:
        # The caller checks the length; the package would warn about it once, on the terminal.
        loaded.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return loaded
    return ChatTokenizer(
        loaded.backend_tokenizer,
        name_or_path=loaded.name_or_path,
        special_tokens=loaded.special_tokens_map,
        extra_special_tokens=loaded.all_special_tokens,
        chat_template=loaded.chat_template,
    )


class ModelFiles:
    """Files of a local folder or of a hub repository (from the cache if there is no network)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._folder = Path(model) if Path(model).is_dir() else None

    def path(self, name: str) -> Path | None:
        """Path of the file, None if the model has none. Raises OSError or ValueError if the model
        cannot be found.
        """
        if self._folder is not None:
            return self._folder / name if (self._folder / name).is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        from renderers.base import TOKENIZER_SOURCE_OVERRIDES, TRUSTED_REVISIONS

        source = TOKENIZER_SOURCE_OVERRIDES.get(self._model, self._model)
        try:
            return Path(hf_hub_download(source, name, revision=TRUSTED_REVISIONS.get(source)))
        except LocalEntryNotFoundError:
            if name == _TOKENIZER_FILE:
                raise
            return None  # the cache has the model, but not this file
        except EntryNotFoundError:
            return None

    def json(self, name: str) -> dict[str, Any] | None:
        """The file's object, None if the model has none."""
        text = self.text(name)
        return None if text is None else json.loads(text)

    def text(self, name: str) -> str | None:
        """The file's text, None if the model has none."""
        path = self.path(name)
        return None if path is None else path.read_text(encoding="utf-8")


def _from_files(
    core: Tokenizer, settings: dict[str, Any], files: ModelFiles, model: str
) -> ChatTokenizer:
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **(files.json("special_tokens_map.json") or {})}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = {key: settings[key] for key in _NAMED_KEYS if settings.get(key)}
    named |= {
        key: value
        for key, value in settings.items()
        if key.endswith("_token") and key not in _NAMED_KEYS and isinstance(value, str | dict)
    }
    if isinstance(extra, dict):
        named, extra = {**named, **extra}, []
    special_tokens = {key: _content(value) for key, value in named.items()}
    extra_tokens = [_content(value) for value in extra]
    _add_tokens(core, settings, (*special_tokens.values(), *extra_tokens))
    core.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    if core.post_processor is None:
        core.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    template = files.text("chat_template.jinja") or settings.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    return ChatTokenizer(
        core,
        name_or_path=model,
        special_tokens=special_tokens,
        extra_special_tokens=extra_tokens,
        chat_template=template,
    )


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _add_tokens(core: Tokenizer, settings: dict[str, Any], special: Sequence[str]) -> None:
    """Add the tokens that are in the settings but not in `tokenizer.json`."""
    known = {token.content: token for token in core.get_added_tokens_decoder().values()}
    described = settings.get("added_tokens_decoder", {})
    for _, token in sorted(described.items(), key=lambda item: int(item[0])):
        fields = {key: value for key, value in token.items() if key != "__type"}
        if fields["content"] not in known:
            known[fields["content"]] = AddedToken(**fields)
            core.add_tokens([known[fields["content"]]])
    new = [text for text in dict.fromkeys(special) if text not in known]
    core.add_tokens([AddedToken(text, special=True, normalized=False) for text in new])

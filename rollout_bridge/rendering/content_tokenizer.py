"""The tokenizer as a renderer sees it: control texts inside content are ordinary ids.

Text that is split at breaks (`control_text`) is encoded piece by piece, so that no token spans a
break. Text without breaks has the tokenizer's own ids. It knows no messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rollout_bridge.rendering.control_text import BREAK, pieces
from rollout_bridge.rendering.tokenizer import control_texts

_SNIPPET = 40
"""Characters of a text whose ids are remembered."""
_SNIPPETS = 16
"""Of a turn's few texts, the template's own come several times. More would make requests with many
short texts cheap until the memory is full, and expensive from then on.
"""


class ContentTokenizer:
    """Encodes, decodes and applies the template; gives no offsets, see `renderer_package`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.all_special_tokens: list[str] = list(tokenizer.all_special_tokens)
        self._spellings = _spellings(tokenizer)
        # Each prompt has the template's few texts between its messages.
        self._of_snippet = lru_cache(_SNIPPETS)(lambda text: tuple(self._tokenized(text)))
        self._newline = self._plain("\n")
        # SentencePiece puts a blank before each text: a piece that continues another has none.
        self._adds_blank = self._plain("\n<")[len(self._newline) :] != self._plain("<")

    @property
    def chat_template(self) -> Any:
        """The tokenizer's own."""
        return self._tokenizer.chat_template

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The tokenizer's own."""
        return self._tokenizer.convert_tokens_to_ids(tokens)

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The tokenizer's own."""
        return self._tokenizer.decode(token_ids, **options)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; breaks are left out, and no token spans one."""
        assert not add_special_tokens
        if BREAK not in text:
            return self._plain(text)
        first, *others = pieces(text)
        ids = self._plain(first) if first else []
        for piece in others:
            ids.extend(self._continued(piece))
        return ids

    def _parts(self, text: str) -> list[str]:
        """`text` in parts, none of which the tokenizer normalises into a control text.

        Control texts that content spells out are already broken; fullwidth forms and the like
        become one only here. Those that are still spelled out belong to the template.
        """
        if not self._spellings or self._tokenizer.backend_tokenizer.normalizer is None:
            return [text]
        if self._tokenizer.backend_tokenizer.normalizer.normalize_str(text) == text:
            return [text]
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        cuts = [0]
        for token, (low, high) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            spelling = self._spellings.get(token)
            if spelling is not None and spelling not in text[low:high]:
                if len(text[low:high].strip()) < 2:
                    raise ValueError(f"a character of the text becomes the token {spelling!r}")
                start = high - len(text[low:high].lstrip())
                cuts.append(start + 1)
        if len(cuts) == 1:
            return [text]
        parts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
        # If two overlap, only the first was found.
        return [one for part in parts for one in self._parts(part)]

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        """The template's text of `messages`, as ids if `tokenize`."""
        assert not return_dict
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text) if tokenize else text

    def _continued(self, piece: str) -> list[int]:
        """Ids of a piece that follows another."""
        if not piece:
            return []
        if self._adds_blank:
            ids = self._plain(f"\n{piece}")
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        return self._plain(piece)

    def _plain(self, text: str) -> list[int]:
        if len(text) <= _SNIPPET:
            return list(self._of_snippet(text))
        return self._tokenized(text)

    def _tokenized(self, text: str) -> list[int]:
        first, *others = self._parts(text)
        ids = self._tokenizer.encode(first, add_special_tokens=False)
        for part in others:
            ids.extend(self._continued(part))
        return ids


def _spellings(tokenizer: Any) -> dict[int, str]:
    """Control ids with their texts, if normalising may turn other texts into them; else none."""
    added = tokenizer.added_tokens_decoder.items()
    wanted = control_texts(tokenizer)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or core.normalizer is None:
        return {}
    own = core.get_vocab(with_added_tokens=False)
    # If a model's own vocabulary has the text, it is found after normalising, too.
    controls = [one for _, one in added if one.content in wanted]
    if not any(one.normalized or one.content in own for one in controls):
        return {}
    return {token: one.content for token, one in added if one.content in wanted}


class OffsetTokenizer(ContentTokenizer):
    """One that also tells where in the text each id begins and ends."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = False, return_offsets_mapping: bool = True
    ) -> dict[str, list[Any]]:
        """`input_ids` of `encode`, and their offsets in `text`, breaks counted."""
        assert not add_special_tokens
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for number, piece in enumerate(text.split(BREAK)):
            # The break before a piece is one character of `text`; so is a written break character.
            shown = pieces(BREAK + piece)[-1] if number else piece
            new_ids, spans = self._with_spans(shown, is_first=not number)
            ids.extend(new_ids)
            offsets.extend((position + low, position + high) for low, high in spans)
            position += len(piece) + 1
        return {"input_ids": ids, "offset_mapping": offsets}

    def _with_spans(self, piece: str, *, is_first: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not is_first and self._adds_blank:
            ids, spans = self._spans(f"\n{piece}")
            num = len(self._newline)
            if ids[:num] == self._newline:
                return ids[num:], [(low - 1, high - 1) for low, high in spans[num:]]
        return self._spans(piece)

    def _spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["input_ids"]), list(encoding["offset_mapping"])

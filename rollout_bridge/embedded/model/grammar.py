"""Sampling under a grammar: JSON schemas, regular expressions and structural tags, by llguidance.

A structural tag is JSON in xgrammar's format, which SGLang takes. The elements that describe a
whole reply are understood here (`_RULES`); others are refused by name. Single tokens are named by
id, so that a marker is the token itself and not text that looks like it.

A `Matcher` belongs to one request: it says which tokens may come next and is told which one came.
Only the scheduler's thread uses it. The compiler may be used from any thread and compiles in a few
threads of its own, so a request waits for others' grammars only if its own grammar is new too.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from rollout_bridge.embedded.errors import BadRequest

Kind = Literal["json_schema", "regex", "structural_tag"]
_REMEMBERED = 64
_NUM_THREADS = 2


class Matcher:
    """The state of one grammar; `_matcher` enters an error state and never leaves it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits_V: torch.Tensor) -> None:
        """Set what cannot come next to -inf, in place. In an error state nothing is masked."""
        if self._matcher.is_error():
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return
        allowed = np.unpackbits(bits, count=len(logits_V), bitorder="little").astype(bool)
        allowed_V = torch.from_numpy(allowed).to(logits_V.device)
        logits_V.masked_fill_(~allowed_V, -torch.inf)

    def take(self, token_id: int) -> str | None:
        """Take the sampled token; returns what is wrong if the grammar can go no further."""
        if self._matcher.consume_token(token_id):
            return None
        return self._matcher.get_error().strip().split("\n")[0] or "the grammar ended"


class GrammarCompiler:
    """Compiles grammars of at most `max_bytes` for one tokenizer; the most recent ones are kept."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, stop_token_ids: frozenset[int], max_bytes: int
    ) -> None:
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(stop_token_ids)
        self._known_lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    async def matcher(self, kind: Kind, text: str) -> Matcher:
        """A matcher at the grammar's start. Raises BadRequest if it cannot be compiled."""
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > self._max_bytes:
            raise BadRequest(
                f"Failed to compile {kind} grammar: it has {num_bytes} bytes; at most "
                f"{self._max_bytes} are compiled."
            )
        known = self._copy_of_known(kind, text)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._new, kind, text)

    def _new(self, kind: Kind, text: str) -> Matcher:
        # An equal one may have been compiled while this one waited.
        known = self._copy_of_known(kind, text)
        if known is not None:
            return known
        compiled = self._compile(kind, text)
        with self._known_lock:
            self._known[kind, text] = compiled
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return Matcher(compiled.deep_copy())

    def _copy_of_known(self, kind: Kind, text: str) -> Matcher | None:
        with self._known_lock:
            compiled = self._known.get((kind, text))
            if compiled is None:
                return None
            self._known.move_to_end((kind, text))
            return Matcher(compiled.deep_copy())

    def _compile(self, kind: Kind, text: str) -> LLMatcher:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        try:
            grammar = _grammar(kind, text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"Failed to compile {kind} grammar: {error}") from None
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            # The lines after the first quote the grammar.
            reason = matcher.get_error().strip().split("\n")[0]
            raise BadRequest(f"Failed to compile {kind} grammar: {reason}")
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        if not getattr(self._tokenizer, "is_fast", False):
            raise BadRequest("grammars need a tokenizer of the tokenizers library")
        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._stop_token_ids
        )


def _grammar(kind: Kind, text: str) -> str:
    """The grammar in llguidance's own form. Raises ValueError on malformed JSON."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    value = json.loads(text)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(value)
    if not isinstance(value, dict) or not isinstance(value.get("format"), dict):
        raise ValueError("a structural tag needs a 'format'")
    return LLMatcher.grammar_from_lark(f"start: {_rule(value['format'])}")


def _rule(element: Any) -> str:
    """One element of a structural tag as an expression of llguidance's Lark."""
    kind = element.get("type") if isinstance(element, dict) else None
    if kind not in _RULES:
        known = ", ".join(_RULES)
        raise ValueError(f"the embedded engine does not know the element {kind!r}; known: {known}")
    try:
        return _RULES[kind](element)
    except (KeyError, TypeError) as error:
        raise ValueError(f"malformed element {kind!r}: {error}") from None


def _grouped(elements: list[Any], separator: str) -> str:
    return "(" + separator.join(_rule(element) for element in elements) + ")"


def _tokens_except(element: Any) -> str:
    ids = ",".join(str(int(token)) for token in element["exclude_tokens"])
    return f"<[^{ids}]>*"


def _escaped(pattern: str) -> str:
    """A regular expression as written between two slashes: on one line, its slashes escaped."""
    return _PAIR_OR_BREAK.sub(lambda found: _ESCAPES.get(found[0], found[0]), pattern)


_PAIR_OR_BREAK = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
_RULES: dict[str, Callable[[Any], str]] = {
    "const_string": lambda element: json.dumps(str(element["value"])),
    "token": lambda element: f"<[{int(element['token'])}]>",
    "any_tokens": _tokens_except,
    "regex": lambda element: f"/{_escaped(str(element['pattern']))}/",
    "json_schema": lambda element: f"%json {json.dumps(element['json_schema'])}",
    "sequence": lambda element: _grouped(element["elements"], " "),
    "or": lambda element: _grouped(element["elements"], " | "),
    "optional": lambda element: f"({_rule(element['content'])})?",
    "star": lambda element: f"({_rule(element['content'])})*",
    "plus": lambda element: f"({_rule(element['content'])})+",
}

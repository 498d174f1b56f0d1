"""May this teacher score this student's tokens? (ALGORITHMS 7.5)

A teacher sees ids. If its tokenizer gives the same text other ids, or its template marks turns in
another way, it scores another text and the KL explodes. Equal tokenizers are necessary: the same
vocabulary, the same special tokens, and the same ids of probe texts. The probe
of template tokens shows whether the teacher also expects this format.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from records.types import Ids, Logprobs
from rollout_bridge.engine.types import ModelInfo
from trainer.errors import StartupError

TEMPLATE_FLOOR = -12.0
"""Smallest mean log-prob, in nats, of template tokens under a teacher that knows the format."""
PROBE: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name a prime number."},
    {"role": "assistant", "content": "101."},
    {"role": "user", "content": "And the next one?"},
)

PROBE_TEXTS: tuple[str, ...] = (
    "Answer briefly: what is the largest prime number below 1000000?",
    "  2026-11-27T09:05:00Z  1,234,567.89  0x7fff  v1.20.3\t\t|\r\n\n",
    "def f(x: int) -> str:\n    return f\"{x!r}\" if x != 0 else ''  # don't\n",
    '{"name": "look_up", "arguments": {"city": "São Paulo", "limit": 10}}',
    # Letters composed and decomposed, a ligature, full-width digits: normalisers differ.
    "naïve nai\u0308ve ﬁn １２３ İstanbul ẞ",
    "你好，世界 Привет مرحبا 🙂👩‍💻",
)
"""Texts whose ids are compared: equal vocabularies may split and normalise a text differently."""


class TeacherEngine(Protocol):
    """What the check needs of an engine client."""

    async def score(self, input_ids: Ids, start: int) -> Logprobs: ...
    async def model_info(self) -> ModelInfo: ...


def tokenizer_differences(student: Any, teacher: Any) -> list[str]:
    """What differs between two Hugging Face tokenizers, a short phrase each; empty if nothing."""
    differences = []
    own, other = student.get_vocab(), teacher.get_vocab()
    if len(own) != len(other):
        differences.append(f"{len(own)} tokens against {len(other)}")
    elif _digest(own) != _digest(other):
        moved = next(token for token in sorted(own) if other.get(token) != own[token])
        differences.append(
            f"token {moved!r} has the id {own[moved]} against {other.get(moved, 'none')}"
        )
    else:
        differences += _splits_differently(student, teacher)
    special = sorted({*student.all_special_tokens, *teacher.all_special_tokens})
    for token in special:
        pair = [model.get_vocab().get(token) for model in (student, teacher)]
        if pair[0] != pair[1]:
            differences.append(f"special token {token!r} has the id {pair[0]} against {pair[1]}")
    rendered = [_rendered(model) for model in (student, teacher)]
    if rendered[0] != rendered[1]:
        differences.append("the chat templates render a probe conversation differently")
    return differences


async def check_teacher(
    name: str,
    engine: TeacherEngine,
    *,
    model: str,
    vocab_size: int,
    sequences: Sequence[Ids],
    template_ids: Sequence[int],
    allow: bool = False,
) -> list[str]:
    """Compare the teacher behind `engine` with the student `model`; returns what differs.

    `sequences` are conversations in the student's format, `template_ids` the ids that only its
    template writes, and `vocab_size` the number of ids that its text may have. Raises StartupError
    for any difference unless `allow`.
    """
    info = await engine.model_info()
    differences = []
    # More rows than the student has ids: padding, or another tokenizer, which is checked below.
    if info.vocab_size is not None and info.vocab_size < vocab_size:
        differences.append(
            f"it knows {info.vocab_size} ids, and the student's text has {vocab_size}"
        )
    if info.model_path != model:
        differences += await asyncio.to_thread(_compare_folders, model, info.model_path)
    if not differences:
        differences += await _probe(engine, sequences, template_ids)
    if differences and not allow:
        raise StartupError(
            f"scoring.teachers.{name}: not compatible with {model}: {'; '.join(differences)}; use "
            "a teacher with the student's tokenizer and template, or set "
            "scoring.allow_incompatible_teachers = true"
        )
    return differences


async def _probe(
    engine: TeacherEngine, sequences: Sequence[Ids], template_ids: Sequence[int]
) -> list[str]:
    """Whether the teacher finds the student's template tokens likely where the student has them."""
    found = []
    for ids in sequences:
        logprobs = await engine.score(ids, 1)
        found.append(logprobs[np.isin(ids[1:], template_ids)])
    values = np.concatenate(found) if found else np.zeros(0, dtype=np.float32)
    if values.size == 0 or float(values.mean()) >= TEMPLATE_FLOOR:
        return []
    return [
        f"template tokens have a mean log-prob of {values.mean():.1f} nats, below {TEMPLATE_FLOOR}"
    ]


def _compare_folders(student: str, teacher: str) -> list[str]:
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(teacher)
    except (OSError, ValueError) as error:
        return [f"its tokenizer cannot be loaded from {teacher} ({type(error).__name__})"]
    return tokenizer_differences(AutoTokenizer.from_pretrained(student), other)


def _splits_differently(student: Any, teacher: Any) -> list[str]:
    """The first probe text that becomes other ids, with the pieces that differ first."""
    for text in PROBE_TEXTS:
        ids = [model.encode(text, add_special_tokens=False) for model in (student, teacher)]
        if ids[0] != ids[1]:
            pairs = zip_longest(*(student.convert_ids_to_tokens(one) for one in ids))
            own, other = next(pair for pair in pairs if pair[0] != pair[1])
            return [f"the text {text[:40]!r} becomes other ids: token {own!r} against {other!r}"]
    return []


def _digest(vocabulary: dict[str, int]) -> str:
    text = "\n".join(f"{token}\t{number}" for token, number in sorted(vocabulary.items()))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _rendered(tokenizer: Any) -> str | None:
    if tokenizer.chat_template is None:
        return None
    return tokenizer.apply_chat_template(list(PROBE), tokenize=False, add_generation_prompt=True)

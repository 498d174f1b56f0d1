"""Which teachers may score a student's tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from opd.models.compatibility import check_teacher, tokenizer_differences
from rollout_bridge.engine.types import ModelInfo
from trainer.errors import StartupError

MODEL = Path(__file__).parents[3] / "examples" / "tool_lab" / "model"


class Engine:
    def __init__(self, model_path: str, vocab_size: int | None = 768, logprob: float = -0.5):
        self.info = ModelInfo(
            model_path=model_path, weight_version="0", vocab_size=vocab_size, context_length=None
        )
        self.logprob = logprob

    async def model_info(self) -> ModelInfo:
        return self.info

    async def score(self, input_ids, start):
        return np.full(len(input_ids) - start, self.logprob, dtype=np.float32)


def changed_copy(folder: Path, *, token: str | None = None, template: str | None = None) -> str:
    shutil.copytree(MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if token is not None:
        tokenizer.add_tokens([token])
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def check(engine: Engine, **options):
    return check_teacher(
        "other",
        engine,
        model=str(MODEL),
        vocab_size=768,
        sequences=[np.array([1, 5, 2], np.int32)],
        template_ids=[2],
        **options,
    )


async def test_the_same_model_is_compatible():
    assert await check(Engine(str(MODEL))) == []


async def test_a_teacher_without_some_of_the_ids_is_refused_with_what_to_set():
    with pytest.raises(StartupError, match=r"700 ids.*allow_incompatible_teachers"):
        await check(Engine(str(MODEL), vocab_size=700))
    assert len(await check(Engine(str(MODEL), vocab_size=700), allow=True)) == 1


async def test_rows_that_no_text_uses_are_no_difference():
    """Larger models of a family often have more of them, with the same tokenizer."""
    assert await check(Engine(str(MODEL), vocab_size=1000)) == []


async def test_one_token_more_and_another_template_are_found(tmp_path):
    more = changed_copy(tmp_path / "more", token="unseen")
    with pytest.raises(StartupError, match="tokens against"):
        await check(Engine(more))
    other = changed_copy(
        tmp_path / "other", template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(StartupError, match="templates"):
        await check(Engine(other))


async def test_other_ids_of_a_text_are_found_though_the_vocabulary_is_equal(tmp_path):
    """Merges and normalisers are no part of a vocabulary."""
    for name, change in (("merges", without_merges), ("normaliser", lowercase)):
        folder = Path(changed_copy(tmp_path / name))
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        own, other = (AutoTokenizer.from_pretrained(one) for one in (MODEL, folder))
        assert own.get_vocab() == other.get_vocab()
        [difference] = tokenizer_differences(own, other)
        assert "becomes other ids: token " in difference
        with pytest.raises(StartupError, match="becomes other ids"):
            await check(Engine(str(folder)))


def without_merges(tokenizer):
    """The last merge that was learned is not made."""
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1]
    return tokenizer


def lowercase(tokenizer):
    tokenizer["normalizer"] = {"type": "Lowercase"}
    return tokenizer


def test_a_token_at_another_id_is_named():
    class Fake:
        chat_template = None

        def __init__(self, vocabulary, special):
            self.vocabulary, self.all_special_tokens = vocabulary, special

        def get_vocab(self):
            return self.vocabulary

        def encode(self, text, add_special_tokens):
            return [self.vocabulary[letter] for letter in text if letter in self.vocabulary]

    one = Fake({"a": 0, "b": 1, "<end>": 2}, ["<end>"])
    other = Fake({"a": 1, "b": 0, "<end>": 2}, ["<end>"])
    assert tokenizer_differences(one, other) == ["token 'a' has the id 0 against 1"]
    moved = Fake({"a": 2, "b": 1, "<end>": 0}, ["<end>"])
    assert any("special token '<end>'" in line for line in tokenizer_differences(one, moved))
    assert tokenizer_differences(one, one) == []


async def test_a_teacher_to_which_the_template_is_strange_is_refused():
    with pytest.raises(StartupError, match=r"template tokens have a mean log-prob of -30"):
        await check(Engine(str(MODEL), logprob=-30.0))


async def test_a_tokenizer_that_cannot_be_loaded_is_not_taken_on_trust(tmp_path):
    with pytest.raises(StartupError, match="cannot be loaded"):
        await check(Engine(str(tmp_path / "nowhere")))

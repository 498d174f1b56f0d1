"""Replies under a grammar: every token continues it, and a grammar that is no good is refused."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import AutoTokenizer

from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.model.grammar import GrammarCompiler
from rollout_bridge.embedded.model.sampling import Sampler
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3"))


@pytest.fixture(scope="module")
def compiler(rendering: Rendering) -> GrammarCompiler:
    return GrammarCompiler(
        AutoTokenizer.from_pretrained(MODEL),
        rendering.vocab_size,
        frozenset(rendering.stop_token_ids),
        2**16,
    )


def accepts(rendering: Rendering, compiler: GrammarCompiler, grammar: tuple, text: str) -> bool:
    """Whether `text` and an end token may be sampled."""
    ids = rendering.tokenizer.encode(text, add_special_tokens=False)
    matcher = asyncio.run(compiler.matcher(*grammar))
    for token in [*ids, rendering.stop_token_ids[0]]:
        logits_V = torch.zeros(rendering.vocab_size)
        matcher.mask(logits_V)
        if logits_V[token] == -torch.inf:
            return False
        assert matcher.take(token) is None
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            ("json_schema", json.dumps(SCHEMA)),
            ['{"city": "Karo"}', '{"city":"Karo","n":3}'],
            ["", "{}", '{"city": "too long"}', '{"city": "Karo"} ok', "[1]"],
        ),
        (("regex", "(ab)+c?"), ["ab", "ababc"], ["a", "abcc", "x"]),
    ],
)
def test_what_may_be_sampled(rendering, compiler, grammar, good, bad) -> None:
    assert [accepts(rendering, compiler, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(rendering, compiler, grammar, text) for text in bad] == [False] * len(bad)


def test_a_marker_is_its_token(rendering: Rendering, compiler: GrammarCompiler) -> None:
    marker = rendering.tool_call_start_id
    tag = {"format": {"type": "token", "token": marker}}
    matcher = asyncio.run(compiler.matcher("structural_tag", json.dumps(tag)))
    logits_V = torch.zeros(rendering.vocab_size)
    matcher.mask(logits_V)
    assert torch.isfinite(logits_V).nonzero().flatten().tolist() == [marker]


def test_samples_follow_the_grammar(rendering: Rendering, compiler: GrammarCompiler) -> None:
    """Whatever the model says: here every token is equally probable."""
    sampler = Sampler(torch.device("cpu"), seed=0)
    free = EngineRequest(input_ids=[1], sampling=Sampling())
    bound = EngineRequest(input_ids=[1], sampling=Sampling())
    bound.matcher = asyncio.run(compiler.matcher("json_schema", json.dumps(SCHEMA)))
    sampler.use([bound, free])
    for _ in range(200):
        ids_B, logprobs_B = sampler.sample(torch.zeros(2, rendering.vocab_size))
        token = int(ids_B[0])
        # Log-probs are of the distribution that was sampled from.
        assert float(logprobs_B[0]) > float(logprobs_B[1]) - 1e-6
        bound.append(token, float(logprobs_B[0]), "0")
        if token in rendering.stop_token_ids:
            break
        assert bound.matcher.take(token) is None
    text = rendering.decode(bound.output_ids[:-1])
    assert set(json.loads(text)) <= {"city", "n"}
    assert "city" in json.loads(text)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "Failed to compile json_schema grammar"),
        ("json_schema", '{"type": "object", "not": {}}', "not"),
        ("regex", "(", "Failed to compile regex grammar"),
        ("structural_tag", "{}", "needs a 'format'"),
        ("structural_tag", '{"format": {"type": "wizard"}}', "'wizard'; known: const_string"),
        ("structural_tag", '{"format": {"type": "token"}}', "malformed element 'token'"),
    ],
)
def test_grammars_that_are_no_good(compiler, kind: str, text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refusal:
        asyncio.run(compiler.matcher(kind, text))
    assert "\n" not in str(refusal.value)

"""The shipped model before any training: what the lab relies on, at a small n and with margins that
chance cannot reach.

The figures of the README are measured with a larger n by `python -m
examples.tool_lab.local_generate`.
"""

import asyncio

import pytest
import torch

from examples.tool_lab.evaluate import OTHER_SKILLS, Rate, evaluate, worst_success
from examples.tool_lab.local_generate import LocalGenerator
from examples.tool_lab.loop_check import check_loop
from examples.tool_lab.preferences import TRAINED_KINDS
from tests.examples.shipped import MODEL

N = 40
MAX_BYTES = 2_500_000


@pytest.fixture(scope="module")
def generator() -> LocalGenerator:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LocalGenerator.load(str(MODEL))


@pytest.fixture(scope="module")
def rates(generator) -> dict[str, Rate]:
    return asyncio.run(evaluate(generator, N, seed=1))


def test_the_shipped_files_are_small():
    files = [path for path in MODEL.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in files
    }


@pytest.mark.parametrize("run", ["=", "[{", "|---", "- "])
def test_long_runs_of_marks_are_split(generator, run):
    tokenizer = generator.rendering.tokenizer
    text = run * 20_000
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_weights_load_as_float32_and_the_context_is_long(generator):
    assert {parameter.dtype for parameter in generator.model.parameters()} == {torch.float32}
    assert generator.model.config.max_position_embeddings == 32768
    assert generator.model.generation_config.eos_token_id == [
        generator.rendering.tokenizer.convert_tokens_to_ids(token)
        for token in ("<|im_end|>", "<|endoftext|>")
    ]


def test_skills_before_training(rates):
    assert rates["valid_calls"].value >= 0.93
    assert rates["copied_entities"].value >= 0.85
    assert rates["facts_in_answers"].value >= 0.8
    assert rates["other_preferences"].value >= 0.55
    assert all(rates[skill].count == N for skill in OTHER_SKILLS)


def test_preferences_are_mostly_not_met_before_training(rates):
    successes = [rates[f"success_{kind}"] for kind in TRAINED_KINDS]
    assert all(rate.value <= 0.5 for rate in successes)
    assert worst_success(rates) <= 0.35
    # The alternative has to occur: what is never sampled cannot be reinforced.
    assert sum(rate.hits for rate in successes) > 0


def test_hints_and_open_wishes_are_followed(rates):
    assert rates["hint_following"].value >= 0.85
    assert rates["contrary_unit"].value >= 0.8
    assert rates["contrary_order"].value >= 0.8


def test_the_judge_decides_and_writes_usable_hints(rates):
    assert rates["judge_decision"].value >= 0.88
    assert rates["usable_hint"].value >= 0.7


def test_in_the_loop_hints_are_given_where_due_and_nowhere_else(generator):
    figures = check_loop(generator, sessions=12, seed=2)
    corrected, turns = figures["turns_corrected"]
    assert corrected >= 0.2 * turns
    hinted, due = figures["due_turns_hinted"]
    assert hinted >= 0.8 * due
    false_hints, not_due = figures["false_hints"]
    assert false_hints <= 0.15 * not_due
    wanted, retried = figures["teacher_does_as_wanted"]
    assert wanted >= 0.8 * retried

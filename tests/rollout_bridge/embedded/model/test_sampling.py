"""Sampling rows of logits, and the text of what was sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.model import sampling
from rollout_bridge.embedded.model.sampling import Sampler
from rollout_bridge.embedded.scheduling.request import EngineRequest, Finish, Sampling
from rollout_bridge.embedded.server.schemas import parse_sampling
from rollout_bridge.embedded.server.text import StopStrings, TextStream, final_text
from tests.contract import tiny_model

LOGITS_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])


def request(**settings) -> EngineRequest:
    return EngineRequest(input_ids=[0], sampling=Sampling(**settings))


def draw(count: int, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative frequencies [V] of `count` samples and the last log-probs [B]."""
    sampler = Sampler(torch.device("cpu"), seed=0)
    rows = [request(**settings) for _ in range(500)]
    sampler.use(rows)
    counts = torch.zeros(5)
    for _ in range(count // 500):
        ids, logprobs = sampler.sample(LOGITS_V.repeat(500, 1))
        counts += torch.bincount(ids, minlength=5)
    return counts / counts.sum(), logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_follow_the_distribution(temperature: float) -> None:
    frequencies_V, _ = draw(40_000, temperature=temperature)
    expected_V = torch.softmax(LOGITS_V / temperature, -1)
    torch.testing.assert_close(frequencies_V, expected_V, atol=0.012, rtol=0)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0]),
        ({"top_p": 0.65}, [0, 1]),
        ({"min_p": 0.3}, [0, 1]),
        ({"top_k": 4, "top_p": 0.9}, [0, 1, 2]),
        ({"logit_bias": ((0, -100.0),), "top_k": 1}, [1]),
    ],
)
def test_truncation_keeps_the_named_tokens(settings, kept: list[int]) -> None:
    frequencies_V, _ = draw(4_000, **settings)
    assert frequencies_V.nonzero()[:, 0].tolist() == kept


def test_log_probs_of_a_large_vocabulary_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(4, 262_144, generator=generator)
    exact_BV = logits_BV.double().log_softmax(-1)
    sampler = Sampler(torch.device("cpu"), seed=0)
    sampler.use([request(temperature=value) for value in (1, 1, 0, 1)])
    ids, logprobs = sampler.sample(logits_BV.clone())
    expected = exact_BV.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=4e-6, rtol=0)


def test_rows_keep_their_own_settings() -> None:
    sampler = Sampler(torch.device("cpu"), seed=0)
    rows = [request(temperature=0), request(temperature=3), request(top_k=1), request(seed=7)]
    sampler.use(rows)
    ids_B, logprobs_B = sampler.sample(LOGITS_V.repeat(4, 1))
    assert ids_B[0] == ids_B[2] == 0
    assert logprobs_B[0] == pytest.approx(float(LOGITS_V.log_softmax(-1)[0]))
    expected = (LOGITS_V / 3).log_softmax(-1)[ids_B[1]]
    assert logprobs_B[1] == pytest.approx(float(expected))


def test_a_seed_fixes_a_row_whatever_runs_beside_it() -> None:
    def run(beside: int) -> list[int]:
        sampler = Sampler(torch.device("cpu"), seed=None)
        sampler.use([request() for _ in range(beside)] + [request(seed=5)])
        return [int(sampler.sample(LOGITS_V.repeat(beside + 1, 1))[0][-1]) for _ in range(20)]

    assert run(0) == run(3)


def test_a_seeds_noise_belongs_to_the_place_in_the_sequence() -> None:
    def go_on(row: EngineRequest, count: int) -> list[int]:
        sampler = Sampler(torch.device("cpu"), seed=None)
        sampler.use([row])
        for _ in range(count):
            ids, logprobs = sampler.sample(LOGITS_V[None].clone())
            row.append(int(ids[0]), float(logprobs[0]), "0")
        return row.sequence

    def row(ids: list[int], seed: int) -> EngineRequest:
        return EngineRequest(input_ids=ids, sampling=Sampling(seed=seed))

    whole = go_on(row([0], 5), 60)
    assert go_on(row(whole[:23], 5), 38) == whole
    assert go_on(row([0], 6), 60) != whole
    assert len(set(whole)) > 1
    for seed in (-(2**63), 2**63 - 1):
        go_on(row([0], seed), 1)


def test_samples_of_many_seeds_follow_the_distribution() -> None:
    sampler = Sampler(torch.device("cpu"), seed=None)
    sampler.use([request(seed=seed) for seed in range(5000)])
    ids, _ = sampler.sample(LOGITS_V.repeat(5000, 1))
    frequencies_V = torch.bincount(ids, minlength=5) / 5000
    torch.testing.assert_close(frequencies_V, torch.softmax(LOGITS_V, -1), atol=0.03, rtol=0)


def test_penalties_count_what_was_said() -> None:
    said = request(temperature=0, frequency_penalty=0.6)
    sampler = Sampler(torch.device("cpu"), seed=0)
    sampler.use([said])
    for _ in range(4):
        ids_B, logprobs_B = sampler.sample(LOGITS_V[None].clone())
        said.append(int(ids_B[0]), float(logprobs_B[0]), "0")
    assert said.output_ids == [0, 0, 1, 0]


def test_min_new_tokens_forbids_the_end() -> None:
    early = request(temperature=0, min_new_tokens=1, stop_token_ids=frozenset({0}))
    sampler = Sampler(torch.device("cpu"), seed=0)
    sampler.use([early])
    assert int(sampler.sample(LOGITS_V[None].clone())[0][0]) == 1
    early.append(1, -1.0, "0")
    assert int(sampler.sample(LOGITS_V[None].clone())[0][0]) == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"nope": 1}, "unknown field `nope`, expected one of `max_new_tokens`"),
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"temperature": float("inf")}, "non-negative finite"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": "x"}, "max_new_tokens"),
        ({"ebnf": "root ::= x"}, "ebnf is not supported"),
    ],
)
def test_bad_sampling_parameters_are_named(params, message: str) -> None:
    with pytest.raises(BadRequest, match=message.replace("`", "`")):
        parse_sampling(params)


def test_ignored_end_leaves_only_the_requests_own_stops() -> None:
    own = parse_sampling({"stop_token_ids": [3], "ignore_eos": True})
    assert own.to_sampling(frozenset({9}), 5).stop_token_ids == {3}
    assert parse_sampling({}).to_sampling(frozenset({9}), 5).stop_token_ids == {9}
    assert parse_sampling({"max_new_tokens": None}).to_sampling(frozenset(), 5).max_new_tokens == 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_model.build(tmp_path_factory.mktemp("model"), 0))


def test_text_grows_to_the_whole_text(tokenizer) -> None:
    text = "Hello, wörld! 日本 🙂 fine."
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, skip_special_tokens=True)
    seen = [stream.push([token]) for token in ids]
    assert seen[-1] == text
    assert all(text.startswith(part) for part in seen)


def test_stop_strings_are_found_across_tokens(tokenizer) -> None:
    ids = tokenizer.encode("Hello how are you? I am fine")
    row = request(stop=("are yo", "I am"))
    watch = StopStrings(tokenizer, row)
    for token in ids:
        row.append(token, -1.0, "0")
        matched = watch.push(token)
        if matched is not None:
            break
    assert matched == "are yo"
    row.finish = Finish(kind="stop", matched=matched)
    assert final_text(tokenizer, row) == "Hello how "


def test_a_number_at_the_edge_draws_a_token_that_can_be_drawn() -> None:
    below_one = 1 - 2.0**-53
    scores_BV = torch.tensor([[-torch.inf, -1.0, 0.5, -torch.inf]]).repeat(3, 1)
    scores_BV[2] = torch.nan
    uniforms_B1 = torch.tensor([[0.0], [below_one], [0.5]], dtype=torch.float64)
    ids = sampling.draw(scores_BV, uniforms_B1)[:, 0].tolist()
    assert ids[:2] == [1, 2]
    assert ids[2] < 4, "a row that is not a number fails no other"


def test_seeds_and_places_are_independent_uniforms() -> None:
    of_seeds = np.array(
        [[sampling._uniform(seed, place) for place in range(60)] for seed in range(200)]
    )
    assert (of_seeds >= 0).all()
    assert (of_seeds < 1).all()
    assert abs(of_seeds.mean() - 0.5) < 0.01
    along = np.corrcoef(of_seeds[:, :-1].ravel(), of_seeds[:, 1:].ravel())[0, 1]
    across = np.corrcoef(of_seeds[:-1].ravel(), of_seeds[1:].ravel())[0, 1]
    assert max(abs(along), abs(across)) < 0.03

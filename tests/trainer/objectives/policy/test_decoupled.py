import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.objectives.policy.decoupled import (
    a3po_proximal_logprobs,
    behaviour_weights,
    composed_weights,
    decoupled_ppo,
)
from trainer.objectives.policy.ppo import ppo_clip

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}


def test_composition_of_engine_staleness_and_clip():
    engine, trainer, proximal, current = (torch.tensor([x]) for x in (-1.0, -0.9, -1.1, -0.8))
    weights = composed_weights(engine, trainer, proximal)
    terms = ppo_clip(current, proximal, torch.tensor([1.5]), weights=weights, **CLIP)
    assert weights.item() == pytest.approx(1.105171 * 0.818731, abs=1e-6)
    assert terms.loss.item() == pytest.approx(-1.628707, abs=1e-6)
    # The same by the function that takes the staleness factor itself.
    from_engine = composed_weights(engine, trainer, trainer)
    parts = decoupled_ppo(
        current, proximal, trainer, torch.tensor([1.5]), weights=from_engine, **CLIP
    )
    torch.testing.assert_close(parts.ppo.loss, terms.loss)
    torch.testing.assert_close(parts.weights, weights)


def test_engine_factor_is_capped_and_staleness_above_its_cap_is_dropped():
    engine, trainer, proximal = (torch.tensor([x]) for x in (-5.0, -1.0, -0.9))
    weights = composed_weights(engine, trainer, proximal, engine_cap=2.0)
    assert weights.item() == pytest.approx(2.0 * math.exp(0.1))
    assert composed_weights(engine, trainer, proximal, staleness_cap=1.05).item() == 0.0


def test_weight_is_detached_and_zero_above_the_cap_not_capped():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-1.0, -1.0], requires_grad=True)
    terms = decoupled_ppo(
        logprobs, proximal, torch.tensor([-1.2, -4.0]), torch.ones(2), cap=5.0, **CLIP
    )
    terms.ppo.loss.sum().backward()
    weight = math.exp(0.2)
    torch.testing.assert_close(terms.weights, torch.tensor([weight, 0.0]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([-weight, 0.0]))
    assert proximal.grad is None


def test_extreme_gaps_stay_finite():
    weights = behaviour_weights(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert torch.isfinite(weights).all()
    assert weights[0].item() > 0


def test_proximal_policy_between_behaviour_and_current():
    behaviour, current = torch.tensor([-2.0] * 4), torch.tensor([-1.0] * 4, requires_grad=True)
    proximal = a3po_proximal_logprobs(behaviour, current, torch.tensor([0, 1, 2, 4]))
    torch.testing.assert_close(proximal, torch.tensor([-1.0, -2.0, -1.5, -1.25]))
    assert not proximal.requires_grad
    torch.testing.assert_close(a3po_proximal_logprobs(behaviour, current, 2)[:1], proximal[2:3])


def test_bad_input_is_refused():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="cap"):
        behaviour_weights(zeros, zeros, cap=0.0)
    with pytest.raises(ValueError, match="positive"):
        composed_weights(zeros, zeros, zeros, engine_cap=0.0)
    with pytest.raises(ValueError, match="negative"):
        a3po_proximal_logprobs(zeros, zeros, -1)


LOGPROB = st.floats(-40.0, 0.0)


@settings(max_examples=200)
@given(
    engine=LOGPROB | st.just(math.nan),
    trainer=LOGPROB,
    proximal=LOGPROB,
    engine_cap=st.floats(0.5, 10.0),
    staleness_cap=st.floats(0.5, 10.0),
)
def test_a_composed_weight_is_at_most_the_product_of_its_caps(
    engine, trainer, proximal, engine_cap, staleness_cap
):
    now = [torch.tensor([value], dtype=torch.float64) for value in (engine, trainer, proximal)]
    weight = composed_weights(*now, engine_cap=engine_cap, staleness_cap=staleness_cap).item()
    assert 0.0 <= weight <= max(engine_cap, 1.0) * staleness_cap * (1 + 1e-12)
    # Each factor alone: an engine like the trainer, and weights that are not old.
    _, same, old = now
    age = behaviour_weights(old, same, cap=staleness_cap)
    torch.testing.assert_close(
        composed_weights(same, same, old, engine_cap=1.0, staleness_cap=staleness_cap), age
    )
    fresh = composed_weights(now[0], same, same, engine_cap=engine_cap).item()
    if math.isnan(engine):
        assert fresh == 1.0
        assert weight == age.item()
    else:
        ratio = math.exp(min(max(trainer - engine, -20.0), 20.0))
        assert fresh == pytest.approx(min(ratio, engine_cap))
        assert weight == pytest.approx(fresh * age.item())


@settings(max_examples=100)
@given(
    logprobs=st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB), min_size=1, max_size=5),
    gap=st.integers(0, 6),
)
def test_a_proximal_policy_lies_between_behaviour_and_current(logprobs, gap):
    behaviour, current, advantages = torch.tensor(logprobs, dtype=torch.float64).unbind(-1)
    proximal = a3po_proximal_logprobs(behaviour, current, gap)
    low, high = torch.minimum(behaviour, current), torch.maximum(behaviour, current)
    assert bool(((proximal >= low - 1e-12) & (proximal <= high + 1e-12)).all())
    terms = decoupled_ppo(current, proximal, behaviour, advantages, cap=5.0, **CLIP)
    assert bool((terms.weights <= 5.0).all())
    assert bool(torch.isfinite(terms.ppo.loss).all())

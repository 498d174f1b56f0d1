"""How far a batch's passes move a policy: against whole distributions, and without a trace."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.step.test_loop import make_ready, opened, samples
from tests.trainer.tiny import VOCAB, load, random_sequences, save_model
from trainer.calibration.first_batch import USUAL, first_batch_kl, rate_warning
from trainer.config import LoraConfig, TrainerConfig

TEXTS = random_sequences(VOCAB, [30, 45], seed=4)
RATES = (1e-3, 1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def config(rate: float, **settings) -> TrainerConfig:
    return TrainerConfig(learning_rate=rate, epochs_per_batch=4, **settings)


def kl_of_a_trained_copy(folder, settings: TrainerConfig) -> float:
    """The same by plain PyTorch: a copy is trained, and whole distributions are compared."""
    start, copy = load(folder).model, load(folder).model
    optimizer = torch.optim.AdamW(copy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    ids = [torch.from_numpy(text).long()[None] for text in TEXTS]
    num_tokens = sum(one.shape[1] - 1 for one in ids)
    for _ in range(settings.epochs_per_batch):
        optimizer.zero_grad()
        for one in ids:
            logits = copy(input_ids=one).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, one[0, 1:], reduction="sum")
            (loss / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(copy.parameters(), settings.grad_clip)
        optimizer.step()
    total = 0.0
    with torch.no_grad():
        for one in ids:
            p, q = (model(input_ids=one).logits[0, :-1].log_softmax(-1) for model in (start, copy))
            total += float((p.exp() * (p - q)).sum())
    return total / num_tokens


@pytest.mark.parametrize("rate", RATES)
def test_it_is_the_kl_to_a_copy_that_was_trained(folder, rate):
    settings = config(rate, weight_decay=0.0)
    found = first_batch_kl(load(folder), TEXTS, settings)
    assert found == pytest.approx(kl_of_a_trained_copy(folder, settings), rel=0.1)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
def test_the_policy_is_what_it_was(folder, lora):
    policy = load(folder, lora=lora)
    before = [one.detach().clone() for one in policy.trainable_parameters()]
    assert first_batch_kl(policy, TEXTS, config(1e-2)) > 0.0
    for old, now in zip(before, policy.trainable_parameters(), strict=True):
        assert torch.equal(old, now)
        assert now.grad is None


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_the_suggested_rate_was_tried(folder, rate):
    settings = config(rate)
    policy = load(folder)
    warning = rate_warning(policy, TEXTS, settings)
    assert warning is not None
    assert f"trainer.learning_rate = {rate:g} would move" in warning
    suggested = float(warning.rpartition("=")[2])
    moved = float(warning.rpartition("it would move by ")[2].partition(":")[0])
    slower = first_batch_kl(policy, TEXTS, config(suggested))
    assert slower == pytest.approx(moved, rel=0.05)
    assert slower <= USUAL[1]


def test_a_usual_rate_is_not_spoken_of(folder):
    assert rate_warning(load(folder), TEXTS, config(1e-3)) is None


async def test_a_run_says_it_before_its_first_step_alone(folder, tmp_path, caplog):
    async with opened(tmp_path, folder, learning_rate=1.0, epochs_per_batch=4) as (
        trainer,
        store,
        _,
    ):
        await trainer.check_rate(TEXTS)
        assert "trainer.learning_rate = 1 would move this model" in caplog.text
        caplog.clear()
        await make_ready(store, samples(4))
        assert await trainer.step() is not None
        await trainer.check_rate(TEXTS)
        assert "would move" not in caplog.text

"""The calibration of a slime job: a real engine's scores of fixed texts against the trainer's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.slime.probes import Probe, ProbePlan, score_probes
from rollout_bridge.slime.rows import TrainRow, train_rows
from tests.examples.shipped import MODEL
from tests.trainer.slime.batches import samples_of
from tests.trainer.slime.one_process import OneProcess, arguments, backward, log_probs_of, logits_of
from tests.trainer.tiny import load, save_model
from trainer.config import TrainerConfig
from trainer.errors import CalibrationError
from trainer.slime.advantages.of_rank import prepare

PLAN = ProbePlan(
    model=str(MODEL),
    vocab_size=None,
    renderer=RendererConfig(name="qwen3", enable_thinking=False),
    client=EngineClientConfig(attempts=1),
    seed=3,
    bound=1e-3,
)
CONFIG = TrainerConfig.model_validate({"tensorboard": False, "beta_kl": 0.0})


def data_of(rows: list[TrainRow], model: torch.nn.Module) -> dict:
    """What slime's trainer has of these rows before it asks for advantages."""
    masks = [torch.tensor(row.carrier.loss_mask(), dtype=torch.int) for row in rows]
    data = {
        "tokens": [torch.from_numpy(row.ids).long() for row in rows],
        "total_lengths": [len(row.ids) for row in rows],
        "response_lengths": [row.carrier.response_length for row in rows],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum().float() for mask in masks]),
        "rollout_log_probs": [torch.from_numpy(row.carrier.rollout_logprobs()) for row in rows],
        "prompt": [row.carrier for row in rows],
        "num_microbatches": [1],
        "global_batch_sizes": [len(rows)],
    }
    with torch.no_grad():
        data["log_probs"] = log_probs_of(logits_of(model, data["tokens"]), data)
    return data


async def test_an_engine_with_the_trainers_weights_passes_and_another_does_not(
    lab_engine: str,
) -> None:
    probes = await score_probes(PLAN, lab_engine)
    assert [len(one.logprobs) for one in probes] == [len(one.ids) - 1 for one in probes]
    assert len(probes) == 6
    rows = train_rows([], [], min_rows=4, probes=probes)
    assert [row.is_padding for row in rows] == [False] * 6 + [True] * 2
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    args = arguments(vocab_size=model.config.vocab_size)
    metrics = prepare(args, data_of(rows, model), CONFIG, OneProcess()).metrics
    assert 0 < metrics["calibration/mean"] < metrics["calibration/max"] < 1e-4
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.2)
    words = r"differ from slime.s trainer by .* cluster\.calibration_bound is 0\.001"
    with pytest.raises(CalibrationError, match=words):
        prepare(args, data_of(rows, model), CONFIG, OneProcess())


async def test_engines_that_do_not_answer_are_an_error() -> None:
    with pytest.raises(EngineError):
        await score_probes(PLAN, "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("policy"))


def test_probes_change_no_gradient_and_count_as_no_turns(folder) -> None:
    gradients = []
    for number in (0, 2):
        policy = load(folder)
        samples = samples_of(policy)
        probes = [
            Probe(
                ids=np.arange(2 + length, dtype=np.int32),
                logprobs=np.zeros(1 + length, "f4"),
                bound=1e3,
            )
            for length in range(number)
        ]
        rows = train_rows(samples, [0] * len(samples), min_rows=1, probes=probes)
        data = data_of(rows, policy.model)
        prepared = prepare(arguments(), data, CONFIG, OneProcess())
        assert ("calibration/mean" in prepared.metrics) == (number > 0)
        assert prepared.metrics["batch/turns"] == len(samples)
        backward(data, policy.model, [list(range(len(rows)))])
        gradients.append([one.grad for one in policy.trainable_parameters()])
    for plain, probed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, probed, atol=1e-6, rtol=0)


def test_a_score_that_is_not_finite_and_probes_that_got_lost_are_errors(folder) -> None:
    policy = load(folder)
    probe = Probe(ids=np.arange(5, dtype=np.int32), logprobs=np.full(4, np.nan, "f4"), bound=1.0)
    rows = train_rows([], [], min_rows=1, probes=[probe])
    with pytest.raises(CalibrationError, match="by nan nats"):
        prepare(arguments(), data_of(rows, policy.model), CONFIG, OneProcess())
    lost = [replace(row, carrier=replace(row.carrier, probe=None)) for row in rows]
    with pytest.raises(CalibrationError, match="did not reach"):
        prepare(arguments(), data_of(lost, policy.model), CONFIG, OneProcess())

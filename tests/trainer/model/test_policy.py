import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.trainer.tiny import VOCAB, load
from trainer.config import LoraConfig
from trainer.errors import StartupError
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.token_states import TokenRequest


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCAB, (3, 12))
    mask = (torch.rand(3, 12) < 0.5).float()
    mask[:, 0] = 0
    mask[0, 1] = mask[0, -1] = 1
    return ids, mask


def test_logprobs_are_those_of_the_full_forward_pass(folder):
    policy = load(folder)
    ids, mask = batch()
    temperatures = torch.full((3, 12), 0.7)
    actual = policy.token_logprobs(ids, mask, temperatures)
    logits = policy.base_model(input_ids=ids).logits[:, :-1]
    for scale, values in ((1.0, actual.logprobs_BT), (0.7, actual.logprobs_sampled_BT)):
        table = torch.log_softmax(logits / scale, dim=-1)
        expected = table.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(values[:, 1:], expected * mask[:, 1:], atol=1e-5, rtol=1e-5)
    table = torch.log_softmax(logits, dim=-1)
    entropy = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(
        actual.entropy_BT[:, 1:], entropy * mask[:, 1:], atol=1e-5, rtol=1e-5
    )


def test_temperature_one_computes_one_logprob(folder):
    policy = load(folder)
    ids, mask = batch()
    scores = policy.token_logprobs(ids, mask, torch.ones(3, 12))
    assert scores.logprobs_sampled_BT is scores.logprobs_BT
    assert not scores.entropy_BT.requires_grad


def test_chunks_change_neither_values_nor_gradients(folder):
    ids, mask = batch()
    gradients = []
    for size in (1024, 3):
        policy = load(folder, chunk_tokens=size)
        scores = policy.token_logprobs(
            ids, mask, torch.full((3, 12), 0.9), TokenRequest(entropy_gradient=True)
        )
        loss = (scores.logprobs_sampled_BT + scores.entropy_BT - scores.logprobs_BT**2).sum()
        loss.backward()
        gradients.append([p.grad for p in policy.trainable_parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_what_stands_to_the_right_changes_nothing(folder):
    policy = load(folder)
    ids, mask = batch()
    mask[:, 8:] = 0
    other = ids.clone()
    other[:, 8:] = 7
    torch.testing.assert_close(
        policy.token_logprobs(ids, mask).logprobs_BT,
        policy.token_logprobs(other, mask).logprobs_BT,
    )


def test_the_first_token_cannot_be_scored(folder):
    ids, mask = batch()
    mask[0, 0] = 1
    with pytest.raises(ValueError, match="first token"):
        load(folder).token_logprobs(ids, mask)


def test_an_empty_mask_gives_zeros_with_a_graph(folder):
    ids, mask = batch()
    scores = load(folder).token_logprobs(ids, torch.zeros_like(mask))
    scores.logprobs_BT.sum().backward()
    assert scores.logprobs_BT.abs().sum().item() == 0.0


def test_adapters_start_without_effect_and_only_they_train(folder):
    ids, mask = batch()
    plain = load(folder)
    adapted = load(folder, lora=LoraConfig(rank=4, alpha=8), seed=3)
    torch.testing.assert_close(
        plain.token_logprobs(ids, mask).logprobs_BT, adapted.token_logprobs(ids, mask).logprobs_BT
    )
    names = [n for n, p in adapted.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        for parameter in adapted.trainable_parameters():
            parameter.add_(0.1)
    changed = adapted.token_logprobs(ids, mask).logprobs_BT
    start = WithoutAdapters(adapted).token_logprobs(ids, mask).logprobs_BT
    torch.testing.assert_close(start, plain.token_logprobs(ids, mask).logprobs_BT)
    assert (changed - start).abs().max() > 0.01


def capped_model(cap: float) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=cap,
        initializer_range=1.0,
    )
    return Gemma2ForCausalLM(config)


def test_logits_are_capped_as_the_model_caps_them():
    policy = Policy(capped_model(0.5), dtype="float32", chunk_tokens=8)
    ids, mask = batch()
    temperatures = torch.full(ids.shape, 0.7)
    request = TokenRequest(draw=3, top_k=2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = policy.token_logprobs(ids, mask, temperatures, request)
        logits = policy.base_model(input_ids=ids).logits[:, :-1]
    wanted = mask[:, 1:] > 0
    targets = ids[:, 1:, None]
    for got, scale in ((found.logprobs_BT, 1.0), (found.logprobs_sampled_BT, 0.7)):
        expected = (logits / scale).log_softmax(-1).gather(2, targets)[..., 0]
        torch.testing.assert_close(got[:, 1:][wanted], expected[wanted], atol=1e-5, rtol=0)
    assert found.drawn_BTK is not None
    assert found.drawn_ids_BTK is not None
    drawn = logits.log_softmax(-1).gather(2, found.drawn_ids_BTK[:, 1:])
    got = found.drawn_BTK[:, 1:][wanted]
    torch.testing.assert_close(got, drawn[wanted], atol=1e-5, rtol=0)


def test_a_model_that_does_something_unknown_to_its_logits_is_refused(monkeypatch):
    monkeypatch.setattr("trainer.model.policy._after_head", lambda config: (1.0, None))
    with pytest.raises(StartupError, match="Gemma2"):
        Policy(capped_model(0.05), dtype="float32", chunk_tokens=8)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
def test_bfloat16_forward_keeps_float32_weights_and_head(folder, lora):
    ids, mask = batch()
    exact = load(folder).token_logprobs(ids, mask).logprobs_BT
    policy = load(folder, dtype="bfloat16", lora=lora)
    rough = policy.token_logprobs(ids, mask).logprobs_BT
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.2
    rough.sum().backward()
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all())
        for p in policy.trainable_parameters()
    )


def test_other_tokens_at_the_same_positions(folder):
    policy = load(folder, chunk_tokens=5)
    ids, mask = batch()
    support = torch.randint(0, VOCAB, (3, 12, 4))
    support[..., 0] = ids
    request = TokenRequest(
        support_ids_BTK=support, top_k=3, draw=6, generator=torch.Generator().manual_seed(1)
    )
    scores = policy.token_logprobs(ids, mask, request=request)
    table = torch.log_softmax(policy.base_model(input_ids=ids).logits[:, :-1], dim=-1)
    used = mask[:, 1:] > 0
    assert scores.support_BTK is not None
    assert scores.support_BTK.requires_grad
    expected = table.gather(-1, support[:, 1:])
    torch.testing.assert_close(
        scores.support_BTK[:, 1:][used], expected[used], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(scores.support_BTK[..., 0], scores.logprobs_BT)
    values, best = table.topk(3, dim=-1)
    assert torch.equal(scores.topk_ids_BTK[:, 1:][used], best[used])
    torch.testing.assert_close(scores.topk_BTK[:, 1:][used], values[used], atol=1e-5, rtol=1e-5)
    drawn = table.gather(-1, scores.drawn_ids_BTK[:, 1:])
    torch.testing.assert_close(scores.drawn_BTK[:, 1:][used], drawn[used], atol=1e-5, rtol=1e-5)
    assert not scores.topk_BTK.requires_grad
    assert not scores.drawn_BTK.requires_grad
    assert float(scores.support_BTK[:, 1:][~used].detach().abs().sum()) == 0


def test_drawn_tokens_follow_the_distribution(folder):
    policy = load(folder)
    ids, mask = batch()
    request = TokenRequest(draw=4000, generator=torch.Generator().manual_seed(2))
    scores = policy.token_logprobs(ids, mask, request=request)
    row, column = (int(index) for index in mask.nonzero()[0])
    counts = torch.bincount(scores.drawn_ids_BTK[row, column], minlength=VOCAB) / 4000
    logits = policy.base_model(input_ids=ids).logits[row, column - 1].detach()
    table = torch.softmax(logits, dim=-1)
    assert float((counts - table).abs().max()) < 0.03

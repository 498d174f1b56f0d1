import pytest
import torch

from tests.trainer.tiny import VOCAB, load
from trainer.config import LoraConfig
from trainer.model.teacher_models import EmaTeacher, TrustRegionTeacher


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(2, 9)
    mask[:, 0] = 0
    return torch.randint(0, VOCAB, (2, 9)), mask


def shifted(policy, size=0.1):
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return policy


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_average_moves_a_share_of_the_way_and_leaves_the_policy_alone(folder, lora):
    policy = load(folder, lora=lora)
    start = [parameter.detach().clone() for parameter in policy.trainable_parameters()]
    before = policy.token_logprobs(*rows()).logprobs_BT.detach()
    teacher = EmaTeacher(policy, 0.25)
    shifted(policy)
    torch.testing.assert_close(teacher.token_logprobs(*rows()).logprobs_BT.detach(), before)
    learned = [parameter.detach().clone() for parameter in policy.trainable_parameters()]
    teacher.follow()
    for average, old, new, now in zip(
        teacher.state(), start, learned, policy.trainable_parameters(), strict=True
    ):
        torch.testing.assert_close(average, 0.75 * old + 0.25 * new)
        assert torch.equal(now, new)
    again = EmaTeacher(policy, 0.25)
    again.load_state(teacher.state())
    torch.testing.assert_close(
        again.token_logprobs(*rows()).logprobs_BT, teacher.token_logprobs(*rows()).logprobs_BT
    )


def test_the_policy_is_itself_again_after_a_failed_score(folder):
    policy = load(folder)
    teacher = EmaTeacher(policy, 0.5)
    shifted(policy)
    learned = policy.trainable_parameters()[0].data_ptr()
    ids, mask = rows()
    with pytest.raises(ValueError, match="first token"):
        teacher.token_logprobs(ids, torch.ones_like(mask))
    assert policy.trainable_parameters()[0].data_ptr() == learned


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_trust_region_mixes_logits(folder, alpha):
    reference, policy = load(folder).freeze(), shifted(load(folder))
    ids, mask = rows()
    scores = TrustRegionTeacher(reference, policy, alpha).token_logprobs(ids, mask)
    mixed = (1 - alpha) * reference.base_model(input_ids=ids).logits
    mixed = mixed + alpha * policy.base_model(input_ids=ids).logits
    table = torch.log_softmax(mixed[:, :-1], dim=-1)
    expected = table.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores.logprobs_BT[:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_rates_are_checked(folder):
    policy = load(folder)
    with pytest.raises(ValueError, match="rate"):
        EmaTeacher(policy, 0.0)
    with pytest.raises(ValueError, match="share"):
        TrustRegionTeacher(policy, policy, 1.5)

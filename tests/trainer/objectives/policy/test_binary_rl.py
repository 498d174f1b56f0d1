import pytest
import torch

from trainer.objectives.policy.binary_rl import binary_advantages, binary_trains

NAN = float("nan")


def trains(rewards, next_states, sessions):
    return binary_trains(
        torch.tensor(rewards), torch.tensor(next_states), torch.tensor(sessions)
    ).tolist()


def test_every_token_has_its_turns_reward():
    ids = torch.tensor([[0, 0, -1, 1], [2, -1, -1, -1]])
    advantages = binary_advantages(torch.tensor([1.0, -1.0, 0.0]), (ids >= 0).float(), ids)
    assert advantages.tolist() == [[1.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]]


def test_neutral_turns_and_those_without_next_state_do_not_train():
    assert trains([1.0, 0.0, -1.0, 1.0], [1, 1, 1, 0], [0, 0, 0, 0]) == [True, False, True, False]


def test_a_session_trains_on_one_turn_at_least():
    assert trains([0.0, 0.0, 1.0], [1, 1, 1], [0, 0, 0]) == [True, False, True]
    assert trains([0.0, NAN, 0.0], [0, 1, 1], [7, 7, 7]) == [False, True, False]
    assert trains([1.0, 0.0, 0.0], [1, 1, 1], [0, 1, 0]) == [True, True, False]


def test_no_next_state_at_all_means_no_sample():
    assert trains([1.0], [0], [0]) == [False]


@pytest.mark.parametrize("reward", [0.5, NAN, 2.0])
def test_other_rewards_are_refused(reward):
    ids = torch.tensor([[0]])
    with pytest.raises(ValueError, match="-1, 0 and 1"):
        binary_advantages(torch.tensor([reward]), torch.ones(1, 1), ids)


def test_a_token_of_no_turn_is_refused():
    for turn in (-1, 1):
        with pytest.raises(ValueError, match="turn id"):
            binary_advantages(torch.ones(1), torch.ones(1, 1), torch.tensor([[turn]]))

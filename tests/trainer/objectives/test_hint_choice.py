import pytest
import torch

from trainer.objectives.distributions.gather import shared_ids
from trainer.objectives.hint_choice import choose_hints, count_overlap, take_chosen

OVERLAP = torch.tensor([[2, 2, 2, 3, 3, 2], [3, 2, 2, 3, 4, 1], [1, 3, 2, 3, 4, 2]])


def test_overlap_counts_shared_tokens_in_any_order():
    student = torch.tensor([[5, 7, 9], [1, 2, -1]])
    teachers = torch.tensor([[[9, 5, 0], [3, -1, -1]], [[7, 9, 5], [2, 1, -1]]])
    assert count_overlap(student, teachers).tolist() == [[2, 0], [3, 2]]
    assert shared_ids(student, teachers[0]).tolist() == [[True, False, True], [False] * 3]


def test_student_and_teacher_may_differ_in_k():
    assert count_overlap(torch.tensor([[5, 7]]), torch.tensor([[[1, 2, 7, 4]]])).tolist() == [[1]]


@pytest.mark.parametrize(
    ("mode", "step_spans", "expected"),
    [
        ("shortest", None, [0, 0, 0, 0, 0, 0]),
        ("token_optimal", None, [1, 2, 0, 0, 1, 0]),
        # Sums 14, 15, 15: the tie goes to the shorter hint.
        ("sequence_optimal", None, [1, 1, 1, 1, 1, 1]),
        ("sequence_optimal", [(0, 1), (3, 6)], [1, 0, 0, 2, 2, 2]),
        ("sequence_optimal", [(2, 4)], [0, 0, 0, 0, 0, 0]),
        ("token_optimal", [(0, 1)], [1, 2, 0, 0, 1, 0]),
    ],
)
def test_choice_and_ties(mode, step_spans, expected):
    choice = choose_hints(OVERLAP, mode, step_spans=step_spans)
    assert choice.candidates_T.tolist() == expected
    assert choice.overlap_T.tolist() == [
        int(OVERLAP[candidate, token]) for token, candidate in enumerate(expected)
    ]


def test_many_equal_candidates_take_the_first():
    for mode in ("token_optimal", "sequence_optimal"):
        choice = choose_hints(torch.full((64, 33), 4), mode)
        assert choice.candidates_T.eq(0).all()


def test_chosen_values_per_token():
    values = torch.arange(12.0).reshape(2, 3, 2)
    chosen = take_chosen(values, torch.tensor([1, 0, 1]))
    assert chosen.tolist() == [[6.0, 7.0], [2.0, 3.0], [10.0, 11.0]]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unknown hint choice 'longest'"):
        choose_hints(OVERLAP, "longest")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no hint candidates"):
        choose_hints(OVERLAP[:0], "shortest")
    with pytest.raises(ValueError, match=r"\[4, 7\) is outside 6 tokens"):
        choose_hints(OVERLAP, "sequence_optimal", step_spans=[(4, 7)])
    with pytest.raises(ValueError, match="2 tokens of the student, 3 of the teacher"):
        count_overlap(torch.zeros(2, 4), torch.zeros(1, 3, 4))

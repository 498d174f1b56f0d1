import pytest

from opd.rehearsal.preparing.prompt_check import judged


@pytest.mark.parametrize(
    ("said", "asked", "followed", "is_used"),
    [
        ([True] * 8, 8, 8, True),
        ([True] * 5 + [False] * 3, 8, 5, True),
        ([True] * 4 + [False] * 4, 8, 4, False),
        ([True] * 4 + [None] * 4, 4, 4, True),
        ([True] * 3 + [None] * 5, 3, 3, False),
        ([None] * 8, 0, 0, False),
    ],
)
def test_a_text_is_used_where_the_start_model_clearly_does_it(said, asked, followed, is_used):
    found = judged(said)
    assert (found.asked, found.followed, found.dropped is None) == (asked, followed, is_used)

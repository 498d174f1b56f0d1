"""The table of mistakes fits the sources and leaves out no objective; mutations.py runs it."""

from typing import get_args

import pytest

from tests.mutations import KINDS, ROOT, TABLE, Edit, Mutation, problems, read_table, verdict
from trainer.objectives.options import OBJECTIVE_NAMES, HindsightOpd

SURROGATES = get_args(HindsightOpd.model_fields["surrogate"].annotation)
EVERYWHERE = {"sign", "detach", "temperature"}
UNCLIPPED = {"unclipped", "pure_is"}


@pytest.fixture(scope="module")
def table() -> list[Mutation]:
    return read_table(TABLE.read_text())


def test_every_old_text_occurs_once_and_every_test_file_exists(table):
    assert problems(ROOT, table) == []
    assert {mutation.kind for mutation in table} == set(KINDS)


@pytest.mark.parametrize("subject", [*OBJECTIVE_NAMES, *SURROGATES])
def test_every_objective_and_surrogate_has_every_mistake_it_can_have(table, subject):
    """The clips of hindsight_opd are its surrogates'."""
    needed = EVERYWHERE
    if subject not in UNCLIPPED | {"hindsight_opd"}:
        needed = EVERYWHERE | {"clip_side"}
    found = {mutation.kind for mutation in table if subject in mutation.subjects}
    assert needed <= found


def test_subjects_are_objectives_surrogates_and_what_surrounds_them(table):
    others = {"kl", "frame", "correction", "batch"}
    subjects = {subject for mutation in table for subject in mutation.subjects}
    assert subjects == {*OBJECTIVE_NAMES, *SURROGATES} | others


def test_a_wrong_table_is_named(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "x.py").write_text("a = 1\nb = 1\n")
    (one,) = read_table("one: sign ppo\n    test_x.py -k 'a or b'\n    x.py | = 1\n    ==> ...0")
    assert one.tests == ("tests/trainer/test_x.py", "-k", "a or b")
    assert one.edits == (Edit(file="trainer/x.py", old="= 1", new="= 10"),)
    found = problems(tmp_path, [one])
    assert found == [
        "one: 2 times in trainer/x.py: '= 1'",
        "one: no tests at tests/trainer/test_x.py",
    ]
    with pytest.raises(ValueError, match="file \\| old"):
        read_table("one: sign ppo\n    test_x.py\n    x.py = 1\n    ==> 2")


@pytest.mark.parametrize(
    ("returncode", "output", "expected"),
    [
        (0, "4 passed", (False, "SURVIVED")),
        (1, "FAILED tests/a.py::test_b - assert 1 == 2", (True, "caught by a.py::test_b")),
        (1, "FAILED tests/a.py::test_b[x y] - assert 1", (True, "caught by a.py::test_b[x y]")),
        (1, "FAILED tests/a.py::test_b - NameError: c", (False, "BROKEN: tests/a.py::test_b: ")),
        (2, "ERROR tests/a.py", (False, "BROKEN (pytest exits 2)")),
    ],
)
def test_only_a_failed_test_counts_as_caught(returncode, output, expected):
    caught, text = verdict(returncode, output)
    assert caught is expected[0]
    assert text.startswith(expected[1])

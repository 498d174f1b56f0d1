"""Names: two disjoint halves, decided by the letters alone."""

import random

from examples.tool_lab.names import is_held_out, random_code, random_name


def test_pools_are_disjoint():
    rng = random.Random(0)
    train = {random_name(rng, held_out=False) for _ in range(500)}
    held_out = {random_name(rng, held_out=True) for _ in range(500)}
    assert not train & held_out
    assert all(is_held_out(name) for name in held_out)
    assert not any(is_held_out(name) for name in train)


def test_names_are_letter_level_and_seeded():
    names = [random_name(random.Random(seed), held_out=False) for seed in range(2000)]
    assert names == [random_name(random.Random(seed), held_out=False) for seed in range(2000)]
    assert all(4 <= len(name) <= 7 and name.istitle() for name in names)
    assert len({name[1:3] for name in names}) > 150
    assert len(random_code(random.Random(1))) == 4

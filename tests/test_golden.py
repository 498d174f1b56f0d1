"""Every golden file agrees with this project's functions, by the command that people run."""

import json
from pathlib import Path

import pytest
import torch

from tests.golden import main
from tests.golden_maps import MAPS, file_of, find_map
from tests.golden_maps.check import Comparison, Deliberate, Outcome
from tests.golden_maps.garbage import declare
from tests.golden_maps.run import run_file

DATA = Path(__file__).parent / "data"
FILES = sorted((DATA / "golden").glob("*.json"))
MORE = sorted((DATA / "golden_more").glob("*.json"))
"""The references' code on other seeds, shapes and options, among them garbage at mask 0; and
independent arithmetic for formulas that no reference computes.
"""
OWN = [path for path in MORE if path.stem in MAPS]
"""The latter: files with a map of their own."""


@pytest.mark.parametrize("path", [*FILES, *MORE], ids=lambda path: path.stem)
def test_file_agrees(path):
    result = run_file(path)
    failed = [
        f"{case.name}: {comparison.explain()}"
        for case in result.cases
        for comparison in case.comparisons
        if comparison.outcome() is Outcome.FAILED
    ]
    assert not failed, "\n".join(failed[:20])
    assert result.problem is None


def test_every_file_has_its_map_and_every_map_its_file():
    assert {path.stem for path in [*FILES, *OWN]} == set(MAPS)
    for name in MAPS:
        assert file_of(name) in [*FILES, *OWN]


def test_a_file_of_another_name_is_known_by_its_source_and_function(tmp_path):
    for path in [*FILES, *OWN]:
        meta = json.loads(path.read_text())["meta"]
        assert find_map(tmp_path / "cases.json", meta) is MAPS[path.stem]
    with pytest.raises(ValueError, match="no map"):
        find_map(tmp_path / "cases.json", {"source": "elsewhere"})


def test_garbage_at_mask_0_is_held_against_ourselves():
    mask = torch.tensor([[1.0, 0.0]])
    case = {"inputs": {"x": torch.tensor([[2.0, float("nan")]]), "mask": mask}, "kwargs": {}}

    def careful(case, meta):
        kept = torch.where(mask > 0, case["inputs"]["x"], 0.0)
        yield Comparison(name="sum", ours=kept.sum(), reference=torch.tensor(float("nan")))

    def careless(case, meta):
        total = (case["inputs"]["x"] * mask).sum()
        yield Comparison(name="sum", ours=total, reference=torch.tensor(float("nan")))

    for evaluate, outcome in ((careful, Outcome.DIFFERENT), (careless, Outcome.FAILED)):
        (comparison,) = declare(tuple(evaluate(case, {})), case, evaluate, {})
        assert comparison.outcome() is outcome


def test_command_says_which_case_disagrees(tmp_path, capsys):
    original = DATA / "golden" / "staleness_limit.json"
    changed = tmp_path / "staleness_limit.json"
    changed.write_text(original.read_text().replace('"max_N_r":4,', '"max_N_r":5,', 1))
    assert main([str(original)]) == 0
    assert "0 failed" in capsys.readouterr().out
    assert main([str(changed)]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_a_declared_difference_is_checked_against_our_own_value():
    one, two, three = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    declared = Deliberate(reason="ALGORITHMS 9", expected=two)
    for ours, outcome in ((two, Outcome.DIFFERENT), (three, Outcome.FAILED)):
        comparison = Comparison(name="x", ours=ours, reference=one, deliberate=declared)
        assert comparison.outcome() is outcome
    assert Comparison(name="x", ours=two, reference=one).outcome() is Outcome.FAILED
    assert Comparison(name="x", ours=one, reference=one).outcome() is Outcome.AGREED

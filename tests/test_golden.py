"""Every golden file agrees with this project's functions, by the command that people run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.golden_maps import MAPS
from tests.golden_maps.check import Comparison, Deliberate, Outcome
from tests.golden_maps.run import run_file

FILES = sorted((Path(__file__).parent / "data" / "golden").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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
    assert {path.stem for path in FILES} == set(MAPS)


def test_command_says_which_case_disagrees(tmp_path):
    original = Path(__file__).parent / "data" / "golden" / "staleness_limit.json"
    changed = tmp_path / "staleness_limit.json"
    changed.write_text(original.read_text().replace('"max_N_r":4,', '"max_N_r":5,', 1))
    command = [sys.executable, str(Path(__file__).parent / "golden.py")]
    good = subprocess.run([*command, str(original)], capture_output=True, text=True, check=False)
    assert (good.returncode, "0 failed" in good.stdout) == (0, True)
    bad = subprocess.run([*command, str(changed)], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "DISAGREES" in bad.stdout


def test_a_declared_difference_is_checked_against_our_own_value():
    one, two, three = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    declared = Deliberate(reason="ALGORITHMS 9", expected=two)
    for ours, outcome in ((two, Outcome.DIFFERENT), (three, Outcome.FAILED)):
        comparison = Comparison(name="x", ours=ours, reference=one, deliberate=declared)
        assert comparison.outcome() is outcome
    assert Comparison(name="x", ours=two, reference=one).outcome() is Outcome.FAILED
    assert Comparison(name="x", ours=one, reference=one).outcome() is Outcome.AGREED

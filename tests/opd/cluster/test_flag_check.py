"""What is made of the parsers' answer, and what is said where there are none to ask.

The answers here are written down; tests/slime/test_launch_flags.py asks the real parsers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from opd.cluster.config import ClusterConfig
from opd.cluster.flag_check import FlagError, check_flags, flags_of, judge
from tests.opd.cluster.examples import values

VERSIONS = {"slime": "0.3.1", "megatron": "0.16.0rc0", "sglang": "0.5.15.post1"}


def answer(**changes: Any) -> dict[str, Any]:
    known = {"slime": ["--lr", "--max-tokens-per-gpu"], "sglang": ["--router-policy"]}
    fields = ["mem_fraction_static"]
    found = {"versions": VERSIONS, "known": known, "server_args": fields, "errors": []}
    return {**found, **changes}


def test_flags_are_found_with_and_without_their_values() -> None:
    argv = ["--lr", "-1", "--swiglu", "--a=b", "--lr", "1"]
    assert flags_of(argv) == ["--lr", "--swiglu", "--a"]


def test_known_flags_pass() -> None:
    assert judge(answer(), ["--lr", "1", "--router-policy", "x"], [], "refuse") == ([], [])


def test_unknown_flag_names_the_nearest() -> None:
    problems, _ = judge(answer(), ["--max-token-per-gpu", "1", "--zzz"], [], "refuse")
    assert "did you mean --max-tokens-per-gpu?" in problems[0]
    assert "--zzz: no known one resembles it" in problems[1]


def test_unknown_engine_setting_names_the_nearest() -> None:
    problems, _ = judge(answer(), [], ["mem_fraction"], "refuse")
    assert problems == [
        "unknown server_args key mem_fraction: did you mean mem_fraction_static? (slime would "
        "leave it out)"
    ]


def test_unknown_version_is_refused_or_warned_of() -> None:
    found = answer(versions={**VERSIONS, "slime": "0.4.0"})
    problems, _ = judge(found, [], [], "refuse")
    assert "slime 0.4.0 is not a version that this launch was tried with (0.3.1)" in problems[0]
    problems, warnings = judge(found, [], [], "warn")
    assert (len(problems), len(warnings)) == (0, 1)


def test_parsers_that_cannot_be_built_are_a_problem_of_their_own() -> None:
    found = answer(known={}, errors=["ImportError: no sglang"])
    problems, _ = judge(found, ["--lr"], [], "refuse")
    assert problems == ["slime's parsers cannot be asked: ImportError: no sglang"]


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterConfig:
    """One whose folders look like slime and Megatron-LM, and are empty."""
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "train_async.py").touch()
    (tmp_path / "Megatron-LM" / "megatron" / "training").mkdir(parents=True)
    here = {
        "python": sys.executable,
        "slime_root": str(tmp_path / "slime"),
        "megatron_root": str(tmp_path / "Megatron-LM"),
    }
    return ClusterConfig.model_validate({**values()["cluster"], **here})


def test_python_without_sglang_is_refused_with_what_is_missing(cluster: ClusterConfig) -> None:
    root = str(Path(__file__).parents[3])
    with pytest.raises(FlagError, match=r"cannot be asked: ModuleNotFoundError: .*'sglang'"):
        check_flags(cluster, ["--lr", "1"], [], [], None, {"PYTHONPATH": root})


def test_python_that_cannot_run_the_parsers_is_refused(cluster: ClusterConfig) -> None:
    broken = cluster.model_copy(update={"python": "false"})
    with pytest.raises(FlagError, match=r"cannot be asked with .*false: no output"):
        check_flags(broken, [], [], [], None, {})


def test_where_nothing_is_installed_nothing_is_claimed(cluster: ClusterConfig) -> None:
    elsewhere = cluster.model_copy(update={"slime_root": "/nowhere", "python": "no-such-python"})
    report = check_flags(elsewhere, ["--no-such-flag"], [], [], None, {})
    assert not report.checked
    assert "cluster.slime_root /nowhere" in report.text
    assert "cluster.python no-such-python" in report.text

"""Every flag of every example against the real parsers of slime, Megatron-LM and SGLang.

    SLIME_ROOT=... MEGATRON_ROOT=... SGLANG_SITE=... pytest -m slime tests/slime

SGLANG_SITE: the folders of an SGLang 0.5.15 that is not in this environment (`cpu_python.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from opd.cluster.architecture import Architecture, megatron_flags
from opd.cluster.flag_check import FlagError
from opd.cluster.plan import LaunchPlan, make_plan
from tests.opd.cluster.examples import CONFIGS, NOWHERE, values
from tests.opd.cluster.test_going_back import write_run
from trainer.schedule.rollback_order import order_rollback

pytestmark = [pytest.mark.slime, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
# What slime's scripts/models and this project say in two ways, or that has no effect on a model.
SAME = {"--use-rotary-position-embeddings": ("--position-embedding-type", "rope")}
NO_EFFECT = {"--rotary-percent": ("1.0",)}


@pytest.fixture(scope="session")
def megatron_root() -> Path:
    value = os.environ.get("MEGATRON_ROOT")
    if not value or not (Path(value) / "megatron" / "training").is_dir():
        pytest.skip("no Megatron-LM: set MEGATRON_ROOT to a checkout")
    return Path(value)


@pytest.fixture(scope="session")
def sglang_site() -> str:
    """Where the SGLang is that this slime works with; empty if this environment has it."""
    sites = os.environ.get("SGLANG_SITE", "")
    found = next(
        iter(
            importlib.metadata.distributions(
                name="sglang", path=[*sites.split(os.pathsep), *sys.path]
            )
        ),
        None,
    )
    if found is None or not found.version.startswith("0.5.15"):
        pytest.skip("no SGLang 0.5.15, which slime works with: set SGLANG_SITE (docs/cluster.md)")
    return sites


@pytest.fixture
def plan_with(slime_root: Path, megatron_root: Path, sglang_site: str, tmp_path: Path):
    """Plans an example as on a cluster: slime, a Python that has it, and the model are here."""

    def plan(config: Path, *overrides: str, gpu: bool = True) -> LaunchPlan:
        python = tmp_path / "python3"
        words = [sys.executable, str(HERE / "cpu_python.py"), sglang_site, str(int(gpu))]
        python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        python.chmod(0o755)
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        own = values(config.stem)["cluster"]["architecture"]
        (model / "config.json").write_text(json.dumps({**own, "architectures": ["none"]}))
        given = [
            f"model={model}",
            f"cluster.python={python}",
            f"cluster.slime_root={slime_root}",
            f"cluster.megatron_root={megatron_root}",
        ]
        return make_plan(config, [*given, *overrides], tmp_path / "run")

    return plan


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_flags_of_an_example_are_known_and_slime_accepts_them_together(config, plan_with) -> None:
    plan = plan_with(config)
    assert plan.flags.checked
    assert plan.flags.text.endswith("slime's whole parse_args passed")
    assert not plan.flags.warnings


def test_flags_of_a_launch_that_goes_back_are_accepted_too(plan_with, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    order_rollback(tmp_path / "run", 3)
    plan = plan_with(CONFIGS[0])
    assert ("--ckpt-step", "1") in plan.sections["checkpoints"]
    assert plan.flags.text.endswith("slime's whole parse_args passed")


def test_without_a_gpu_the_flags_are_checked_and_the_rest_is_said_to_be_open(plan_with) -> None:
    plan = plan_with(CONFIGS[0], gpu=False)
    assert plan.flags.checked
    assert "parse_args not run: Megatron asks the GPU" in plan.flags.text


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "cluster.extra_flags=['--distill-topk', '50']",
            r"unknown flag --distill-topk: .*slime would ignore it silently",
        ),
        (
            "cluster.extra_flags=['--max-tokens-per-gpus', '50']",
            r"unknown flag --max-tokens-per-gpus: did you mean --max-tokens-per-gpu\?",
        ),
        (
            "cluster.extra_flags=['--sglang-mem-fraction', '0.5']",
            r"unknown flag --sglang-mem-fraction: did you mean --sglang-mem-fraction-static\?",
        ),
        (
            "cluster.extra_flags=['--router-policy', 'nearest']",
            r"--router-policy: invalid choice: 'nearest'",
        ),
        (
            "cluster.extra_flags=['--lr-warmup-iters', 'ten']",
            r"--lr-warmup-iters: invalid int value",
        ),
        (
            "cluster.frozen.server_args={chunked_prefil_size = 1}",
            r"unknown server_args key chunked_prefil_size: did you mean chunked_prefill_size\?",
        ),
        (
            "cluster.extra_flags=['--custom-rm-path', 'trainer.slime.hooks.reward']",
            r"trainer\.slime\.hooks\.reward: trainer\.slime\.hooks has no such function",
        ),
        (
            "cluster.extra_flags=['--use-opd']",
            r"slime's parse_args: ValueError: --opd-type must be specified",
        ),
    ],
)
def test_wrong_flag_is_refused_by_name(override: str, reason: str, plan_with) -> None:
    with pytest.raises(FlagError, match=reason):
        plan_with(CONFIGS[0], override)


def test_another_slime_is_refused_or_warned_of_by_name(
    slime_root: Path, plan_with, tmp_path: Path
) -> None:
    other = tmp_path / "slime"
    other.mkdir()
    for path in slime_root.iterdir():
        (other / path.name).symlink_to(path)
    (other / "setup.py").unlink()
    (other / "setup.py").write_text('setup(version="9.9.9")')
    own = f"cluster.slime_root={other}"
    with pytest.raises(FlagError, match=r"slime 9\.9\.9 is not a version .* \(0\.3\.1\)"):
        plan_with(CONFIGS[0], own, gpu=False)
    plan = plan_with(CONFIGS[0], own, "cluster.unknown_versions=warn", gpu=False)
    assert "slime 9.9.9 is not a version" in plan.flags.warnings[0]


def test_a_slime_whose_parsers_changed_their_names_says_so(plan_with, tmp_path: Path) -> None:
    broken = tmp_path / "slime"
    (broken / "slime" / "utils").mkdir(parents=True)
    (broken / "train_async.py").write_text("")
    (broken / "slime" / "__init__.py").write_text("")
    with pytest.raises(FlagError, match=r"parsers cannot be asked: ModuleNotFoundError: .*slime\."):
        plan_with(CONFIGS[0], f"cluster.slime_root={broken}", gpu=False)


READ = """
import json, sys
from types import SimpleNamespace
from slime.backends.sglang_utils.sglang_config import SglangConfig
config = SglangConfig.from_yaml(sys.argv[1])
args = SimpleNamespace(rollout_num_gpus_per_engine=1, hf_checkpoint="none")
for model in config.models:
    model.resolve(args)
print(json.dumps([[m.name, m.update_weights, m.total_num_gpus] for m in config.models]))
"""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_slime_reads_the_engines_file_as_it_is_meant(
    config: Path, slime_root: Path, tmp_path: Path
) -> None:
    plan = make_plan(config, NOWHERE, tmp_path / "run")
    file = tmp_path / "sglang.yaml"
    file.write_text(plan.files[plan.paths.sglang_yaml])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(file)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(slime_root)},
    )
    policy, frozen = json.loads(done.stdout)
    assert policy[:2] == ["policy", True]
    assert frozen[:2] == ["frozen", False]
    assert policy[2] + frozen[2] == plan.layout.rollout_gpus


@pytest.mark.parametrize(
    ("example", "script"),
    [
        ("qwen3_4b", "qwen3-4B"),
        ("qwen3_8b", "qwen3-8B"),
        ("qwen3_30b_a3b", "qwen3-30B-A3B"),
    ],
)
def test_derived_architecture_is_that_of_slimes_own_script(
    example: str, script: str, slime_root: Path
) -> None:
    source = f'source {slime_root}/scripts/models/{script}.sh; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=True)
    model = Architecture.model_validate(values(example)["cluster"]["architecture"])
    ours = _normal([word for flag in megatron_flags(model) for word in flag])
    assert ours == _normal(done.stdout.split("\n")[:-1])


def _normal(words: list[str]) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for word in words:
        if word.startswith("--"):
            last = word
            flags[last] = ()
        else:
            flags[last] = (*flags[last], re.sub(r"[\s\[\]]", "", word))
    for flag, (name, *value) in SAME.items():
        if flags.pop(flag, None) is not None:
            flags[name] = tuple(value)
    for number in ("--norm-epsilon", "--moe-aux-loss-coeff", "--rotary-base"):
        if number in flags:
            flags[number] = (str(float(flags[number][0])),)
    return {name: value for name, value in flags.items() if NO_EFFECT.get(name) != value}

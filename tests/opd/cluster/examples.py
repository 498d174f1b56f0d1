"""The example configurations, and their dry runs as text without what belongs to this machine.

    python -m tests.opd.cluster.examples      writes tests/data/launch/*.txt anew

Look at the difference before you keep it: these files are what a user gets.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

from opd.cluster.flag_check import REPOSITORY
from opd.cluster.plan import LaunchPlan, make_plan
from opd.cluster.show import show

CONFIGS = [
    file
    for file in sorted((REPOSITORY / "configs").glob("*.toml"))
    if "[cluster]" in file.read_text(encoding="utf-8")
]
EXPECTED = REPOSITORY / "tests" / "data" / "launch"
# So that the text is the same where slime is installed and where it is not.
NOWHERE = ["cluster.slime_root=/nowhere/slime", "cluster.megatron_root=/nowhere/Megatron-LM"]


def plan_of(config: Path, overrides: list[str] | None = None) -> LaunchPlan:
    """The plan of a first launch."""
    return make_plan(config, overrides or NOWHERE, Path("/shared/runs") / config.stem)


def dry_run(config: Path) -> str:
    """What `opd slime --dry-run` prints."""
    text = show(plan_of(config))
    return text.replace(shlex.quote(sys.executable), "PYTHON").replace(
        str(REPOSITORY), "REPOSITORY"
    )


def values(name: str = "qwen3_4b") -> dict[str, Any]:
    """An example as nested values."""
    return tomllib.loads((REPOSITORY / "configs" / f"{name}.toml").read_text())


if __name__ == "__main__":
    EXPECTED.mkdir(parents=True, exist_ok=True)
    for path in CONFIGS:
        (EXPECTED / f"{path.stem}.txt").write_text(dry_run(path), encoding="utf-8")
        print(EXPECTED / f"{path.stem}.txt")

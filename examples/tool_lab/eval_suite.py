"""The lab's questions as a task suite for `opd eval`: the cases and checks that the lab itself uses
before and after learning, for any version of a run.

Each case is a task: with one sample per task and as many tasks as the lab's `eval_samples`, pass@1
is the rate that `measure` gives.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from examples.tool_lab.cases import Check, Message
from examples.tool_lab.evaluate import build_cases
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.measure import GROUPS, MAX_NEW_TOKENS
from examples.tool_lab.preferences import TRAINED_KINDS
from opd.evaluation import tasks
from opd.evaluation.tasks import PromptTask, SuiteRequest, TaskSuite

MODEL = Path(__file__).parent / "model"


def suits(folder: Path, model: str) -> bool:
    """Whether a run is one of the lab, or has its model."""
    return (folder / "lab.toml").is_file() or Path(model).resolve() == MODEL.resolve()


def suite(request: SuiteRequest) -> TaskSuite:
    """`request.tasks` cases for each preference that the run's users have and each other skill."""
    kinds = _preferences(request.folder)
    return TaskSuite(
        name="lab",
        tasks=[
            PromptTask(
                task_id=f"{group}-{request.seed}-{number}",
                messages=case.request.messages,
                tools=case.request.tools,
                checks={name: _decided(check) for name, check in case.checks.items()},
            )
            for group in GROUPS
            for number, case in enumerate(build_cases(group, request.tasks, request.seed, kinds))
        ],
        headline=[f"success_{kind}" for kind in kinds],
        max_new_tokens=MAX_NEW_TOKENS,
    )


def _preferences(folder: Path) -> Sequence[str]:
    """What the users of the run in `folder` want; the lab's usual wishes in other folders."""
    path = folder / "lab.toml"
    if not path.is_file():
        return TRAINED_KINDS
    return LabConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).preferences


def _decided(check: Check) -> tasks.Check:
    """Raises ValueError if a check does not apply: such an answer neither passes nor fails."""

    def decided(response: Message) -> bool:
        passed = check(response)
        if passed is None:
            raise ValueError("a task's check must apply to every answer")
        return passed

    return decided

"""The tool lab's settings, checked before anything starts.

`measured_run` is imported only after that: this takes a second, which a wrong start does not wait
for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tomli_w

from examples.tool_lab.lab_config import LabConfig
from opd.run import recipe
from opd.run.config import merge
from opd.run.defaults import resolve, single_machine
from opd.run.start_checks import check_start

MODEL = Path(__file__).parent / "model"
LAB_VALUES: dict[str, Any] = {
    # The lab's model never thinks; its template closes an empty thought before each answer.
    "renderer": {"name": "qwen3", "enable_thinking": False},
    # So low that votes agree: one wrong vote with a long hint would win over two right ones.
    "judge": {"votes": 3, "temperature": 0.3, "max_tokens": 48, "loop": {"concurrency": 24}},
}
LIVE_TURNS: dict[str, Any] = {
    # Without rehearsal: these settings learned on every seed and changed nothing else, with half of
    # the users open (docs/tool_lab.md).
    "scoring": {"top_k": 8},
    "trainer": {
        "learning_rate": 1e-4,
        "objective": {"name": "topk_tail_reverse_kl", "topk": 8},
        "beta_kl": 0.02,
        # Only failures teach. With one step on each batch the policy swings between wishes that
        # exclude each other; several on a batch with both kinds of failure teach when to do what.
        "rollout_batch_size": 32,
        "epochs_per_batch": 4,
    },
}


def run(
    lab: LabConfig, folder: Path, config_file: Path | None, overrides: list[str]
) -> dict[str, Any]:
    """Run the lab in `folder`; returns the summary that it also writes there.

    Raises StartupError if something cannot start.
    """
    values = merge(single_machine(str(MODEL), folder), LAB_VALUES)
    ends = {"max_steps": lab.updates} if lab.updates else {}
    # One step ahead, unless the settings give another number.
    ahead = {"steps_off": 1} if lab.schedule == "step_off" else {}
    trainer = {"seed": lab.seed, "schedule": lab.schedule, **ahead, **ends}
    values = merge(values, {"seed": lab.seed, "trainer": trainer})
    values |= {"proxy": {"port": 0}, "made_by": "lab"}
    config = resolve(
        values,
        config_file,
        overrides,
        lambda given: check_start(given, serves=True),
        recipe.recipe if lab.rehearses else lambda *_: LIVE_TURNS,
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=False)
    (folder / "lab.toml").write_text(tomli_w.dumps(lab.model_dump()), encoding="utf-8")

    from examples.tool_lab.measured_run import measured_run

    return asyncio.run(measured_run(lab, config, folder))

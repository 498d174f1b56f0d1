"""One line of JSON per update attempt, and the same for TensorBoard and Weights & Biases. It knows
no metric by name.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import StartupError

logger = logging.getLogger(__name__)

STEP = "trainer/step"
"""The axis of the curves in Weights & Biases, whose own steps cannot go back after a restart."""
_UPLOAD_S = 60.0
"""How long the end of a run waits for what is not uploaded yet; `wandb sync` sends the rest."""
_ONLY_NUMBERS: dict[str, Any] = {
    "console": "off",
    "finish_timeout": _UPLOAD_S,
    "quiet": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}
"""Sends neither what the program prints, nor code, packages or facts of the machine."""


class MetricsLog:
    """Appends to FOLDER/metrics.jsonl and, if asked to, to FOLDER/tensorboard and to a project of
    Weights & Biases. Raises StartupError if that one cannot be used.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, wandb: str | None = None):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._curves: list[_Curves] = []
        if tensorboard:
            self._curves.append(_TensorBoard(folder))
        if wandb is not None:
            self._curves.append(_WeightsAndBiases(folder, wandb))

    def write(self, values: dict[str, Any], step: int | None) -> None:
        """One record; a number that is not finite becomes null, as JSON has no name for it.

        `step` is its place on the curves; None leaves it out of them.
        """
        record = {name: _jsonable(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if step is None:
            return
        numbers = {name: one for name, one in values.items() if isinstance(one, (int, float))}
        for curves in self._curves:
            curves.add(numbers, step)

    def close(self) -> None:
        """Flush and close all."""
        self._file.close()
        for curves in self._curves:
            curves.close()


class _Curves(Protocol):
    def add(self, numbers: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        # Imported here: it takes a second, and not every run wants it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run of theirs for one run folder, however often its trainer starts."""

    def __init__(self, folder: Path, project: str) -> None:
        check_wandb()
        import wandb

        path = folder.resolve()
        self._is_broken = False
        try:
            self._run = wandb.init(
                project=project,
                name=path.name,
                id=_own_id(path / "wandb" / "id"),
                resume="allow",
                dir=str(path),
                settings=wandb.Settings(**_ONLY_NUMBERS),
            )
        except Exception as error:  # theirs have no common class
            message = " ".join(str(error).split())
            raise StartupError(
                f"trainer.wandb: {message}; set WANDB_API_KEY, or WANDB_MODE=offline to upload "
                "later, or remove trainer.wandb"
            ) from None
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        self._do("take a step's numbers", lambda: self._run.log({**numbers, STEP: step}))

    def close(self) -> None:
        self._do("end", self._run.finish)

    def _do(self, what: str, call: Callable[[], object]) -> None:
        """Training goes on without curves, and the JSON lines have the same numbers."""
        if self._is_broken:
            return
        try:
            call()
        except Exception as error:  # of a process of theirs that was killed, for example
            self._is_broken = True
            logger.error("Weights & Biases did not %s and gets no more: %s", what, error)


def _own_id(path: Path) -> str:
    """The run's id in Weights & Biases: made once, and kept in its folder."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        partial.replace(path)
    return path.read_text(encoding="utf-8").strip()


def check_wandb() -> None:
    """Raise StartupError without their package, which is not installed with this one."""
    if importlib.util.find_spec("wandb") is None:
        raise StartupError(
            "trainer.wandb: the package wandb is not installed; pip install 'wandb>=0.31,<1', or "
            "remove trainer.wandb"
        )


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

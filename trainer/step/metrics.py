"""One line of JSON per update attempt, and the same for TensorBoard. It knows no metric by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends to FOLDER/metrics.jsonl and, if asked to, to FOLDER/tensorboard."""

    def __init__(self, folder: Path, *, tensorboard: bool):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            # Imported here: it takes a second, and not every run wants it.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, values: dict[str, Any], step: int | None) -> None:
        """One record; a number that is not finite becomes null, as JSON has no name for it.

        `step` is its place on the curves; None leaves it out of them.
        """
        record = {name: _jsonable(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer is not None and step is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

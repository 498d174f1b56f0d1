"""The run folder that `tests/data/run_83e0f23.tar.xz` holds, unpacked for a test.

The program of commit 83e0f23 wrote it: `opd serve` with a random Qwen3 model of one layer (the
tokenizer is the tool lab's), two steps of two turns each, a judge that answered by rule, and
conversations left in every state that a stopped run can hold. It must open under every later
program, so it is never made again. Left out are logs, the report and TensorBoard's files; the first
step's weights are pruned, as a run prunes them. The model lies beside it as a hub cache holds it,
so that no path of a machine is in the checkpoints' manifests.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "data" / "run_83e0f23.tar.xz"
MODEL = "tests/tiny-qwen3"
SCHEMA = "0010"
"""The database's revision at that commit."""
TURNS = {
    "awaiting_next_state": 5,
    "ready": 1,
    "trained": 4,
    "empty_response": 3,
    "no_hint": 2,
    "sensitive": 2,
    "side_turn": 1,
}
"""Number of turns by state, dropped ones by their reason."""
VERSION = 2
"""The policy version that it served last."""


@dataclass(frozen=True, slots=True)
class OldRun:
    """Where the run lies now, and what its commands need."""

    folder: Path
    config: Path
    database: Path
    environment: dict[str, str]
    """For the commands: the model comes from the unpacked cache, and nothing is asked of a hub."""


def unpack(into: Path) -> OldRun:
    """The run in `into`, with its configuration's paths set to where it lies."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(into, filter="data")
    folder = into / "run"
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("@RUN@", str(folder)))
    return OldRun(
        folder=folder,
        config=config,
        database=folder / "records.db",
        environment={"HF_HUB_CACHE": str(into / "hub"), "HF_HUB_OFFLINE": "1"},
    )

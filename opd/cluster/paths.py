"""Where a launch keeps its files: all in the run folder, which every node must see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Files and folders of one launch of a run."""

    run: Path
    launch: Path
    """The files given to this launch: each start of a run has its own folder."""

    @property
    def config(self) -> Path:
        """The resolved configuration, read by every process."""
        return self.run / "config.toml"

    @property
    def engines(self) -> Path:
        """Addresses of the engines' routers, written inside the job once they run."""
        return self.run / "engines.json"

    @property
    def ray_token(self) -> Path:
        """Secret of this run's Ray cluster; whoever has it can run anything on its nodes."""
        return self.run / "ray_token"

    @property
    def tensorboard(self) -> Path:
        """slime's metrics, and ours next to them."""
        return self.run / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Megatron's checkpoints."""
        return self.run / "checkpoints"

    @property
    def hf(self) -> Path:
        """Checkpoints that `from_pretrained` reads."""
        return self.run / "hf"

    @property
    def withdrawn(self) -> Path:
        """Checkpoints that a rollback has set aside."""
        return self.run / "withdrawn"

    @property
    def sglang_yaml(self) -> Path:
        """slime's --sglang-config."""
        return self.launch / "sglang.yaml"

    @property
    def custom_yaml(self) -> Path:
        """slime's --custom-config-path."""
        return self.launch / "custom.yaml"


def next_launch(run: Path) -> Paths:
    """Paths of the next launch of `run`; nothing is created."""
    number = 1 + max(
        (int(path.name.split("-")[1]) for path in run.glob("launch-[0-9]*")), default=0
    )
    return Paths(run=run, launch=run / f"launch-{number:03d}")

"""The lab's display in the terminal while it learns."""

from __future__ import annotations

from rich.console import Console

from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState
from opd.report.terminal.progress import ProgressBar
from records.names import TurnState


class LearningProgress(ProgressBar):
    """Update attempts so far, with the turns that made them."""

    def __init__(self, console: Console, lab: LabConfig):
        super().__init__(console, "learning", "updates", lab.updates)

    def show(self, state: LearningState) -> None:
        """Show the state of the store."""
        trained = state.turns.get(TurnState.TRAINED, 0)
        # Short enough for a terminal of 80 columns.
        held = ", held" if state.is_held else ""
        self.update(state.attempts, note=f"{state.num_turns} turns, {trained} trained{held}")

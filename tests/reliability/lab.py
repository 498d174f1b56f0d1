"""Where the tool lab's model lies, without importing what the lab runs on."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parents[2] / "examples" / "tool_lab" / "model"

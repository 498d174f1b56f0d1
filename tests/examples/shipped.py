"""Where the shipped model lies."""

from pathlib import Path

MODEL = Path(__file__).parents[2] / "examples" / "tool_lab" / "model"

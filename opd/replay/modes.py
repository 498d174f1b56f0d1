"""What can be done with recorded turns, by name; separate from the settings, so that the command
line need not load them.
"""

from __future__ import annotations

from typing import Literal

ReplayMode = Literal["rescore", "resample", "judge-only"]

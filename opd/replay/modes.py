"""What can become of recorded turns, by name; apart from the settings, so that the command line
knows it without loading them.
"""

from __future__ import annotations

from typing import Literal

ReplayMode = Literal["rescore", "resample", "judge-only"]

"""The judge whose every reply the test chooses."""

from __future__ import annotations

from tests.judge.conftest import judge_config, judge_server, reply

__all__ = ["judge_config", "judge_server", "reply"]

"""Whoever waits for hints sees that somebody works on them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from opd.rehearsal.heartbeat import FILE, Heartbeat, seconds_since


def test_answers_are_seen_from_another_process(tmp_path: Path) -> None:
    assert seconds_since(tmp_path) is None
    beat = Heartbeat(tmp_path)
    beat()
    since = seconds_since(tmp_path)
    assert since is not None
    assert since < 60
    long_ago = time.time() - 1000
    os.utime(tmp_path / FILE, (long_ago, long_ago))
    beat()
    assert (seconds_since(tmp_path) or 0) > 900, "not touched at each of many answers"
    Heartbeat(tmp_path)()
    assert (seconds_since(tmp_path) or 0) < 60

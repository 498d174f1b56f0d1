"""How far back to read earlier answers for a batch. A value that a configuration gives; how they
are read is in prompts.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryWindow:
    """What to read in addition to a batch: answers sampled at most `versions` versions before the
    newest of the batch and, with `first`, the first answers to each prompt, however old. With
    `sessions`, also outcomes of earlier sessions that began with the same prompt. With `values`,
    what turns were worth, of the batch's and of these sessions. With `outcomes`, only answers whose
    sessions have an outcome, because rewards are then made from it.
    """

    versions: int
    first: bool = False
    sessions: bool = False
    outcomes: bool = False
    values: bool = False

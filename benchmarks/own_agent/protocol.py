"""The settings of cells, and what identifies a cell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.own_agent.scripted import JudgeKind
from benchmarks.own_agent.turned import TURNED
from benchmarks.own_agent.wishes import WISHES, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The settings of cells; cells of different protocols are never combined.

    quiet_sessions: people who silently leave, before anybody objects. sessions: most sessions in
    which people object, in each round. n: requests for each rate. pace: least seconds from the
    start of one session to the next. wait_s: longest wait for the hints; steady_s: the wait ends
    earlier if nothing has changed for this long. every: sessions between two measurements of the
    wishes, if people never tire. asks_first: the agent asks before it calls. settings: passed to
    `opd serve`. model, words: checksums of the start weights and of the sentences. remembers: the
    policy is not trained; the agent keeps the hints in its system prompt.

    judge, believes: see `scripted.py`. rounds: how often people object, each time with a wait; from
    the middle round on, wishes of the kinds `change_of_mind` are reversed. poisoned: there are two
    tenants, and the second has wishes of `others`; see `poisoned.py`.
    """

    quiet_sessions: int
    sessions: int
    n: int
    pace: float
    wait_s: float
    steady_s: float
    every: int
    model: str
    words: str
    asks_first: bool = False
    settings: tuple[str, ...] = ()
    remembers: bool = False
    judge: JudgeKind = "own"
    believes: bool = False
    rounds: int = 1
    change_of_mind: tuple[str, ...] = ()
    poisoned: bool = False
    others: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Distinguishes protocols in file names. Fields in LATER count only if they differ from
        their defaults, so that older files keep their names.
        """
        values = asdict(self)
        for field in fields(self):
            if field.name in LATER and values[field.name] == field.default:
                del values[field.name]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


LATER: dict[str, Any] = {
    "judge": "own",
    "believes": False,
    "rounds": 1,
    "change_of_mind": (),
    "poisoned": False,
    "others": (),
}
"""Fields that older result files lack, with the values that apply to these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """People with silent wishes of `kinds` who object `objections` times to each; None: whenever
    there is something to object to, until the wishes hold.
    """

    kinds: tuple[str, ...]
    seed: int
    objections: int | None

    def name(self, protocol: Protocol) -> str:
        """The name of its file and of its run folder."""
        said = "until" if self.objections is None else f"objections{self.objections}"
        return f"{'+'.join(self.kinds)}-seed{self.seed}-{said}-{protocol.digest}"


def wishes_in(kinds: Sequence[str], protocol: Protocol, number: int) -> list[Wish]:
    """People's wishes in this round (counted from 0)."""
    has_turned = number >= protocol.rounds // 2
    changed = protocol.change_of_mind if has_turned else ()
    return [TURNED[kind] if kind in changed else WISHES[kind] for kind in kinds]

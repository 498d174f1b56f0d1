"""How cells are made, and which one a cell is."""

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
    """How cells are made; cells of different protocols are never put together.

    quiet_sessions: people who leave without a word, before anybody objects. sessions: at most so
    many in which people object, in each round. n: requests for each rate. pace: least seconds from
    the start of one session to the next. wait_s: longest wait for the hints; steady_s: it ends
    earlier when nothing has changed for so long. every: sessions between two looks at the wishes,
    where people never tire. asks_first: the agent asks before it calls. settings: handed to `opd
    serve`. model, words: which start weights and which sentences, by checksums. remembers: the
    policy is not trained; the agent keeps the hints in its system prompt.

    judge, believes: see `scripted.py`. rounds: people object, and are waited for, so often; from
    the middle round on wishes of the kinds `change_of_mind` are turned. poisoned: there are two
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
        """Tells protocols apart in file names. What came later counts where it is not usual: files
        from before keep their names.
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
"""Fields that older files of results lack, with what holds for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """People with silent wishes of `kinds` who object `objections` times to each; None: as long as
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
    """What people wish in this round, from 0."""
    has_turned = number >= protocol.rounds // 2
    changed = protocol.change_of_mind if has_turned else ()
    return [TURNED[kind] if kind in changed else WISHES[kind] for kind in kinds]

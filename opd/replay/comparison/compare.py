"""`opd replay compare A B`: what two settings made of the same turns.

A and B are the folders of runs that replayed, or served, the same recorded turns with different
judges, numbers of votes, hint rules, teachers or objectives. Their stores are only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd.replay.comparison.figures import difference, figures, largest, match
from opd.replay.comparison.runs import read_run, run_config_of
from opd.replay.comparison.values import Comparison, ReplayedTurn
from opd.replay.comparison.words import Line
from opd.run.config import RunConfig
from trainer.errors import StartupError

_SHOWN_DIFFERENCES = 50
_NOT_A_SETTING = (
    *("store.", "proxy.host", "proxy.port", "policy.", "frozen.url", "frozen.api_key"),
    *("frozen.admin_api_key", "frozen.embedded.api_key_file", "judge.api_key"),
    "scoring.teacher_api_keys",
)
"""Where a run is, and secrets: not settings to compare."""
_PORT, _JUDGE = "frozen.embedded.port", "judge.base_url"


def compare(folder_a: Path, folder_b: Path, out: Path) -> Comparison:
    """Compare two runs, and draw the comparison into the HTML file `out`.

    Raises StartupError if a folder is not a run's, or if the runs have no turn in common.
    """
    config_a, config_b = run_config_of(folder_a), run_config_of(folder_b)
    turns_a, turns_b = asyncio.run(_both(config_a, config_b))
    name_a, name_b = folder_a.resolve().name, folder_b.resolve().name
    if name_a == name_b:
        name_a, name_b = f"A: {name_a}", f"B: {name_b}"
    compared = of_turns(name_a, name_b, turns_a, turns_b)
    if not compared.matched.pairs:
        raise StartupError(
            f"{folder_a} and {folder_b} have no turn in common ({compared.matched.only_a} and "
            f"{compared.matched.only_b} main turns): compare runs that replayed the same recording"
        )
    compared = replace(compared, settings=tuple(differing_settings(config_a, config_b)), report=out)
    from opd.replay.comparison.report import draw

    draw(compared, out)
    return compared


async def _both(a: RunConfig, b: RunConfig) -> tuple[list[ReplayedTurn], list[ReplayedTurn]]:
    return await read_run(a), await read_run(b)


def of_turns(
    name_a: str, name_b: str, turns_a: list[ReplayedTurn], turns_b: list[ReplayedTurn]
) -> Comparison:
    """The comparison of the turns that both have."""
    matched = match(turns_a, turns_b)
    pairs = matched.pairs
    decided = [(a, b) for a, b in pairs if a.accepted is not None and b.accepted is not None]
    hints = [(a.hint, b.hint) for a, b in pairs if a.hint is not None and b.hint is not None]
    return Comparison(
        name_a=name_a,
        name_b=name_b,
        settings=(),
        matched=matched,
        a=figures([a for a, _ in pairs]),
        b=figures([b for _, b in pairs]),
        num_both_decided=len(decided),
        num_decisions_differ=sum(a.accepted != b.accepted for a, b in decided),
        accepted_by_a_alone=sum(a.accepted is True and b.accepted is False for a, b in decided),
        accepted_by_b_alone=sum(b.accepted is True and a.accepted is False for a, b in decided),
        num_hints_differ=sum(a.text != b.text for a, b in hints),
        differences=largest((difference(a, b) for a, b in pairs), _SHOWN_DIFFERENCES),
    )


def differing_settings(a: RunConfig, b: RunConfig) -> list[Line]:
    """(key, value of A, value of B) where the configurations differ, secrets left out."""
    flat_a, flat_b = map(_settings, (a, b))
    return [
        (key, _word(flat_a.get(key)), _word(flat_b.get(key)))
        for key in sorted({*flat_a, *flat_b})
        if flat_a.get(key) != flat_b.get(key) and not key.startswith(_NOT_A_SETTING)
    ]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Without the port that a run's own engine happened to get, also if the engine is the judge."""
    flat = dict(_flat(config.model_dump(mode="json")))
    port = flat.pop(_PORT, None)
    if port is not None and f":{port}/" in str(flat.get(_JUDGE)):
        flat[_JUDGE] = "the run's frozen engine"
    return flat


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _word(value: Any) -> str:
    return "-" if value is None else str(value)

"""Checks every flag of a plan against the installed slime, Megatron-LM and SGLang.

slime reads its command line with parsers that skip unknown flags: with a typing error, it would
train without the intended setting. So a launch asks the parsers first (`parsers.py`, in slime's
Python) and refuses an unknown flag, naming the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.cluster.config import ClusterConfig
from trainer.errors import StartupError

KNOWN_VERSIONS = {
    "slime": ("0.3.1",),
    "megatron": ("0.16.0rc0",),
    "sglang": ("0.5.15", "0.5.15.post1"),
}
"""The versions that this launch was tried with; docs/cluster.md names the commits."""
REPOSITORY = Path(__file__).parents[2]


class FlagError(StartupError):
    """A flag that is unknown or wrong, or parsers that cannot be queried; one line per problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagReport:
    """What the check found."""

    checked: bool
    text: str
    """One line for the user: what was checked against what, or why nothing was."""
    warnings: tuple[str, ...] = ()


def check_flags(
    cluster: ClusterConfig,
    argv: list[str],
    server_args: list[str],
    hooks: list[str],
    files: dict[str, str] | None,
    environment: dict[str, str],
) -> FlagReport:
    """Query the parsers on this machine. `checked` is False if there is no slime to query.

    `files` (path -> text) are files that the flags name and that are not written yet; with None,
    slime's whole parse_args, which compares flags with the model's folder, is not tried.
    `environment` is the job's: Megatron expects some of its settings there.

    Raises FlagError for unknown flags, wrong values, hooks that do not import, unknown versions
    (unless the configuration says to warn), and a broken installation.
    """
    python = shutil.which(cluster.python)
    missing = [
        name
        for name, there in {
            f"cluster.slime_root {cluster.slime_root}": is_slime(Path(cluster.slime_root)),
            f"cluster.megatron_root {cluster.megatron_root}": is_megatron(
                Path(cluster.megatron_root)
            ),
            f"cluster.python {cluster.python}": python is not None,
        }.items()
        if not there
    ]
    if missing or python is None:
        return FlagReport(
            checked=False, text=f"flags NOT checked: not on this machine: {', '.join(missing)}"
        )
    found = _ask(python, {"argv": argv, "hooks": hooks, "files": files}, environment)
    problems, warnings = judge(found, argv, server_args, cluster.unknown_versions)
    if problems:
        raise FlagError("\n".join(problems))
    versions = found["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("slime", "megatron", "sglang"))
    return FlagReport(
        checked=True,
        text=f"flags checked against {shown}; slime's whole parse_args {found['full']}",
        warnings=tuple(warnings),
    )


def is_slime(root: Path) -> bool:
    """Whether a folder is slime's source tree."""
    return (root / "train_async.py").is_file()


def is_megatron(root: Path) -> bool:
    """Whether a folder is Megatron-LM's source tree (the package megatron-core lacks this part)."""
    return (root / "megatron" / "training").is_dir()


def judge(
    found: dict[str, Any], argv: list[str], server_args: list[str], unknown_versions: str
) -> tuple[list[str], list[str]]:
    """(problems, warnings) from the parsers' answer."""
    problems = list(found["errors"])
    warnings: list[str] = []
    if not found["known"]:
        return [f"slime's parsers cannot be asked: {line}" for line in problems], warnings
    known = {*found["known"]["slime"], *found["known"]["sglang"]}
    for flag in flags_of(argv):
        if flag not in known:
            problems.append(_unknown("flag", flag, known, "slime would ignore it silently"))
    for field in server_args:
        if field not in found["server_args"]:
            why = "slime would leave it out"
            problems.append(_unknown("server_args key", field, set(found["server_args"]), why))
    for name, tried in KNOWN_VERSIONS.items():
        version = found["versions"].get(name)
        if version in tried:
            continue
        line = f"{name} {version} is not a version that this launch was tried with ({tried[0]})"
        if unknown_versions == "refuse":
            problems.append(f'{line}; to try it anyway, set cluster.unknown_versions = "warn"')
        else:
            warnings.append(line)
    return problems, warnings


def flags_of(argv: list[str]) -> list[str]:
    """The flags among the words of a command line, each once, without `=value`."""
    return list(dict.fromkeys(word.split("=")[0] for word in argv if word.startswith("--")))


def _unknown(what: str, name: str, known: set[str], why: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "no known one resembles it"
    return f"unknown {what} {name}: {hint} ({why})"


def _ask(python: str, question: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-m", "opd.cluster.parsers"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise FlagError(f"slime's parsers cannot be asked with {python}: {last}") from None

"""`python tests/mutations.py [NAME...]` breaks the losses on purpose; a test must notice each time.

The mistakes are listed in tests/data/mutations.txt: per objective a flipped sign, a swapped clip
side, a missing detach and a wrong temperature; where they matter also masks and denominators. Each
is made in a copy of the tree, one at a time, and only the tests named with it are run. NAME is a
mistake, an objective, a surrogate or a kind; none means all, about seven minutes on one core.

Exits 1 if a mistake survives, if it breaks more than it means to, if its old text does not occur
exactly once in its file, or if the tests fail without any mistake; 2 for a name that there is not.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "mutations.txt"
COPIED = (
    *("api_proxy", "judge", "opd", "records", "rollout_bridge", "tests", "trainer"),
    "pyproject.toml",
)
KINDS = ("sign", "clip_side", "detach", "temperature", "mask", "denominator")
TIMEOUT_S = 300.0
# What a careless mistake raises by itself, whatever the tests look at.
ACCIDENTS = ("AttributeError", "ImportError", "NameError", "SyntaxError", "TypeError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """`old` occurs once in `file` and gives way to `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mistake; `tests` are pytest's arguments."""

    name: str
    kind: str
    subjects: tuple[str, ...]
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def test_files(self) -> list[str]:
        """Those of `tests`."""
        return [part for part in self.tests if part.endswith(".py")]

    def is_meant(self, names: Sequence[str]) -> bool:
        """Whether the command line asks for it."""
        return not names or not {self.name, self.kind, *self.subjects}.isdisjoint(names)


def read_table(text: str) -> list[Mutation]:
    """The mistakes, in the format that the head of mutations.txt describes; ValueError else."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    starts = [index for index, line in enumerate(lines) if not line.startswith(" ")]
    ends = [*starts[1:], len(lines)]
    return [_read(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


def _read(block: list[str]) -> Mutation:
    name, _, rest = block[0].partition(": ")
    kind, *subjects = rest.split()
    tests = [
        f"tests/trainer/{part}" if part.endswith(".py") else part for part in shlex.split(block[1])
    ]
    places, replacements = block[2::2], block[3::2]
    edits = []
    for place, replacement in zip(places, replacements, strict=True):
        file, bar, old = place.strip().partition(" | ")
        mark, arrow, new = replacement.strip().partition("==>")
        if not bar or not arrow or mark:
            raise ValueError(f"{name}: an edit is 'file | old' and '==> new', got {place!r}")
        old, new = (text.strip().replace("\\n", "\n") for text in (old, new))
        edits.append(Edit(file=f"trainer/{file}", old=old, new=new.replace("...", old, 1)))
    return Mutation(
        name=name, kind=kind, subjects=tuple(subjects), tests=tuple(tests), edits=tuple(edits)
    )


def problems(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with the table, one line each; nothing runs."""
    found = []
    names = [mutation.name for mutation in mutations]
    found += [
        f"{name}: the name occurs twice" for name in sorted(set(names)) if names.count(name) > 1
    ]
    for mutation in mutations:
        if mutation.kind not in KINDS:
            found.append(f"{mutation.name}: unknown kind {mutation.kind!r}")
        for edit in mutation.edits:
            path = root / edit.file
            count = path.read_text().count(edit.old) if path.is_file() else 0
            if count != 1:
                found.append(f"{mutation.name}: {count} times in {edit.file}: {edit.old!r}")
            if edit.old == edit.new:
                found.append(f"{mutation.name}: changes nothing in {edit.file}: {edit.old!r}")
        found += [
            f"{mutation.name}: no tests at {file}"
            for file in mutation.test_files
            if not (root / file).is_file()
        ]
    return found


def copy_tree(folder: Path) -> None:
    """The packages and the tests, without what running them left behind."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


@contextmanager
def mutated(folder: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with the mistake in it, and as it was afterwards."""
    originals = {edit.file: (folder / edit.file).read_text() for edit in mutation.edits}
    try:
        for edit in mutation.edits:
            path = folder / edit.file
            path.write_text(path.read_text().replace(edit.old, edit.new, 1))
        yield
    finally:
        for file, text in originals.items():
            (folder / file).write_text(text)


def run(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """(exit status, output) of pytest in the copy, on one core, up to the first failure; a run that
    hangs has status 124.
    """
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        # A stale .pyc of the same second and size would hide the mistake.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", *plugins, *arguments]
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {TIMEOUT_S:.0f} s"
    return result.returncode, result.stdout


def verdict(returncode: int, output: str) -> tuple[bool, str]:
    """Whether the mistake was caught as meant, and by which test or why not."""
    if returncode == 0:
        return False, "SURVIVED"
    failed = re.search(r"^FAILED (\S+?::.+?)(?: - (.*))?$", output, flags=re.MULTILINE)
    if returncode != 1 or failed is None:
        return False, f"BROKEN (pytest exits {returncode}): {output.strip()[-300:]}"
    test, reason = failed.group(1), failed.group(2) or ""
    if reason.startswith(ACCIDENTS):
        return False, f"BROKEN: {test}: {reason}"
    return True, f"caught by {test.removeprefix('tests/')}"


def main() -> int:
    """Run the mutations that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mistake, objective or kind")
    names: list[str] = parser.parse_args().names
    table = read_table(TABLE.read_text())
    chosen = [mutation for mutation in table if mutation.is_meant(names)]
    unknown = [name for name in names if not any(one.is_meant([name]) for one in table)]
    if unknown:
        print(f"no mistake, objective or kind: {', '.join(unknown)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutations-") as place:
        folder = Path(place)
        copy_tree(folder)
        if found := problems(folder, chosen):
            print("\n".join(found))
            return 1
        files = sorted({file for mutation in chosen for file in mutation.test_files})
        returncode, output = run(folder, files)
        if returncode != 0:
            print(f"the tests fail without any mistake:\n{output[-2000:]}")
            return 1
        return run_all(folder, chosen)


def run_all(folder: Path, mutations: Sequence[Mutation]) -> int:
    """One line per mutation; 1 if one was not caught."""
    started, missed = time.monotonic(), []
    for done, mutation in enumerate(mutations, start=1):
        with mutated(folder, mutation):
            caught, text = verdict(*run(folder, mutation.tests))
        if not caught:
            missed.append(mutation.name)
        left = (time.monotonic() - started) / done * (len(mutations) - done)
        place = f"[{done}/{len(mutations)}, {left / 60:.1f} min left]"
        print(f"{place} {mutation.name} ({mutation.kind}): {text}", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{len(mutations) - len(missed)} of {len(mutations)} caught in {minutes:.1f} min")
    if missed:
        print(f"not caught: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

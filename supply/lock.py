"""The lock (`constraints.txt`, `constraints-torch.txt`) and whether an environment matches it.

    python -m supply.lock

exits with status 1 and a line per problem: a pin without a hash, an installed package that is not
pinned or has another version, a pin that applies here but is not installed. What a build of torch
needs for its GPU is torch's choice and not pinned. It uses no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HASHED, BY_VERSION = ROOT / "constraints.txt", ROOT / "constraints-torch.txt"
INSTALLERS = frozenset({"pip", "hindsight-opd"})
"""In the environment but not from the lock: the installer, and the project itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One release that the lock names."""

    name: str
    version: str
    applies: bool
    """Whether its marker holds for the running Python."""
    num_hashes: int


def read_pins(text: str) -> list[Pin]:
    """The pins of a requirements file. Raises ValueError for a line that pins no version."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        stated = line.partition("#")[0].strip()
        if not stated:
            continue
        requirement_text, *hashes = stated.split("--hash=")
        requirement = Requirement(requirement_text.strip())
        [specifier] = list(requirement.specifier) or [None]
        if specifier is None or specifier.operator != "==" or "*" in specifier.version:
            raise ValueError(f"{stated.split(' ')[0]}: the lock names one version with ==")
        pin = Pin(
            name=canonicalize_name(requirement.name),
            version=specifier.version,
            applies=requirement.marker is None or requirement.marker.evaluate(),
            num_hashes=len(hashes),
        )
        pins.append(pin)
    return pins


def all_pins() -> list[Pin]:
    """Every pin, torch last."""
    return read_pins(HASHED.read_text()) + read_pins(BY_VERSION.read_text())


def problems(
    hashed: Iterable[Pin],
    by_version: Iterable[Pin],
    installed: Mapping[str, str],
    brought: Iterable[str] = (),
) -> list[str]:
    """What differs between lock and environment; `brought` came with packages that are pinned by
    version.
    """
    hashed, by_version = list(hashed), list(by_version)
    pinned = {pin.name: pin for pin in [*hashed, *by_version]}
    found = [f"{pin.name}: pinned without a hash" for pin in hashed if not pin.num_hashes]
    for name, version in sorted(installed.items()):
        if name in INSTALLERS or name in brought:
            continue
        pin = pinned.get(name)
        # A build's name follows the plus: 2.13.0+cpu.
        if pin is None:
            found.append(f"{name} {version}: installed, but not in the lock")
        elif pin.version != version.partition("+")[0]:
            found.append(f"{name}: {version} is installed, the lock says {pin.version}")
    missing = sorted(pin.name for pin in pinned.values() if pin.applies)
    found += [
        f"{name}: in the lock, but not installed" for name in missing if name not in installed
    ]
    return found


def installed_here() -> dict[str, str]:
    """Name and version of every distribution of this environment."""
    return {
        canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()
    }


def brought_by(names: Iterable[str], pinned: Iterable[str]) -> set[str]:
    """The unpinned packages that these distributions need, directly or not: GPU libraries."""
    known, found, left = set(pinned), set(), list(names)
    while left:
        try:
            needs = metadata.requires(left.pop()) or []
        except metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            name = canonicalize_name(need.name)
            if name not in known and name not in found:
                found.add(name)
                left.append(name)
    return found


def main() -> int:
    """Print what is wrong; the exit status."""
    hashed, by_version = read_pins(HASHED.read_text()), read_pins(BY_VERSION.read_text())
    names = [pin.name for pin in by_version]
    brought = brought_by(names, [pin.name for pin in [*hashed, *by_version]])
    found = problems(hashed, by_version, installed_here(), brought)
    for line in found:
        print(f"lock: {line}", file=sys.stderr)
    if not found:
        num = sum(pin.applies for pin in [*hashed, *by_version])
        print(f"lock: the environment matches it: {num} packages, all but torch by hash")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

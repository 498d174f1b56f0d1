"""Known vulnerabilities of everything that the lock pins, torch too, and what was not audited.

    python -m supply.audit PATH_OF_PIP_AUDIT

asks each service that pip-audit knows (OSV, then the package index's own list) about the packages
that no earlier one has answered for. Exit status 0: every package was audited, or some were and the
rest are named. 1: a vulnerability is known. 3: no package at all was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from supply.lock import Pin, all_pins

SERVICES = ("osv", "pypi")
CLEAN, VULNERABLE, NOTHING_AUDITED = 0, 1, 3
_TIMEOUT_S = 300


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the services said about the pinned packages."""

    audited: dict[str, str] = field(default_factory=dict)
    """Package -> the service that answered for it."""
    vulnerabilities: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    """Package -> why no service answered for it."""

    def take(self, service: str, reply: dict[str, Any], asked: Iterable[str]) -> None:
        """Add one service's reply, in pip-audit's JSON."""
        silent = set(asked)
        for one in reply["dependencies"]:
            name = canonicalize_name(one["name"])
            silent.discard(name)
            if "skip_reason" in one:
                # The reason ends with the package that it is about.
                self.refuse(service, name, one["skip_reason"].partition(f": {one['name']}")[0])
                continue
            self.audited[name] = service
            self.refusals.pop(name, None)
            for known in one["vulns"]:
                fixed = ", ".join(known["fix_versions"]) or "no release yet"
                line = f"{name} {one['version']}: {known['id']}, fixed in {fixed}"
                self.vulnerabilities.append(line)
        for name in silent:
            self.refuse(service, name, "did not mention it")

    def refuse(self, service: str, name: str, reason: str) -> None:
        """Note that a service did not answer for a package."""
        before = f"{self.refusals[name]}; " if name in self.refusals else ""
        self.refusals[name] = f"{before}{service}: {reason}"


Ask = Callable[[str, list[Pin]], dict[str, Any] | str]
"""Asks a service; its reply, or one line that says why there is none."""


def audit(pins: Iterable[Pin], ask: Ask) -> Findings:
    """Ask each service about the packages that earlier ones did not answer for."""
    pins = list(pins)
    findings = Findings()
    for service in SERVICES:
        left = [pin for pin in pins if pin.name not in findings.audited]
        if not left:
            break
        reply = ask(service, left)
        if isinstance(reply, str):
            for pin in left:
                findings.refuse(service, pin.name, reply)
        else:
            findings.take(service, reply, [pin.name for pin in left])
    return findings


def report(findings: Findings, num_pins: int) -> tuple[list[str], int]:
    """The lines to print, and the exit status."""
    lines = [f"VULNERABLE {line}" for line in findings.vulnerabilities]
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(findings.refusals.items()):
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        lines.append(f"NOT AUDITED: {len(names)} of {num_pins} packages ({reason})")
        lines.append("  " + ", ".join(names))
    for service in SERVICES:
        count = sum(used == service for used in findings.audited.values())
        if count:
            lines.append(f"audited with {service}: {count} of {num_pins} packages")
    if findings.vulnerabilities:
        return lines, VULNERABLE
    return lines, CLEAN if findings.audited else NOTHING_AUDITED


def with_pip_audit(program: str) -> Ask:
    """Asks through pip-audit, which looks up only what it is given."""

    def ask(service: str, pins: list[Pin]) -> dict[str, Any] | str:
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder) / "pins.txt"
            wanted.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins))
            options = ["--vulnerability-service", service, "--requirement", str(wanted)]
            options += ["--no-deps", "--disable-pip", "--format", "json"]
            try:
                done = subprocess.run(
                    [program, *options, "--progress-spinner", "off"],
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"did not answer within {_TIMEOUT_S} s"
        try:
            # It also ends with status 1 when it found something.
            return json.loads(done.stdout)
        except ValueError:
            return (
                "does not answer: " + (done.stderr.strip().splitlines() or ["no output"])[-1][:99]
            )

    return ask


def main() -> int:
    """Print what was found; the exit status."""
    pins = all_pins()
    lines, status = report(audit(pins, with_pip_audit(sys.argv[1])), len(pins))
    print("\n".join(f"audit: {line}" for line in lines))
    return status


if __name__ == "__main__":
    sys.exit(main())

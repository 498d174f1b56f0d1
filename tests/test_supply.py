"""The lock is complete and hashed; the audit says what was not audited."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from supply.audit import CLEAN, NOTHING_AUDITED, VULNERABLE, audit, report, with_pip_audit
from supply.lock import BY_VERSION, HASHED, Pin, all_pins, problems, read_pins
from supply.sbom import differences

ROOT = Path(__file__).parents[1]


def a_pin(name: str, **values: Any) -> Pin:
    return Pin(**({"name": name, "version": "1.0", "applies": True, "num_hashes": 2} | values))


def test_every_pin_has_a_hash_but_torch_alone() -> None:
    assert [pin.name for pin in read_pins(HASHED.read_text()) if not pin.num_hashes] == []
    assert [pin.name for pin in read_pins(BY_VERSION.read_text())] == ["torch"]


def test_the_lock_names_no_address() -> None:
    assert "://" not in HASHED.read_text() + BY_VERSION.read_text()
    assert "--index-url" not in HASHED.read_text()


def test_the_lock_meets_every_range_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
    wanted += project["project"]["optional-dependencies"]["dev"]
    pins = {pin.name: pin.version for pin in all_pins()}
    for need in map(Requirement, wanted):
        version = pins.get(canonicalize_name(need.name))
        assert version is not None, f"{need.name}: run ./run.sh lock"
        assert need.specifier.contains(version), f"{need}: locked at {version}"


def test_a_pin_is_read_with_its_marker_and_hashes() -> None:
    text = "# made by\nA.b==1.2 ; sys_platform == 'win32' \\\n    --hash=sha256:0 \\\n"
    text += "    --hash=sha256:1\n"
    [pin] = read_pins(text)
    assert pin == Pin(name="a-b", version="1.2", applies=sys.platform == "win32", num_hashes=2)


@pytest.mark.parametrize("line", ["a>=1", "a", "a==1.*"])
def test_a_line_that_pins_no_version_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="one version"):
        read_pins(line)


def test_what_the_lock_does_not_cover_is_named() -> None:
    pins = [a_pin("a"), a_pin("b", num_hashes=0), a_pin("gone"), a_pin("mac", applies=False)]
    torch = [a_pin("torch")]
    installed = {"a": "1.1", "b": "1.0", "c": "2", "torch": "1.0+cpu", "pip": "25", "cuda": "1"}
    assert problems(pins, torch, installed, brought={"cuda"}) == [
        "b: pinned without a hash",
        "a: 1.1 is installed, the lock says 1.0",
        "c 2: installed, but not in the lock",
        "gone: in the lock, but not installed",
    ]


def found(name: str, *vulnerabilities: str) -> dict[str, Any]:
    known = [{"id": one, "fix_versions": ["1.1"]} for one in vulnerabilities]
    return {"name": name, "version": "1.0", "vulns": known}


def test_an_audit_of_nothing_fails_and_names_all() -> None:
    findings = audit([a_pin("a"), a_pin("torch")], lambda service, pins: "does not answer")
    lines, status = report(findings, 2)
    assert status == NOTHING_AUDITED
    assert lines == [
        "NOT AUDITED: 2 of 2 packages (osv: does not answer; pypi: does not answer)",
        "  a, torch",
    ]


def test_packages_that_every_service_passes_over_are_not_audited() -> None:
    """pip-audit itself ends with status 0 then."""

    def ask(service: str, pins: list[Pin]) -> dict[str, Any]:
        return {
            "dependencies": [
                {"name": pin.name, "skip_reason": f"not found: {pin.name}"} for pin in pins
            ]
        }

    lines, status = report(audit([a_pin("a"), a_pin("b")], ask), 2)
    assert status == NOTHING_AUDITED
    assert lines[0] == "NOT AUDITED: 2 of 2 packages (osv: not found; pypi: not found)"


def test_the_second_service_is_asked_only_about_what_the_first_did_not_know() -> None:
    asked = []

    def ask(service: str, pins: list[Pin]) -> dict[str, Any]:
        asked.append((service, [pin.name for pin in pins]))
        if service == "osv":
            return {"dependencies": [found("a"), {"name": "b", "skip_reason": "unknown"}]}
        return {"dependencies": [found("b", "CVE-1")]}

    lines, status = report(audit([a_pin("a"), a_pin("b"), a_pin("c")], ask), 3)
    assert asked == [("osv", ["a", "b", "c"]), ("pypi", ["b", "c"])]
    assert status == VULNERABLE
    assert lines[0] == "VULNERABLE b 1.0: CVE-1, fixed in 1.1"
    assert (
        "NOT AUDITED: 1 of 3 packages (osv: did not mention it; pypi: did not mention it)" in lines
    )


def test_an_audit_of_all_without_a_finding_is_clean() -> None:
    lines, status = report(audit([a_pin("a")], lambda *_: {"dependencies": [found("a")]}), 1)
    assert (lines, status) == (["audited with osv: 1 of 1 packages"], CLEAN)


def test_a_program_that_prints_no_json_audited_nothing() -> None:
    reply = with_pip_audit("false")("osv", [a_pin("a")])
    assert reply == "does not answer: no output"


def test_a_bill_of_materials_that_differs_from_the_environment_is_refused() -> None:
    document = {
        "bomFormat": "CycloneDX",
        "components": [{"name": "A_b", "version": "1"}, {"name": "old", "version": "2"}],
        "metadata": {"component": {"name": "hindsight-opd", "version": "0.1.0"}},
    }
    installed = {"a-b": "1", "new": "3", "hindsight-opd": "0.1.0"}
    assert differences(document, installed) == [
        "new: 3 is installed, the bill says nothing",
        "old: nothing is installed, the bill says 2",
    ]

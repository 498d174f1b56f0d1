"""The packages are this tree's, import in the right direction, and stay light where they must."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["api_proxy", "examples", "judge", "opd", "records", "rollout_bridge", "trainer"]
LIGHT = ["api_proxy.app", "judge.worker", "records.store", "rollout_bridge.engine.client"]
HEAVY = {"torch", "transformers", "peft", "matplotlib", "tensorboard", "pyarrow", "pandas"}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_comes_from_this_tree(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)


def test_modules_import_without_heavy_libraries() -> None:
    """One process imports them one after the other, and says after which a heavy one was there."""
    names = [*LIGHT, "opd.cli.app", "examples.tool_lab.__main__"]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        f"    print(name, *sorted({HEAVY} & set(sys.modules)))\n"
    )
    assert _python("-c", code).splitlines() == names


def test_the_endpoint_imports_nothing_that_others_print_match_or_migrate_with() -> None:
    """Each of its workers would hold them in memory for as long as it runs."""
    names = ["opd.processes.roles.proxy_role", "api_proxy.app", "api_proxy.server.server"]
    names += ["opd.report.curves", "opd.report.hint_versions", "opd.status.command"]
    unused = HEAVY | {"alembic", "openai", "regex", "rich"}
    code = f"import sys, {', '.join(names)}; print(*sorted({unused} & set(sys.modules)))"
    assert _python("-c", code).split() == []


@pytest.mark.parametrize(
    ("package", "among"),
    [
        ("trainer.objectives", "trainer.objectives.frame"),
        ("trainer.rewards", "trainer.rewards.groups"),
    ],
)
def test_the_functions_need_nothing_else_of_the_project(package: str, among: str) -> None:
    """Every module of the pure functions, imported in one process, brings torch and pydantic."""
    folder = ROOT.joinpath(*package.split("."))
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if path.stem != "__init__"
    ]
    loaded = _python("-c", f"import sys, {', '.join(names)}; print(' '.join(sys.modules))").split()
    own = {name for name in loaded if name.split(".")[0] in PACKAGES} - {"trainer"}
    assert {among, *names} <= own
    allowed = ("trainer.objectives", "trainer.rewards")
    assert {name for name in own if not name.startswith(allowed)} == set()


def test_a_wheel_has_every_package() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(built) == found


def test_help_names_every_command() -> None:
    text = _python("-m", "opd.cli.app", "--help")
    for command in ("serve", "train", "judge", "doctor", "replay", "slime"):
        assert command in text


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_benchmarks_import_each_other_as_modules() -> None:
    names = [f"benchmarks.{path.stem}" for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    assert len(names) > 10
    _python("-c", f"import {', '.join(names)}")

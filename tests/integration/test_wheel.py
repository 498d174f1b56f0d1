"""A wheel of this tree, installed where nothing else of the tree is, serves."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from opd.processes.supervisor import free_ports

ROOT = Path(__file__).parents[2]
PACKAGES = ("api_proxy", "examples", "judge", "opd", "records", "rollout_bridge", "trainer")
SHOW = f"""
import importlib, sys
for name in {PACKAGES}:
    print(importlib.import_module(name).__path__[0])
print(*sys.path, sep="\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; the dependencies are those of the tests' own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    _pip("wheel", *options, "--wheel-dir", str(folder), str(source))
    [wheel] = folder.glob("*.whl")
    shutil.rmtree(source)
    environment = folder / "environment"
    venv.create(environment)
    _pip("--python", str(environment / "bin/python"), "install", *options, str(wheel))
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment)}))
    # Folders that a .pth file names are searched, and their own .pth files are not read: one of
    # those may lead back to this tree.
    (site_packages / "dependencies.pth").write_text("\n".join(_dependency_folders()))
    return environment


def _pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        check=True,
        capture_output=True,
    )


def _dependency_folders() -> set[str]:
    found = set()
    for name in ("torch", "typer", "sqlalchemy", "numpy", "renderers"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found.add(str(Path(spec.origin).parents[1]))
    return found


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def test_nothing_of_the_checkout_is_imported(installed: Path, tmp_path: Path) -> None:
    shown = subprocess.run(
        [installed / "bin/python", "-c", SHOW],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(line) for line in shown.stdout.splitlines() if line]
    assert all(path.is_relative_to(installed) for path in paths[: len(PACKAGES)])
    assert ROOT not in paths


@pytest.mark.long
def test_the_installed_program_serves_its_own_model(installed: Path, tmp_path: Path) -> None:
    """Migrations, the model's files and the report's template are all in the wheel."""
    [model] = installed.glob("lib/python*/site-packages/examples/tool_lab/model")
    run = tmp_path / "run"
    with served(installed, model, run, tmp_path) as url, OpenAI(base_url=url, api_key="any") as one:
        reply = one.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hello."}], max_tokens=16
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens > 0
    assert "<html" in (run / "report.html").read_text()


@contextmanager
def served(installed: Path, model: Path, run: Path, cwd: Path) -> Iterator[str]:
    port = free_ports(1)[0]
    with subprocess.Popen(
        [installed / "bin/opd", "serve", "--model", model, "--run", run, "--port", str(port)],
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = ""
        try:
            for line in process.stdout:
                seen += line
                if "Ctrl-C" in line:
                    break
            else:
                raise AssertionError(f"serve ended: {seen}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0

"""The files in deploy/ start what there is: commands, routes, files, a store that is accepted."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from api_proxy.access.gate import OPEN_PATHS
from opd.cli.app import app
from opd.run.config import build, merge, parse_overrides

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
GIVEN = {"model": "m", "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}}


def command_lines() -> Iterator[list[str]]:
    """The words after `opd` of every start in deploy/ and of every command in the guide."""
    unit = (DEPLOY / "opd.service").read_text()
    [start] = re.findall(r"^ExecStart=\S+/opd (.+)$", unit, re.MULTILINE)
    yield start.split()
    docker = (DEPLOY / "Dockerfile").read_text()
    [words] = re.findall(r"^CMD (\[.+\])$", docker, re.MULTILINE)
    yield yaml.safe_load(words)
    yield compose()["services"]["opd"]["command"]
    yield container()["args"]
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\\\n\s*", " ", blocks).splitlines()
    for line in lines:
        # `opd` is a service, a pod's prefix and a user there, too.
        found = re.search(r"(?:bin/opd|-- opd|rm opd) (\S.*?)(?:\s+#.*)?$", line)
        if found is not None:
            yield found.group(1).split()


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def container() -> dict[str, Any]:
    stateful, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    [found] = stateful["spec"]["template"]["spec"]["containers"]
    return found


LINES = list(command_lines())


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_every_command_is_one_that_there_is(words: list[str]) -> None:
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    context = command.make_context("opd", list(words), resilient_parsing=False)
    given = context.params.get("overrides") or ()
    values = merge({"store": {"url": "sqlite:///x"}, **GIVEN}, parse_overrides(list(given)))
    build(values)


def test_there_are_commands_of_the_guide_among_them() -> None:
    assert [words[:2] for words in LINES].count(["keys", "create"]) == 3


def test_probes_ask_routes_that_need_no_key() -> None:
    probes = [container()[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    paths = {probe["httpGet"]["path"] for probe in probes}
    [_, *words] = compose()["services"]["opd"]["healthcheck"]["test"]
    paths |= set(re.findall(r"8000(/\w+)", " ".join(words)))
    assert paths == {"/healthz", "/readyz"}
    assert paths <= OPEN_PATHS


def test_the_image_is_built_from_files_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY --chown=opd (.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
    requirements = re.findall(r"-r (\S+)", text)
    assert set(requirements) == {"constraints.txt", "constraints-torch.txt"}
    service = compose()["services"]["opd"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_secrets_and_volumes_that_are_used_are_declared() -> None:
    content = compose()
    used = {name for one in content["services"].values() for name in one.get("secrets", ())}
    assert used == set(content["secrets"])
    volumes = [one for service in content["services"].values() for one in service["volumes"]]
    named = {one.split(":")[0] for one in volumes if not one.startswith(".")}
    assert named == set(content["volumes"])


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze")
    # The program and its user are not on this machine.
    text = (DEPLOY / "opd.service").read_text().replace("/opt/opd/.venv/bin/opd", "/bin/true")
    unit = tmp_path / "opd.service"
    unit.write_text(re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE))
    found = subprocess.run(
        [program, "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "opd.service" not in found.stderr, found.stderr

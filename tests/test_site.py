"""The documentation's site: every page has its place, every link a target, every name an entry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from opd.cli.app import app
from opd.run.config import RunConfig
from records.hints.types import RehearsalBlock
from records.lessons.names import LessonDrop
from records.names import DropReason, HintRejection
from supply import site
from trainer.objectives.hindsight_options import HindsightOpd
from trainer.objectives.options import OBJECTIVE_NAMES

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    site.write(folder)
    return folder


def test_every_page_has_a_place(pages: Path) -> None:
    text = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- ([\w/]+\.md)$", text, flags=re.MULTILINE)
    written = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    assert sorted(listed) == sorted(written)


def test_every_link_has_a_target(pages: Path) -> None:
    for page in pages.rglob("*.md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_key_command_and_reason_is_in_a_reference(pages: Path) -> None:
    reference = pages / "reference"
    keys = (reference / "configuration.md").read_text(encoding="utf-8")
    for key in ("trainer.learning_rate", "judge.review", "cluster.policy.gpus", "store.url"):
        assert f"| `{key}` |" in keys
    for name in OBJECTIVE_NAMES:
        assert f'## trainer.objective (name = "{name}")' in keys
    for line in keys.splitlines():
        if line.startswith("| `"):
            cells = re.sub(r"`[^`]*`", "", line)
            assert cells.count("|") == 5, line
            assert "<" not in cells, line
    commands = (reference / "commands.md").read_text(encoding="utf-8")
    for words, _ in site.leaves(typer.main.get_command(app), ("opd",)):
        assert f"## {' '.join(words)}\n" in commands
    reasons = (reference / "names.md").read_text(encoding="utf-8")
    kinds = (DropReason, HintRejection, RehearsalBlock, LessonDrop)
    assert all(f"| `{reason.value}` |" in reasons for kind in kinds for reason in kind)


def test_a_field_without_a_text_has_none_of_its_neighbours() -> None:
    said = site.meanings(RunConfig)
    assert said["seed"].startswith("Seed of everything random")
    assert "renderer" not in said
    assert site.meanings(HindsightOpd)["horizon"].startswith("The teacher acts on the first")


def test_links_to_sources_become_text() -> None:
    assert (
        site.inside("see [the test](../tests/a.py), [here](b.md)") == "see `the test`, [here](b.md)"
    )
    assert site.from_root("[x](docs/x.md), [y](CHANGELOG.md), [z](https://z.z/a)") == (
        "[x](x.md), [y](changelog.md), [z](https://z.z/a)"
    )

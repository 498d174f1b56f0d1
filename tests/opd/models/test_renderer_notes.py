"""What a user is told of a renderer names a remedy only where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opd.models.renderer_notes import renderer_note, template_notes
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.rollout_bridge.family_tokenizers import FAMILIES, write_family

IGNORES_TOOLS = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, FAMILIES[name]) for name in ("qwen", "gemma")}


def test_a_family_s_renderer_needs_no_words(folders: dict[str, str]) -> None:
    config = RendererConfig(name="qwen3")
    note = renderer_note(Rendering.load(folders["qwen"], config), config)
    assert (note.found, note.remedy) == ("qwen3", None)


def test_calls_that_stay_text_are_told_what_would_read_them(folders: dict[str, str]) -> None:
    """The remedy is one that works: its renderers exist, and its parser fits."""
    config = RendererConfig(name="default")
    note = renderer_note(Rendering.load(folders["qwen"], config), config)
    assert "tool calls stay text" in note.found
    assert note.remedy is not None
    [names] = re.findall(r"--renderer \((.*), \.\.\.\)", note.remedy)
    assert set(names.split(", ")) <= {one.renderer for one in FAMILIES.values()}
    [parser] = re.findall(r"renderer\.tool_parser=(\S+)", note.remedy)
    read = RendererConfig(name="default", tool_parser=parser)
    done = renderer_note(Rendering.load(folders["qwen"], read), read)
    assert (done.remedy, "calls are read as qwen3" in done.found) == (None, True)


def test_a_model_without_a_token_for_calls_is_not_sent_looking(folders: dict[str, str]) -> None:
    config = RendererConfig(name="default")
    note = renderer_note(Rendering.load(folders["gemma"], config), config)
    assert note.remedy is None
    assert "no token for calls" in note.found


def test_what_a_template_ignores_comes_with_what_to_do(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", FAMILIES["gemma"])
    (tmp_path / "model" / "chat_template.jinja").write_text(IGNORES_TOOLS)
    [note] = template_notes(Rendering.load(folder, RendererConfig(name="default")))
    assert "ignores tools" in note.found
    assert note.remedy is not None
    assert "chat_template.jinja" in note.remedy

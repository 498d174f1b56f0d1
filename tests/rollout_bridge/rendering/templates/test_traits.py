"""What a model's own template does not show is said, merged or refused; nothing vanishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.server.prompts import Prompts
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.rendering.templates.errors import Unrenderable
from rollout_bridge.rendering.tokenizer import load_tokenizer
from tests.rollout_bridge.family_tokenizers import FAMILIES, write_family

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello."}
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As Gemma 2 has it."""
USERS_ONLY = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def folder_of(tmp_path: Path, family: str, template: str | None = None) -> str:
    folder = write_family(tmp_path / "model", FAMILIES[family])
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    return folder


def loaded(folder: str) -> Rendering:
    return Rendering.load(folder, RendererConfig(name="default"))


def shown(rendering: Rendering, *messages: dict[str, str]) -> str:
    return rendering.decode(rendering.prompt_ids(messages))


def test_a_template_that_shows_everything_changes_nothing(tmp_path: Path) -> None:
    rendering = loaded(folder_of(tmp_path, "qwen"))
    assert rendering.traits is not None
    assert rendering.traits.warnings == []
    assert "look" in rendering.decode(rendering.prompt_ids([SYSTEM, USER], [TOOL]))
    assert shown(rendering, SYSTEM, USER).startswith("<|im_start|>systemBe brief.<|im_end|>")


def test_tools_that_a_template_ignores_are_refused(tmp_path: Path) -> None:
    rendering = loaded(folder_of(tmp_path, "gemma", ALTERNATING))
    assert rendering.traits is not None
    assert rendering.traits.warnings == [
        "the model's chat template ignores tools: requests with tools are refused",
        "the model's chat template shows no system messages: their text goes in front of the first "
        "user message",
    ]
    with pytest.raises(Unrenderable, match="does not show tools: send the request without 'tools'"):
        rendering.prompt_ids([USER], [TOOL])


def test_a_system_message_goes_where_gemma_expects_it(tmp_path: Path) -> None:
    rendering = loaded(folder_of(tmp_path, "gemma", ALTERNATING))
    assert "user\nBe brief.\n\nHello.<end_of_turn>" in shown(rendering, SYSTEM, USER)
    developer = {"role": "developer", "content": "Be brief."}
    assert shown(rendering, developer, USER) == shown(rendering, SYSTEM, USER)
    with pytest.raises(Unrenderable, match="must be followed by a user message"):
        rendering.prompt_ids([SYSTEM, {"role": "assistant", "content": "a"}])


def test_a_system_message_that_vanishes_is_refused_by_name(tmp_path: Path) -> None:
    rendering = loaded(folder_of(tmp_path, "phi", USERS_ONLY))
    with pytest.raises(Unrenderable, match="does not show messages of the role 'system'"):
        rendering.prompt_ids([SYSTEM, USER])
    assert "Hello." in shown(rendering, USER)


def test_a_template_s_own_words_are_passed_on(tmp_path: Path) -> None:
    rendering = loaded(folder_of(tmp_path, "gemma", ALTERNATING))
    with pytest.raises(Unrenderable, match="these messages: Conversation roles must alternate"):
        rendering.prompt_ids([USER, USER])


async def test_the_engine_s_chat_route_does_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma", ALTERNATING)
    prompts = Prompts(load_tokenizer(folder), folder, 4096)
    merged = await prompts.of_messages([SYSTEM, USER], None, {})
    assert merged == loaded(folder).prompt_ids([SYSTEM, USER]).tolist()
    with pytest.raises(BadRequest, match="does not show tools"):
        await prompts.of_messages([USER], [TOOL], {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        await prompts.of_messages([USER, USER], None, {})
    prompts.close()

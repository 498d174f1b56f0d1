"""A model whose template refuses messages: its client learns what the template said."""

from __future__ import annotations

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import WEATHER, Door
from tests.rollout_bridge.chat_tokenizers import write_tokenizer
from tests.rollout_bridge.rendering.templates.test_traits import ALTERNATING

USER = {"role": "user", "content": "Hello."}


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = tmp_path_factory.mktemp("alternating")
    path = write_tokenizer(folder, None)
    (folder / "chat_template.jinja").write_text(ALTERNATING)
    return Rendering.load(path, RendererConfig(name="default"))


async def test_the_template_s_own_words_reach_the_client(door: Door) -> None:
    response = await door.post([USER, USER])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert error["message"] == (
        "The chat template cannot render these messages: Conversation roles must alternate "
        "user/assistant/user."
    )


async def test_tools_that_the_template_does_not_show_are_refused(door: Door) -> None:
    response = await door.post([USER], tools=[WEATHER])
    assert response.status_code == 400
    assert "does not show tools: send the request without 'tools'" in response.text


async def test_a_system_message_is_shown_all_the_same(door: Door) -> None:
    door.will_say("Hi")
    _, turn = await door.say([{"role": "system", "content": "Be brief."}, USER])
    assert "Be brief.\n\nHello." in door.rendering.decode(turn.prompt_ids)

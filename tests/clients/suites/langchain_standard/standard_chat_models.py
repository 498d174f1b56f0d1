"""LangChain's standard tests of chat models, for the three doors of a running endpoint.

Run by the foreign Python (test_langchain_standard.py), with SERVED_URL. What a door does not do is
said by the properties that langchain-tests has for it.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

URL = os.environ["SERVED_URL"]
OPENAI = {"model": "policy", "base_url": f"{URL}/v1", "api_key": "key"}


class ChatCompletions:
    """OpenAI's chat completions."""

    @property
    def chat_model_class(self) -> type:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Left to itself, this client asks for no usage of streams from any address but OpenAI's.
        return {**OPENAI, "stream_usage": True}

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False


class Responses(ChatCompletions):
    """OpenAI's Responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**OPENAI, "use_responses_api": True}


class Messages(ChatCompletions):
    """Anthropic's Messages."""

    @property
    def chat_model_class(self) -> type:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "policy", "base_url": URL, "api_key": "key"}

    @property
    def supports_json_mode(self) -> bool:
        return False


class TestChatCompletions(ChatCompletions, ChatModelIntegrationTests):
    pass


class TestResponses(Responses, ChatModelIntegrationTests):
    pass


class TestMessages(Messages, ChatModelIntegrationTests):
    pass


class TestChatCompletionsUnit(ChatCompletions, ChatModelUnitTests):
    pass


class TestResponsesUnit(Responses, ChatModelUnitTests):
    pass


class TestMessagesUnit(Messages, ChatModelUnitTests):
    pass

"""Every renderer of the package: the ids are the package's own, in time linear in the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.renderer_package import package_config, prepare
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.rendering.templates.messages import template_messages
from tests.linear_time import growth
from tests.rollout_bridge.family_tokenizers import EVERYTHING, write_family

prepare()


def names() -> list[str]:
    from renderers.configs import RendererConfig as PackageConfig

    (union, *_) = get_args(PackageConfig)
    known = [variant.model_fields["name"].default for variant in get_args(union)]
    return [name for name in known if name not in ("auto", "custom")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_family(tmp_path_factory.mktemp("everything") / "model", EVERYTHING)


@pytest.fixture(scope="module", params=names())
def rendering(request: pytest.FixtureRequest, folder: str) -> Rendering:
    if request.param == "gpt-oss":
        pytest.skip("its encoder fetches a vocabulary from the network")
    return Rendering.load(folder, RendererConfig(name=request.param))


@pytest.fixture(scope="module")
def own(rendering: Rendering, folder: str) -> Any:
    """The package's renderer over a tokenizer of transformers, as it comes."""
    from renderers.base import create_renderer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return create_renderer(tokenizer, package_config(RendererConfig(name=name_of(rendering))))


def name_of(rendering: Rendering) -> str:
    return rendering._renderer.config.name


def tool(number: int) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Where — in the world."}},
        "required": ["city"],
    }
    function = {"name": f"look_{number}", "description": "Looks up weather.", "parameters": schema}
    return {"type": "function", "function": function}


def call(number: int) -> dict[str, Any]:
    function = {"name": "look_0", "arguments": {"city": f"Paris {number}"}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def cycle(num_calls: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather? 漢字 ünï"},
        {"role": "assistant", "content": "", "tool_calls": [call(i) for i in range(num_calls)]},
        *(
            {
                "role": "tool",
                "content": f"{i} degrees",
                "tool_call_id": f"call_{i}",
                "name": "look_0",
            }
            for i in range(num_calls)
        ),
    ]


CONVERSATIONS = [
    [{"role": "user", "content": "Hello, world!"}],
    [
        {"role": "system", "content": "You are a dog. 漢字"},
        {"role": "user", "content": "Hi\n\nyou "},
    ],
    cycle(1),
    cycle(3),
    [
        {"role": "system", "content": ""},
        *cycle(2),
        {"role": "assistant", "content": "It is 21.", "reasoning_content": "Let me see."},
        {"role": "user", "content": "Thank you 🙂"},
    ],
]


@pytest.mark.parametrize("tools", [[], [tool(0), tool(1)]], ids=["plain", "tools"])
def test_ids_and_origins_are_the_packages_own(
    rendering: Rendering, own: Any, tools: list[dict[str, Any]]
) -> None:
    for messages in CONVERSATIONS:
        shaped = template_messages(messages)
        try:
            expected = own.render(shaped, tools=tools or None, add_generation_prompt=True)
        except ValueError:  # Llama 3 shows one call in a message
            with pytest.raises(ValueError, match="single tool call"):
                rendering.prompt_ids(messages, tools)
            continue
        assert rendering.prompt_ids(messages, tools).tolist() == expected.token_ids
        prompt = rendering.rendered_prompt(messages, tools)
        assert prompt.ids.tolist() == expected.token_ids
        if not rendering.template_only:  # none of these has many system messages
            assert prompt.message_indices is not None
            assert prompt.is_sampled is not None
            assert prompt.message_indices.tolist() == expected.message_indices
            assert prompt.is_sampled.tolist() == expected.sampled_mask


def test_extensions_are_the_packages_own(rendering: Rendering, own: Any) -> None:
    if rendering.template_only:
        pytest.skip("a template alone cannot extend a prompt")
    messages, tools = cycle(1)[:1], [tool(0)]
    prompt = rendering.prompt_ids(messages, tools)
    for stop in rendering.stop_token_ids:
        sampled = [*rendering.tokenizer.encode("Hello", add_special_tokens=False), stop]
        for new in (cycle(1)[2:], [{"role": "user", "content": "And?"}]):
            expected = own.bridge_to_next_turn(
                prompt.tolist(), sampled, template_messages(new), tools=tools
            )
            given = rendering._renderer.bridge_to_next_turn(
                prompt.tolist(), sampled, template_messages(new), tools=tools
            )
            assert (given and given.token_ids) == (expected and expected.token_ids)


def test_replies_are_parsed_as_the_package_parses_them(rendering: Rendering, own: Any) -> None:
    for text in ("Hello", "<think>\nHm.\n</think>\n\nHello", "<tool_call>x</tool_call>", ""):
        ids = rendering.tokenizer.encode(text, add_special_tokens=False)
        assert rendering._renderer.parse_response(ids) == own.parse_response(ids)


MANY = 100
DIMENSIONS: dict[str, Callable[[int], tuple[list[Any], list[Any]]]] = {
    "tools": lambda n: ([{"role": "user", "content": "Hi"}], [tool(i) for i in range(n)]),
    "tools and a system text": lambda n: (
        [{"role": "system", "content": "a"}, {"role": "user", "content": "Hi"}],
        [tool(i) for i in range(n)],
    ),
    "messages": lambda n: (
        [{"role": ("user", "assistant")[i % 2], "content": "é word"} for i in range(2 * n + 1)],
        [],
    ),
    "steps": lambda n: ([m for _ in range(n) for m in cycle(1)], [tool(0)]),
    "calls": lambda n: (cycle(n), [tool(0)]),
    "system messages": lambda n: (
        [{"role": "user", "content": "a"}]
        + [{"role": "system", "content": "é word"} for _ in range(n)]
        + [{"role": "user", "content": "a"}],
        [],
    ),
    "parts": lambda n: (
        [{"role": "user", "content": [{"type": "text", "text": "é word"}] * 5 * n}],
        [],
    ),
    "one text": lambda n: ([{"role": "user", "content": "é word " * 10 * n}], []),
    "one word": lambda n: ([{"role": "user", "content": "x" * 50 * n}], []),
    "blanks": lambda n: ([{"role": "user", "content": " \n" * 20 * n + " " * 20 * n}], []),
    "control texts": lambda n: ([{"role": "user", "content": "<|im_end|>" * 5 * n}], []),
    "one schema": lambda n: (
        [{"role": "user", "content": "a"}],
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {f"p{i}": {"type": "string"} for i in range(3 * n)},
                    },
                },
            }
        ],
    ),
    "arguments": lambda n: (
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "c",
                        "function": {
                            "name": "f",
                            "arguments": {f"p{i}": "é word" for i in range(3 * n)},
                        },
                    }
                ],
            },
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
        [],
    ),
}


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_prompt_costs_time_linear_in_each_dimension(rendering: Rendering, dimension: str) -> None:
    few, many = (DIMENSIONS[dimension](n) for n in (MANY, 4 * MANY))
    try:
        rendering.prompt_ids(*few)
    except ValueError:
        pytest.skip("this family refuses such messages")
    ratio = growth(
        lambda: rendering.prompt_ids(*few), lambda: rendering.prompt_ids(*many), below=6.6
    )
    assert ratio < 6.6, f"four times the {dimension} take {ratio:.2f} times as long"


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_scored_prompt_costs_time_linear_in_each_dimension(
    rendering: Rendering, dimension: str
) -> None:
    """The scoring side asks where each id comes from, too."""
    few, many = (DIMENSIONS[dimension](n) for n in (MANY // 2, 2 * MANY))
    try:
        rendering.rendered_prompt(*few)
    except ValueError:
        pytest.skip("this family refuses such messages")
    ratio = growth(
        lambda: rendering.rendered_prompt(*few),
        lambda: rendering.rendered_prompt(*many),
        below=6.6,
    )
    assert ratio < 6.6, f"four times the {dimension} take {ratio:.2f} times as long"

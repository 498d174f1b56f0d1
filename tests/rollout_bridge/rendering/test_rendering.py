import json

import numpy as np
import pytest

from records.messages import fingerprint
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.rendering.templates.messages import template_messages
from tests.rollout_bridge.chat_tokenizers import write_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather — in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "noop", "parameters": {}}},
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
CALL_2 = {**CALL, "id": "call_2", "function": {"name": "noop", "arguments": {}}}
CONVERSATIONS = {
    "one user message": [{"role": "user", "content": "Hello, world!"}],
    "system and user": [
        {"role": "system", "content": "You are a dog."},
        {"role": "user", "content": "Hi\n\n<b>there</b>   "},
    ],
    "a finished tool cycle": [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL_2]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "It is 21 degrees."},
        {"role": "user", "content": "Thank you, ünïcödé 漢字."},
    ],
    "text beside the call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "call_1"},
    ],
    "system message in the middle": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "c"},
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: write_tokenizer(root / name, template)
        for name, template in (
            ("plain", "chat_template_plain.jinja"),
            ("thinking", "chat_template_thinking.jinja"),
            ("bare", None),
        )
    }


@pytest.fixture(scope="module")
def thinking(folders):
    return Rendering.load(folders["thinking"], RendererConfig(name="qwen3"))


@pytest.fixture(scope="module")
def plain(folders):
    return Rendering.load(folders["plain"], RendererConfig(name="qwen3", enable_thinking=False))


@pytest.fixture(scope="module")
def default(folders):
    return Rendering.load(folders["plain"], RendererConfig(name="default", tool_parser="qwen3"))


def template_ids(rendering, messages, tools=(), **kwargs):
    return rendering.tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=False, **kwargs
    )


def ids_of(rendering, text):
    return np.asarray(rendering.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_equals_the_chat_template(thinking, default, name, tools):
    messages = CONVERSATIONS[name]
    for rendering in (thinking, default):
        ids = rendering.prompt_ids(messages, tools)
        assert ids.dtype == np.int32
        assert ids.tolist() == template_ids(rendering, messages, tools)


def test_reasoning_is_shown_within_the_tool_cycle_only(thinking):
    reply = {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [CALL]}
    cycle = [
        {"role": "user", "content": "Weather?"},
        reply,
        {"role": "tool", "content": "21", "tool_call_id": "call_1"},
    ]
    for messages in (cycle, [*cycle, {"role": "user", "content": "And now?"}]):
        ids = thinking.prompt_ids(messages, TOOLS)
        assert ids.tolist() == template_ids(thinking, messages, TOOLS)
    assert "Look." in thinking.decode(thinking.prompt_ids(cycle, TOOLS))
    assert "Look." not in thinking.decode(ids)


def test_switched_off_thinking_stands_in_every_reply(plain):
    text = plain.decode(plain.prompt_ids(CONVERSATIONS["system message in the middle"]))
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2


@pytest.mark.parametrize("rendering_name", ["thinking", "default"])
def test_the_shape_in_which_a_client_sends_a_message_does_not_matter(rendering_name, request):
    rendering = request.getfixturevalue(rendering_name)
    expected = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "call_1"},
    ]
    as_text = {**CALL, "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    sent = [
        {"role": "developer", "content": "Be kind.", "name": None},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one"},
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "text", "text": "two"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [as_text], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "21"}], "tool_call_id": "call_1"},
    ]
    assert (
        rendering.prompt_ids(sent, TOOLS).tolist() == rendering.prompt_ids(expected, TOOLS).tolist()
    )
    assert rendering.prompt_ids(sent, TOOLS).tolist() == template_ids(rendering, expected, TOOLS)


def test_arguments_that_do_not_parse_are_shown_as_they_are(thinking, default):
    broken = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": Paris'}}
    messages = [{"role": "user", "content": "w"}, {"role": "assistant", "tool_calls": [broken]}]
    for rendering in (thinking, default):
        assert '"arguments": {"city": Paris}' in rendering.decode(rendering.prompt_ids(messages))


def test_messages_are_not_changed():
    sent = [{"role": "developer", "content": None, "tool_calls": None}]
    template_messages(sent)
    assert sent == [{"role": "developer", "content": None, "tool_calls": None}]


def test_an_unknown_role_is_refused(thinking):
    with pytest.raises(ValueError, match="unknown message role 'robot'"):
        thinking.prompt_ids([{"role": "robot", "content": "x"}])


def test_what_the_template_cannot_show_is_a_value_error(thinking):
    with pytest.raises(ValueError, match="No messages"):
        thinking.prompt_ids([])


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        ("plain", {"name": "qwen99"}, r"unknown renderer 'qwen99'; known: .*default.*qwen3"),
        ("plain", {"name": "auto"}, "unknown renderer 'auto'"),
        ("plain", {"name": "llama-3", "enable_thinking": True}, "does not take"),
        ("plain", {"name": "glm-4.5"}, "does not fit the tokenizer"),
        (
            "plain",
            {"name": "default", "tool_parser": "nope"},
            "tool_parser: unknown parser 'nope'; known: qwen3, qwen3.5, glm, deepseek-v3$",
        ),
        (
            "plain",
            {"name": "default", "tool_parser": "glm"},
            "by the token <arg_key>, which the model's tokenizer does not have: leave it out",
        ),
        ("bare", {"name": "default"}, "has no chat template"),
        ("missing", {"name": "qwen3"}, "cannot load a tokenizer"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(
    folders, tmp_path, tokenizer, config, message
):
    model = folders.get(tokenizer, str(tmp_path / tokenizer))
    with pytest.raises(ValueError, match=message) as caught:
        Rendering.load(model, RendererConfig(**config))
    assert "\n" not in str(caught.value)


def test_a_model_without_template_works_under_its_familys_renderer(folders, thinking):
    rendering = Rendering.load(folders["bare"], RendererConfig(name="qwen3"))
    messages = CONVERSATIONS["a finished tool cycle"]
    assert (
        rendering.prompt_ids(messages, TOOLS).tolist()
        == thinking.prompt_ids(messages, TOOLS).tolist()
    )


def test_what_a_rendering_knows_of_its_tokenizer(thinking):
    tokenizer = thinking.tokenizer
    assert thinking.vocab_size == len(tokenizer)
    assert thinking.stop_token_ids == tuple(
        tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    )
    assert thinking.tool_call_start_id == tokenizer.convert_tokens_to_ids("<tool_call>")
    assert thinking.reasoning_end_id == tokenizer.convert_tokens_to_ids("</think>")


# Extending a prompt


def test_an_extension_keeps_the_sampled_ids_and_adds_what_the_template_adds(plain):
    messages = [{"role": "user", "content": "Weather?"}]
    prompt = plain.prompt_ids(messages, TOOLS)
    # Sampled in pieces that no tokenizer would choose, with spaces that no template would write.
    text = '<tool_call>\n{"name":  "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>'
    response = np.concatenate(
        [ids_of(plain, char) for char in text] + [ids_of(plain, "<|im_end|>")]
    )
    new = [
        {"role": "tool", "content": "21", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "tool_call_id": "call_2"},
        {"role": "user", "content": "And?"},
    ]
    extended = plain.extend(prompt, response, new, TOOLS)
    num_kept = len(prompt) + len(response)
    assert extended[:num_kept].tolist() == prompt.tolist() + response.tolist()
    assert extended.dtype == np.int32
    echo = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    fresh = plain.prompt_ids([*messages, echo, *new], TOOLS).tolist()
    added = extended[num_kept:].tolist()
    assert fresh[-len(added) :] == added
    assert fresh.count(plain.stop_token_ids[0]) == extended.tolist().count(plain.stop_token_ids[0])


def test_an_extension_equals_a_fresh_render_when_the_reply_was_canonical(plain):
    messages = CONVERSATIONS["a finished tool cycle"]
    prompt = plain.prompt_ids(messages)
    response = ids_of(plain, "Goodbye.<|im_end|>")
    new = [{"role": "user", "content": "Hello again"}]
    fresh = plain.prompt_ids([*messages, {"role": "assistant", "content": "Goodbye."}, *new])
    assert plain.extend(prompt, response, new).tolist() == fresh.tolist()


def test_a_truncated_reply_gets_the_end_token_it_lacks(plain):
    prompt = plain.prompt_ids([{"role": "user", "content": "Hi"}])
    response = ids_of(plain, "Hello, wor")
    extended = plain.extend(prompt, response, [{"role": "user", "content": "Go on"}])
    end = plain.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert extended[: len(prompt) + len(response)].tolist() == [*prompt, *response]
    assert extended[len(prompt) + len(response)] == end


def test_no_extension_where_the_template_means_something_else(thinking, plain, default):
    user = {"role": "user", "content": "Next"}
    prompt = thinking.prompt_ids([{"role": "user", "content": "Hi"}])
    response = ids_of(thinking, "<think>\nHm.\n</think>\n\nHello<|im_end|>")
    assert thinking.extend(prompt, response, [user]) is None, "it strips the reasoning now"
    assert thinking.extend(prompt, response, [{"role": "tool", "content": "x"}]) is not None
    unended = ids_of(thinking, "<think>\nHm.<|im_end|>")
    assert thinking.extend(prompt, unended, [{"role": "tool", "content": "x"}]) is None
    reply = ids_of(plain, "Hello<|im_end|>")
    prompt = plain.prompt_ids([{"role": "user", "content": "Hi"}])
    assert plain.extend(prompt, reply, [user]) is not None
    assert plain.extend(prompt, reply, [{"role": "assistant", "content": "x"}, user]) is None
    assert plain.extend(prompt, reply, []) is None
    assert plain.extend(prompt, reply[:0], [user]) is None
    other_end = ids_of(plain, "Hello<|endoftext|>")
    assert plain.extend(prompt, other_end, [user]) is None, "no template shows this end"
    after_end = ids_of(plain, "Hello<|im_end|>more")
    assert plain.extend(prompt, after_end, [user]) is None, "sampled ids would be lost"
    assert default.extend(prompt, reply, [user]) is None


def test_retained_thinking_extends_across_user_messages(folders):
    rendering = Rendering.load(
        folders["thinking"], RendererConfig(name="qwen3", thinking_retention="all")
    )
    prompt = rendering.prompt_ids([{"role": "user", "content": "Hi"}])
    response = ids_of(rendering, "<think>\nHm.\n</think>\n\nHello<|im_end|>")
    extended = rendering.extend(prompt, response, [{"role": "user", "content": "Next"}])
    assert "Hm." in rendering.decode(extended)


# Parsing a reply


@pytest.mark.parametrize("rendering_name", ["thinking", "plain", "default"])
def test_text_reasoning_and_calls_are_told_apart(rendering_name, request):
    rendering = request.getfixturevalue(rendering_name)
    calls = (
        '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call><|im_end|>'
    )
    text = f"<think>\nMaybe <b>.\n</think>\n\nLet me look.{calls}"
    reply = rendering.parse(ids_of(rendering, text), TOOLS)
    assert reply.reasoning.strip() == "Maybe <b>."
    assert reply.content.strip() == "Let me look."
    assert [(call.name, json.loads(call.arguments_json), call.ok) for call in reply.tool_calls] == [
        ("get_weather", {"city": "Zürich"}, True),
        ("noop", {}, True),
    ]
    assert reply.tool_calls[1].raw == (
        '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("block", "name", "arguments_json"),
    [
        ('{"name": "noop", "arguments": {"a": }}', "noop", '{"a": }'),
        ('{"name": "noop", "arguments": "x"}', "noop", "x"),
        ('{"name": "noop", "arguments": [1]}', "noop", "[1]"),
        ('{"name": "noop", "arguments": {"a": NaN}}', "noop", '{"a": NaN}'),
        ('{"arguments": {"a": 1e999}, "name": "noop"}', "noop", '{"a": Infinity}'),
        ('{"name": "noop"', "noop", ""),
        ('{"arguments": {}}', "", '{"arguments": {}}'),
        ("nonsense", "", "nonsense"),
        ("[1]", "", "[1]"),
    ],
)
def test_a_malformed_call_is_kept_with_its_text(plain, block, name, arguments_json):
    text = f"<tool_call>\n{block}\n</tool_call>"
    (call,) = plain.parse(ids_of(plain, text + "<|im_end|>"), TOOLS).tool_calls
    assert not call.ok
    assert (call.name, call.arguments_json, call.raw) == (name, arguments_json, text)


def test_a_call_cut_short_is_kept(plain):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    (call,) = plain.parse(ids_of(plain, text), TOOLS).tool_calls
    assert (call.name, call.arguments_json, call.ok) == ("get_weather", '{"city": "Par', False)
    assert call.raw == text


@pytest.mark.parametrize(
    "value",
    ["[" * 3000, "[" * 3000 + "]" * 3000, "9" * 5000],
    ids=["brackets that stay open", "deep brackets", "a long number"],
)
def test_a_call_that_pythons_parser_gives_up_on_is_kept(plain, value):
    begin = '<tool_call>\n{"name": "noop", "arguments": {"a": '
    broken, good = f"{begin}{value}}}}}\n</tool_call>", f"{begin}1}}}}\n</tool_call>"
    reply = plain.parse(ids_of(plain, f"Wait.{broken}{good}<|im_end|>"), TOOLS)
    assert reply.content == "Wait."
    assert [(call.name, call.ok) for call in reply.tool_calls] == [("noop", False), ("noop", True)]
    assert [call.raw for call in reply.tool_calls] == [broken, good]
    assert reply.tool_calls[1].arguments_json == '{"a": 1}'


def test_deep_arguments_of_a_history_are_shown_as_the_text_that_they_are(plain):
    arguments = '{"a":' * 2000 + "1" + "}" * 2000
    call = {"id": "c", "type": "function", "function": {"name": "noop", "arguments": arguments}}
    messages = [*CONVERSATIONS["one user message"], {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "r"})
    assert arguments in plain.decode(plain.prompt_ids(messages, TOOLS))


def test_a_tokenizer_that_panics_is_a_value_error(plain, monkeypatch):
    class PanicException(BaseException):
        """Like the one of tokenizers, which has no public type."""

    def panics(*args: object, **options: object) -> None:
        raise PanicException("retry limit")

    monkeypatch.setattr(plain._renderer, "render_ids", panics)
    with pytest.raises(ValueError, match="cannot split these messages: retry limit"):
        plain.prompt_ids(CONVERSATIONS["one user message"])


def test_arguments_are_the_text_that_was_sampled(plain):
    text = '<tool_call>\n{"name": "noop", "arguments":  {"a" :1.0,"b":"\\u00e9"} }\n</tool_call>'
    (call,) = plain.parse(ids_of(plain, text + "<|im_end|>"), TOOLS).tool_calls
    assert (call.arguments_json, call.ok, call.open_at) == ('{"a" :1.0,"b":"\\u00e9"}', True, None)


def test_arguments_in_a_json_string_are_passed_on(plain):
    text = '<tool_call>\n{"name": "noop", "arguments": "{\\"a\\": 1}"}\n</tool_call>'
    (call,) = plain.parse(ids_of(plain, text), TOOLS).tool_calls
    assert (call.arguments_json, call.ok) == ('{"a": 1}', True)


def test_reasoning_opened_by_the_prompt_is_known(thinking):
    prompt = np.concatenate(
        [thinking.prompt_ids([{"role": "user", "content": "Hi"}]), ids_of(thinking, "<think>\n")]
    )
    reply = thinking.parse(ids_of(thinking, "Hm.\n</think>\n\nHello<|im_end|>"), prompt_ids=prompt)
    assert (reply.reasoning, reply.content) == ("Hm.", "Hello")


def test_a_rebuilt_message_links_and_renders_like_the_sampled_one(plain):
    text = 'Sure.\n<tool_call>\n{"name": "noop", "arguments": {"a": [1, "é"]}}\n</tool_call>'
    messages = [{"role": "user", "content": "Go"}]
    sampled = ids_of(plain, text + "<|im_end|>")
    reply = plain.parse(sampled, TOOLS)
    sent = {
        "role": "assistant",
        "content": reply.content,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in reply.tool_calls
        ],
    }
    echo = json.loads(json.dumps(sent))
    echo["tool_calls"][0]["function"]["arguments"] = '{"a":[1,"\\u00e9"]}'
    assert fingerprint(echo) == fingerprint(sent)
    new = [{"role": "tool", "content": "ok", "tool_call_id": "call_0"}]
    extended = plain.extend(plain.prompt_ids(messages, TOOLS), sampled, new, TOOLS)
    for message in (sent, echo):
        assert plain.prompt_ids([*messages, message, *new], TOOLS).tolist() == extended.tolist()


def test_threads_may_share_a_rendering(thinking):
    from concurrent.futures import ThreadPoolExecutor

    messages = CONVERSATIONS["a finished tool cycle"]
    expected = thinking.prompt_ids(messages, TOOLS).tolist()
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: thinking.prompt_ids(messages, TOOLS).tolist(), range(200))
    assert all(ids == expected for ids in results)


def test_the_marks_are_those_that_the_packages_parsers_look_for():
    from renderers.parsers import TOOL_PARSERS

    from rollout_bridge.rendering.renderer_package import PARSER_MARKS

    class Asked:
        unk_token_id = None

        def __init__(self):
            self.tokens = set()

        def convert_tokens_to_ids(self, token):
            self.tokens.add(token)

    looked_for = {}
    for name, parser in TOOL_PARSERS.items():
        tokenizer = Asked()
        parser(tokenizer)
        looked_for[name] = tokenizer.tokens
    assert looked_for == {name: set(marks) for name, marks in PARSER_MARKS.items()}

import json

import pytest

from records.json_text import MAX_NESTING, nests_too_deep, parse_json
from records.messages import fingerprint
from tests.linear_time import growth


def nested(depth: int) -> str:
    return '{"a": [' * (depth // 2) + "]}" * (depth // 2)


@pytest.mark.parametrize(
    "text",
    ["1", '{"a": [1, {"b": null}]}', nested(MAX_NESTING), json.dumps(["[{" * 500] * 3), "NaN"],
)
def test_what_is_no_deeper_is_read_as_python_reads_it(text: str) -> None:
    assert repr(parse_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    ["", "{", nested(MAX_NESTING + 2), "[" * 100_000, nested(100_000), '{"a' + "[" * 5000],
)
def test_all_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|nests deeper than"):
        parse_json(text)


@pytest.mark.parametrize("end", ["", '"', "\\"])
@pytest.mark.parametrize("unit", ['\\"', '"', "a", "\\", '\\"[', '"[]'])
def test_strings_are_passed_over_in_linear_time(unit: str, end: str) -> None:
    def read(number: int) -> None:
        nests_too_deep("[]" * MAX_NESTING + '"' + unit * number + end)

    assert growth(lambda: read(10_000), lambda: read(40_000), below=6.6) < 6.6


def test_a_message_with_deep_arguments_has_an_identity() -> None:
    calls = [{"function": {"name": "f", "arguments": nested(100_000)}}]
    message = {"role": "assistant", "tool_calls": calls}
    other = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert fingerprint(message) == fingerprint({**message}) != fingerprint(other)

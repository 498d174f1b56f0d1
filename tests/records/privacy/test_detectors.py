"""Which secrets and personal data are found, whole and wherever they stand, and what is left alone;
and that docs/records.md says the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from api_proxy.reply.reply import call_id
from records.config import RedactionConfig
from records.privacy.detectors import SECRETS
from records.privacy.personal_data import PERSONAL
from records.privacy.redaction import Redactor
from records.privacy.secret_forms import FORMS, SERVICE_TOKENS
from tests.linear_time import growth
from tests.records.privacy.secret_samples import KEY, MAIL, PLACES, SAMPLES, Sample

DOCS = Path(__file__).parents[3] / "docs" / "records.md"
REDACTOR = Redactor(RedactionConfig())


def clean(text: str) -> str:
    [message] = REDACTOR.messages([{"role": "user", "content": text}])
    return message["content"]


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.label for sample in SAMPLES])
def test_each_form_is_found_and_taken_out_whole(sample: Sample) -> None:
    assert clean(sample.text) == sample.text.replace(sample.secret, f"[{sample.kind}]")


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.label for sample in SAMPLES])
def test_each_form_is_found_in_arguments_as_in_text(sample: Sample) -> None:
    arguments = json.dumps({"text": sample.text})
    call = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "send", "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    [found] = REDACTOR.messages([message])
    told = json.loads(found["tool_calls"][0]["function"]["arguments"])
    assert told["text"] == sample.text.replace(sample.secret, f"[{sample.kind}]")


def test_every_kind_has_a_sample() -> None:
    assert {sample.kind for sample in SAMPLES} == {*SECRETS, *PERSONAL}


def test_every_form_has_a_sample_of_its_own_under_each_of_its_heads() -> None:
    for kind, forms in FORMS.items():
        texts = [sample.text for sample in SAMPLES if sample.kind == kind]
        for form in forms:
            for anchor in form.anchors:
                starts = [(text, text.find(anchor)) for text in texts if anchor in text]
                found = [form.pattern.match(text, start) for text, start in starts]
                assert any(found), (kind, anchor)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_it_stands(place: str) -> None:
    message, secret = PLACES[place]
    [found] = REDACTOR.messages([message])
    assert secret not in json.dumps(found)
    assert found != message


def test_a_number_in_arguments_leaves_json() -> None:
    for text in ('{"card": 4111111111111111}', '[4111111111111111, {"a": 1}]'):
        json.loads(clean(text))
        assert "[credit_card]" in clean(text)
    inner = json.dumps({"body": '{"card": 4111111111111111}'})
    assert json.loads(json.loads(clean(inner))["body"]) == {"card": "[credit_card]"}


def test_a_call_and_its_result_keep_one_id() -> None:
    call = {"id": KEY, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": KEY, "content": "done"},
    ]
    assistant, tool = REDACTOR.messages(messages)
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "[aws_key]"


def test_two_keys_of_an_object_do_not_become_one() -> None:
    part = {"type": "x", KEY: 1, "[aws_key]_2": 2, KEY[:-1] + "Q": 3}
    [message] = REDACTOR.messages([{"role": "user", "content": [part]}])
    kept = {"type": "x", "[aws_key]": 1, "[aws_key]_2": 2, "[aws_key]_3": 3}
    assert message["content"] == [kept]


def test_many_keys_of_which_the_same_is_left_take_linear_time() -> None:
    def read(number: int) -> None:
        part = {f"user{one}@kestrel-freight.com": one for one in range(number)}
        [message] = Redactor(RedactionConfig()).messages([{"role": "user", "content": [part]}])
        assert list(message["content"][0].values()) == list(range(number))

    read(10)
    assert growth(lambda: read(1_000), lambda: read(4_000), below=6.6) < 6.6


def test_only_a_whole_data_url_is_passed_over() -> None:
    whole = "data:image/png;base64," + base64.b64encode(b"\0" * 100).decode()
    assert clean(whole) == whole
    hidden = base64.b64encode(b"x" * 9).decode() + KEY
    assert clean(f"data:image/png;base64,{hidden}=A") != f"data:image/png;base64,{hidden}=A"
    assert MAIL not in clean(f"data:;base64,{MAIL}")


ORDINARY = (
    *(str(uuid.UUID(int=random.Random(seed).getrandbits(128))) for seed in range(200)),
    *(uuid.UUID(int=random.Random(seed).getrandbits(128)).hex for seed in range(200)),
    *(hashlib.sha1(bytes([seed])).hexdigest() for seed in range(100)),
    *(hashlib.sha256(bytes([seed])).hexdigest() for seed in range(100)),
    *(call_id(uuid.UUID(int=seed * 2**90 + 7).hex, seed % 3) for seed in range(100)),
    "2026-11-21T10:30:00.123456+00:00",
    "Order 1042-7781-33, invoice INV-2026-000417, flight HAT001, PNR 4WQ150",
    "SKU 100045001234567, EAN 4006381333931, ISBN 978-3-16-148410-0",
    "timestamp 1763722800000, ns 1763722800000000000, pi 3.141592653589793",
    'password = get_password(user)  # token: the caller\'s, secret: "none"',
    "API_KEY = os.environ['API_KEY']; token = tokenizer.decode(ids); max_tokens=4096",
    '{"properties": {"password": {"type": "string"}, "token": {"type": "string"}}}',
    "next_page_token: 'CAUQAA1234567890', eos_token='<|im_end|>', pad_token=0",
    "export API_KEY=your-key-here; export API_KEY=$OTHER; postgres://user:password@localhost/db",
    "Basic authentication or Bearer authentication, see the sk-learn documentation",
    "npm install @scope/package@1.2.3 && git clone git@github.com:owner/repo.git",
    ".sk-fading-circle .sk-circle { animation: sk-circleFadeDelay }",
    "https://host.net:8080/path?x=1#y and ssh://host.net/ and @decorator.method",
    "The secret of a good reply: brevity. Key: value. Token: a piece of text.",
)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert clean(f"See {text} for it.") == f"See {text} for it."
    assert clean(json.dumps({"id": text, "n": 1})) == json.dumps({"id": text, "n": 1})


# What is not found, by the words of docs/records.md.
NOT_FOUND = {
    "a password in prose": "My password is hunter2, do not tell",
    "names of people and places": "Ann Lee, 12 Harbour Street, Bremen",
    "text that is encoded": base64.b64encode(f"write to {MAIL}".encode()).decode(),
    "percent signs in place of letters": MAIL.replace("@", "%40"),
    "pieces of a secret in several texts": "first half AKIA, second half IOSFODNN7EXAMPLE",
    "an address in words": "ann dot lee at kestrel-freight dot com",
    "keys of random letters without a name beside them": "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8",
    "a phone number without a country code": "030 901820",
    "a social security number without its dashes": "536904399",
    "an IP address or a MAC address": "203.0.113.7 and 00:1a:2b:3c:4d:5e",
}


def _section() -> str:
    text = DOCS.read_text(encoding="utf-8")
    return text.partition("### What is found\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("what", NOT_FOUND)
def test_what_is_not_found_is_said(what: str) -> None:
    assert clean(NOT_FOUND[what]) == NOT_FOUND[what]
    assert what.removeprefix("percent") in _section()


def test_the_table_of_the_docs_and_the_code_agree() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", _section(), re.MULTILINE)
    told = dict(rows)
    assert list(told) == [*SECRETS, *PERSONAL]
    for kind, forms in FORMS.items():
        if kind == "service_token":
            assert all(service in told[kind] for service in SERVICE_TOKENS)
            continue
        for form in forms:
            for anchor in {one.strip() for one in form.anchors}:
                assert f"`{anchor}" in told[kind] or anchor.title() in told[kind], (kind, anchor)


@pytest.mark.parametrize("offset", range(4_040, 4_110, 7))
def test_phones_of_a_region_are_found_wherever_a_text_is_cut(offset: int) -> None:
    """The library sees a stretch of a long text at a time."""
    redactor = Redactor(RedactionConfig(phone_region="US"))
    text = "(" * offset + " call (650) 253-0000 or 650-253-0001 now " + "x " * 4_000
    [message] = redactor.messages([{"role": "user", "content": text}])
    wanted = text.replace("(650) 253-0000", "[phone]").replace("650-253-0001", "[phone]")
    assert message["content"] == wanted

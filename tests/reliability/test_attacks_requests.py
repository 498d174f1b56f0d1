"""Whatever a request holds, it costs linear work at most and the event loop goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import pytest

from records.config import RedactionConfig
from tests.reliability.attacked import (
    JSON,
    LONGEST_S,
    Attacked,
    attacked,
    check_time,
    is_idle,
    up_to_three_times,
)
from tests.reliability.attacks import ATTACKS, CHAT, MESSAGES, USER, Attack

REPEATS = 5
NOISE_S = 0.02

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(tmp_path_factory.mktemp("attacked")) as running:
        running.heart()  # the first report takes as long as a slow callback
        yield running


def answer(proxy: Attacked, attack: Attack, number: int) -> tuple[int, dict]:
    response = proxy.client.post(attack.path, content=attack.raw(number))
    return response.status_code, response.json()


@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_too_much_is_refused_by_name_and_the_loop_goes_on(proxy: Attacked, name: str) -> None:
    up_to_three_times(lambda: _attack_with_too_much(proxy, ATTACKS[name]))


def _attack_with_too_much(proxy: Attacked, attack: Attack) -> None:
    was_idle = is_idle()
    if attack.within:
        status, _ = answer(proxy, attack, attack.within)
        assert status == 200
    proxy.heart()
    if attack.within:
        assert answer(proxy, attack, attack.within)[0] == 200
    status, body = answer(proxy, attack, attack.beyond)
    assert status == 400, body
    if attack.path == MESSAGES:
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
    else:
        assert body["error"]["code"] == attack.code
    time.sleep(0.3)
    heart = proxy.heart()
    check_time(heart, "callback_cpu_s")
    if was_idle and is_idle():
        check_time(heart, "late_p999_s")


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.within])
def test_twice_as_much_costs_twice_as_much_at_most(proxy: Attacked, name: str) -> None:
    attack = ATTACKS[name]
    numbers = (attack.within // 2, attack.within)
    # In turn, so that a processor that is slow for a while is so for both.
    costs_s = [[cost_s(proxy, attack, number) for number in numbers] for _ in range(REPEATS)]
    half_s, whole_s = map(min, zip(*costs_s, strict=True))
    assert whole_s <= 3 * half_s + NOISE_S, costs_s


def cost_s(proxy: Attacked, attack: Attack, number: int) -> float:
    """CPU seconds of the whole process for one request."""
    begun_s = proxy.heart()["process_cpu_s"]
    assert answer(proxy, attack, number)[0] == 200
    return proxy.heart()["process_cpu_s"] - begun_s


def test_refusals_are_counted_by_limit(proxy: Attacked) -> None:
    before = proxy.metric('opd_oversized_total{limit="tools"}')
    for _ in range(3):
        answer(proxy, ATTACKS["tools"], 600)
    assert proxy.metric('opd_oversized_total{limit="tools"}') == before + 3


@pytest.mark.alone
def test_many_large_requests_at_once_leave_the_loop_alone(proxy: Attacked) -> None:
    """The threads that work on them are few, whatever the number of requests."""
    up_to_three_times(lambda: _attack_with_many(proxy, ATTACKS["messages"]))


def _attack_with_many(proxy: Attacked, attack: Attack) -> None:
    proxy.heart()
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda _: answer(proxy, attack, 3_000)[0], range(24)))
    assert found == [200] * 24
    check_time(proxy.heart(), "callback_cpu_s")


SUMMARY_TASK = "Your task is to create a detailed summary of the conversation so far, paying close"


@pytest.mark.alone
def test_a_long_text_is_searched_for_summaries_beside_the_loop(tmp_path: Path) -> None:
    """A request without history may hold what was summed up before: of all it is looked for."""
    with attacked(tmp_path) as proxy:
        for number in range(32):
            asked = {"role": "user", "content": f"{number} {SUMMARY_TASK} attention."}
            fields = {"model": "policy", "max_tokens": 4_000, "messages": [asked]}
            assert proxy.client.post(CHAT, json=fields).status_code == 200
        for _ in range(2):
            proxy.heart()
        long = {"role": "user", "content": "a " * 490_000}
        fields = {"model": "policy", "max_tokens": 8, "messages": [long]}
        assert proxy.client.post(CHAT, json=fields).status_code == 400
        heart = proxy.heart()
    assert heart["callback_cpu_s"] <= LONGEST_S, heart


LOOKED_THROUGH = {
    "addresses": "a.b@c1.de ",
    "phones": "+1 650 253 0000 ",
    "accounts": "AB12 A B C D E F G H ",
    "logins": "://a:b1234567@h ",
}


@pytest.mark.alone
def test_texts_full_of_findings_leave_the_loop_alone(tmp_path: Path) -> None:
    """Four at once, each as long as is looked through, of kinds that cost most."""
    reply = {"role": "assistant", "content": "It is 21 degrees."}
    most = RedactionConfig().max_chars - 1_000

    def send(text: str) -> int:
        """A history is looked through before it is known to be too long for the context."""
        first = {"role": "user", "content": text}
        fields = {"model": "policy", "max_tokens": 8, "messages": [first, reply, USER]}
        content = orjson.dumps(fields)
        return httpx.post(f"{url}{CHAT}", content=content, headers=JSON, timeout=600).status_code

    # However busy the machine is, they are looked through before they are answered.
    with attacked(tmp_path, record_timeout_s=600) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        opening = {"model": "policy", "max_tokens": 8, "messages": [USER]}
        assert proxy.client.post(CHAT, json=opening).status_code == 200
        was_idle = is_idle()
        for _ in range(2):
            proxy.heart()
        with ThreadPoolExecutor(len(LOOKED_THROUGH)) as threads:
            texts = [(text * most)[:most] for text in LOOKED_THROUGH.values()]
            assert list(threads.map(send, texts)) == [400] * len(texts)
        heart = proxy.heart()
        assert proxy.metric('opd_findings_total{kind="email",mode="redact"}') >= most // 20
    assert heart["beat_cpu_p999_s"] <= LONGEST_S, heart
    if was_idle and is_idle():
        assert heart["late_p999_s"] <= LONGEST_S, heart

"""One thread at a time searches texts, in turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from records.config import RedactionConfig
from records.privacy.redaction import Redactor
from records.privacy.turnstile import Turnstile


def test_one_at_a_time_in_the_order_in_which_they_came() -> None:
    turnstile, within, order = Turnstile(), [], []

    def work(number: int) -> None:
        with turnstile:
            order.append(number)
            within.append(threading.current_thread())
            time.sleep(0.02)
            assert within == [threading.current_thread()]
            within.clear()

    with ThreadPoolExecutor(5) as threads:
        running = []
        for number in range(5):
            running.append(threads.submit(work, number))
            time.sleep(0.005)
        for one in running:
            one.result()
    assert order == list(range(5))


def test_one_that_pauses_lets_the_next_in_and_goes_on() -> None:
    turnstile, done = Turnstile(), []
    entered = threading.Event()

    def long() -> None:
        with turnstile:
            entered.set()
            while "short" not in done:
                turnstile.pause()
            done.append("long")

    def short() -> None:
        with turnstile:
            done.append("short")

    threads = [threading.Thread(target=long, daemon=True)]
    threads[0].start()
    assert entered.wait(10)
    threads.append(threading.Thread(target=short, daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert done == ["short", "long"]


def test_an_error_within_lets_the_next_one_in() -> None:
    turnstile = Turnstile()
    try:
        with turnstile:
            raise ValueError
    except ValueError:
        pass
    with turnstile:
        pass


def test_a_short_text_is_searched_between_slices_of_a_long_one() -> None:
    redactor = Redactor(RedactionConfig())
    redactor.messages([{"role": "user", "content": "patterns are compiled"}])
    long = {"role": "user", "content": "a.b@c1.de " * 60_000}
    short = {"role": "user", "content": "a.b@c1.de"}
    with ThreadPoolExecutor(2) as threads:
        searching = threads.submit(redactor.messages, [long])
        time.sleep(0.1)
        [clean] = threads.submit(redactor.messages, [short]).result()
        assert not searching.done()
        assert clean["content"] == "[email]"
        assert "@" not in searching.result()[0]["content"]

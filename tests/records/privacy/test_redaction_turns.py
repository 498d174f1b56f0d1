"""Whatever a text holds, looking through it never keeps the interpreter for long."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from records.config import RedactionConfig
from records.privacy.redaction import Redactor

LONGEST_S = 0.05
NUM_CHARS = 900_000
TEXTS = {
    "addresses": "a.b@c1.de ",
    "logins": "://a:b1234567@h ",
    "keys": "sk-abcdefghijklmnopqrst1234 ",
    "escapes": "\\u0041\\n",
    "words": "a ",
    "no number": "1" + "(" * NUM_CHARS,
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """As the endpoint has them, and no garbage of other tests to be searched meanwhile."""
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("name", TEXTS)
def test_others_get_their_turn(name: str) -> None:
    """CPU time of the thread that looks through it, from one turn of another thread to the next."""
    redactor = Redactor(RedactionConfig(phone_region="US"))
    redactor.messages([{"role": "user", "content": "loads the libraries: +1 650 253 0000"}])
    text = (TEXTS[name] * (NUM_CHARS // len(TEXTS[name]) + 1))[:NUM_CHARS]
    looking = threading.Thread(
        target=redactor.messages, args=([{"role": "user", "content": text}],), daemon=True
    )
    looking.start()
    assert looking.ident is not None
    clock = time.pthread_getcpuclockid(looking.ident)
    held_s, last_s = [], 0.0
    while looking.is_alive():
        time.sleep(0.001)
        try:
            now_s = time.clock_gettime(clock)
        except OSError:  # it has ended
            break
        held_s.append(now_s - last_s)
        last_s = now_s
    looking.join()
    assert max(held_s) <= LONGEST_S

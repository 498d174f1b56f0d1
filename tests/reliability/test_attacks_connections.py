"""Clients that do not send, do not read, or come in numbers take nothing from the others."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from tests.reliability.attacked import (
    Attacked,
    attacked,
    check_time,
    is_idle,
    up_to_three_times,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

USER = {"role": "user", "content": "hi"}
NUM_IDLE = 10_000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(
        tmp_path_factory.mktemp("attacked"),
        max_running=3,
        header_timeout_s=1.0,
        write_timeout_s=1.0,
        body_timeout_s=1.0,
        max_header_bytes=8_192,
        max_body_bytes=2**20,
        max_bytes_in_progress=4 * 2**20,
    ) as running:
        yield running


def connection(proxy: Attacked, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", proxy.port))
    return sock


def request(body: dict, key: str = "a") -> bytes:
    raw = orjson.dumps({"model": "policy", **body})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def everything(sock: socket.socket) -> bytes:
    """What the proxy sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def answered(sock: socket.socket) -> None:
    """One request and its answer; the connection is kept."""
    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += sock.recv(4_096)
    assert b"200" in answer


def ask(proxy: Attacked, key: str) -> httpx.Response:
    return proxy.client.post(
        "/v1/chat/completions",
        json={"model": "policy", "messages": [USER], "max_tokens": 8},
        headers={"Authorization": f"Bearer {key}"},
    )


def test_streams_that_nobody_reads_come_free(proxy: Attacked) -> None:
    long = {"messages": [USER], "stream": True, "max_tokens": 4_000, "logprobs": True}
    long["top_logprobs"] = 20
    before = proxy.metric('opd_oversized_total{limit="write_timeout"}')
    unread = []
    for number in range(2):
        sock = connection(proxy, receive_buffer=4_096)
        sock.sendall(request(long, key=f"unread{number}"))
        unread.append(sock)
    try:
        line = 'opd_oversized_total{limit="write_timeout"}'
        assert proxy.wait_for_metric(line, before + 2) == before + 2
        deadline = time.monotonic() + 30
        while proxy.metric("opd_in_flight") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert proxy.metric("opd_in_flight") == 0
        assert proxy.metric('opd_turns_total{drop_reason="client_disconnected"}') >= 2
    finally:
        for sock in unread:
            sock.close()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: "])
def test_half_sent_headers_are_closed(proxy: Attacked, sent: bytes) -> None:
    with connection(proxy) as sock:
        if not sent:
            # Silence after an answer is a kept connection, silence within a request is not.
            answered(sock)
            sent = b"GET"
        begun = time.monotonic()
        sock.sendall(sent)
        assert everything(sock) == b""
        assert 0.5 < time.monotonic() - begun < 30


@pytest.mark.parametrize("is_kept", [False, True], ids=["first", "kept"])
def test_headers_that_come_drop_by_drop_are_closed(proxy: Attacked, is_kept: bool) -> None:
    """Those of a request after an answered one too."""
    with connection(proxy) as sock:
        if is_kept:
            answered(sock)
        deadline, is_open = time.monotonic() + 30, True
        while is_open and time.monotonic() < deadline:
            time.sleep(0.1)
            try:
                sock.sendall(b"A")
            except (ConnectionResetError, BrokenPipeError):
                is_open = False
        assert not is_open


def test_headers_that_begin_behind_a_request_are_closed(proxy: Attacked) -> None:
    """The first drop came with the request before it."""
    asked = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connection(proxy) as sock:
        begun = time.monotonic()
        sock.sendall(asked + asked[:20])
        assert b"200" in everything(sock)
        assert time.monotonic() - begun < 30


def test_three_thousand_half_sent_headers_are_all_closed(proxy: Attacked) -> None:
    before = proxy.metric('opd_oversized_total{limit="header_timeout"}')
    sockets = []
    for _ in range(3_000):
        sock = connection(proxy)
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        sockets.append(sock)
    assert ask(proxy, "other").status_code == 200
    line = 'opd_oversized_total{limit="header_timeout"}'
    assert proxy.wait_for_metric(line, before + 3_000) >= before + 3_000
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(
    "headers",
    [
        "A: " + "x" * 20_000,
        "A: " + "x" * 2_000_000,
        "\r\n".join(f"A{number}: b" for number in range(600)),
    ],
)
def test_long_headers_are_refused(proxy: Attacked, headers: str) -> None:
    with connection(proxy) as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode())
        answer = everything(sock)
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    assert proxy.metric('opd_oversized_total{limit="headers"}') >= 1
    assert ask(proxy, "other").status_code == 200


def test_a_body_that_comes_drop_by_drop_is_timed_out(proxy: Attacked) -> None:
    whole = request({"messages": [USER]})
    with connection(proxy) as sock:
        sock.sendall(whole[:-10])
        # The connection ends too: what it goes on to send is not waited for.
        assert everything(sock).startswith(b"HTTP/1.1 408 ")


def test_bodies_in_progress_have_a_budget(proxy: Attacked) -> None:
    """Two MiB of the four for one tenant, whose other requests are told to come later."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n"
        "Content-Type: application/json\r\nContent-Length: 900000\r\n\r\n"
    )
    most = psutil.Process(proxy.pid).memory_info().rss
    sockets, answers = [], []
    # Of four bodies two are a tenant's half; of the third tenant's one fits beside four of others.
    for key, num_refused in (("one", 2), ("two", 2), ("three", 3)):
        own = [connection(proxy) for _ in range(4)]
        for sock in own:
            sock.sendall(head.format(key).encode() + b"x" * 800_000)
        sockets += own
        deadline = time.monotonic() + 30
        while len(select.select(own, [], [], 0.05)[0]) < num_refused:
            assert time.monotonic() < deadline, key
    for sock in sockets:
        answers.append(sock.recv(4_096)[:12])
        most = max(most, psutil.Process(proxy.pid).memory_info().rss)
        sock.close()
    counts = {status: answers.count(b"HTTP/1.1 " + status) for status in (b"408", b"429", b"503")}
    assert counts[b"429"] >= 2, answers
    assert counts[b"503"] >= 1, answers
    assert counts[b"408"] >= 2, answers
    assert ask(proxy, "one").status_code == 200
    assert proxy.metric('opd_oversized_total{limit="tenant_bodies"}') >= 2


def test_one_tenant_cannot_hold_all_places(tmp_path: Path) -> None:
    long = {"messages": [USER], "stream": True, "max_tokens": 4_000}
    with attacked(tmp_path, max_running=3) as proxy:
        held = [connection(proxy) for _ in range(6)]
        for sock in held:
            sock.sendall(request(long, key="greedy"))
        assert proxy.wait_for_metric("opd_waiting", 4) == 4
        assert ask(proxy, "modest").status_code == 200
        assert proxy.metric("opd_waiting") > 0
        for sock in held:
            sock.close()


def test_connections_have_a_number(tmp_path: Path) -> None:
    with attacked(tmp_path, max_connections=20) as proxy:
        sockets = [connection(proxy) for _ in range(40)]
        line = 'opd_oversized_total{limit="connections"}'
        assert proxy.wait_for_metric(line, 20) >= 20
        for sock in sockets:
            sock.close()
        assert ask(proxy, "other").status_code == 200


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """Room for all of them in this process, and in those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_IDLE + 1_000:
        pytest.skip(f"at most {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_IDLE + 1_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.alone
def test_ten_thousand_idle_connections_do_no_harm(tmp_path: Path) -> None:
    with many_open_files(), attacked(tmp_path) as proxy:
        memory = psutil.Process(proxy.pid).memory_info().rss
        was_idle = is_idle()
        heart = asyncio.run(_idle_connections(proxy))
        grown = psutil.Process(proxy.pid).memory_info().rss - memory
    assert grown < 600 * 2**20
    check_loop(heart, was_idle)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["close", "reset", "ask"])
def test_ten_thousand_at_once_leave_the_loop_alone(tmp_path: Path, how: str) -> None:
    """They hang up in order or not, or all send a request."""
    with many_open_files(), attacked(tmp_path) as proxy:
        up_to_three_times(lambda: _attack_at_once(proxy, how))


def _attack_at_once(proxy: Attacked, how: str) -> None:
    was_idle = is_idle()
    check_loop(_all_at_once(proxy, how), was_idle)


def _all_at_once(proxy: Attacked, how: str) -> dict[str, Any]:
    sockets = [connection(proxy) for _ in range(NUM_IDLE)]
    try:
        for _ in range(2):
            assert ask(proxy, "other").status_code == 200
            proxy.heart()
        for sock in sockets:
            if how == "ask":
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                continue
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        if how == "ask":
            assert all(b"200" in sock.recv(4_096) for sock in sockets)
        deadline = time.monotonic() + 60
        while how != "ask" and len(psutil.Process(proxy.pid).net_connections()) > 100:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return proxy.heart()
    finally:
        for sock in sockets:
            sock.close()


def check_loop(heart: dict[str, Any], was_idle: bool) -> None:
    """The loop went on: in CPU time on any machine, by the clock on an idle one."""
    check_time(heart, "callback_cpu_s")
    check_time(heart, "beat_cpu_p999_s")
    if was_idle and is_idle():
        check_time(heart, "late_p999_s")


async def _idle_connections(proxy: Attacked) -> dict[str, Any]:
    """What the proxy felt while they came and stayed."""
    writers = []
    # The first report, and what it has to load, is felt as well.
    for _ in range(2):
        await asyncio.to_thread(proxy.heart)
    try:
        for _ in range(NUM_IDLE // 100):
            opened = [asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(100)]
            writers += [writer for _, writer in await asyncio.gather(*opened)]
        assert len(writers) == NUM_IDLE
        for _ in range(5):
            assert (await asyncio.to_thread(ask, proxy, "other")).status_code == 200
        return await asyncio.to_thread(proxy.heart)
    finally:
        for writer in writers:
            writer.transport.abort()

"""What each worker may use of what the endpoint may use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api_proxy.config import ProxyConfig


@given(
    workers=st.integers(1, 64),
    max_running=st.integers(64, 2000),
    max_waiting=st.integers(0, 2000),
    max_connections=st.integers(64, 20_000),
)
def test_the_shares_of_all_workers_are_the_whole(
    workers: int, max_running: int, max_waiting: int, max_connections: int
) -> None:
    whole = ProxyConfig(
        workers=workers,
        max_running=max_running,
        max_waiting=max_waiting,
        max_connections=max_connections,
    )
    shares = [whole.share_of(number) for number in range(1, workers + 1)]
    for name in ("max_running", "max_waiting", "max_connections"):
        parts = [getattr(one, name) for one in shares]
        assert sum(parts) == getattr(whole, name)
        assert max(parts) - min(parts) <= 1
    assert min(one.max_running for one in shares) >= 1


@pytest.mark.parametrize(("workers", "bodies"), [(1, 256), (2, 128), (4, 64), (8, 64), (64, 64)])
def test_a_worker_can_always_take_two_of_the_longest_bodies(workers: int, bodies: int) -> None:
    share = ProxyConfig(workers=workers).share_of(workers)
    assert share.max_bytes_in_progress == bodies * 2**20
    assert share.max_bytes_in_progress // 2 >= share.max_body_bytes


def test_the_share_of_one_worker_is_everything() -> None:
    assert ProxyConfig().share_of(1) == ProxyConfig()


def test_a_worker_without_a_place_is_refused() -> None:
    with pytest.raises(ValidationError, match="workers = 3 is more than max_running = 2"):
        ProxyConfig(workers=3, max_running=2)

"""How workers are told who they are, and what is said of too many."""

from __future__ import annotations

import os

import pytest

from api_proxy.config import ProxyConfig
from opd.processes.roles.proxy_workers import Worker, workers_warnings
from trainer.errors import ConfigError


def test_a_worker_reads_what_it_was_started_with() -> None:
    worker = Worker(number=2, memory=7, sockets=(8, 9))
    assert Worker.parse(str(worker)) == worker


@pytest.mark.parametrize("text", ["", "two", "2", "2,x"])
def test_nobody_else_starts_workers(text: str) -> None:
    with pytest.raises(ConfigError, match="only `opd` itself starts workers"):
        Worker.parse(text)


def test_more_workers_than_cores_are_named_in_one_line() -> None:
    cores = len(os.sched_getaffinity(0))
    assert workers_warnings(ProxyConfig(workers=cores)) == []
    [line] = workers_warnings(ProxyConfig(workers=cores + 1))
    assert f"proxy.workers = {cores + 1}, and this machine has {cores} core" in line

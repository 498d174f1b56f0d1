"""The server under test is there already, at SERVED_URL, under one model name."""

import os
import unittest
from types import SimpleNamespace

DEFAULT_URL_FOR_TEST = os.environ["SERVED_URL"]
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 60
STDERR_FILENAME = "server_stderr.txt"
STDOUT_FILENAME = "server_stdout.txt"
CustomTestCase = unittest.TestCase


def __getattr__(name: str) -> str:
    """Every model that a test may name is the one that is served."""
    if name.startswith("DEFAULT_"):
        return "policy"
    raise AttributeError(name)


def popen_launch_server(*_arguments, **_options) -> SimpleNamespace:
    return SimpleNamespace(pid=None)

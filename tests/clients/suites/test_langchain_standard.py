"""LangChain's standard tests of chat models pass through the three doors (langchain_standard/)."""

from __future__ import annotations

import asyncio
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.clients.suites.conftest import HERE, PYTHON, Serve
from tests.clients.suites.obedient_engine import ObedientEngine

TESTS = HERE / "langchain_standard" / "standard_chat_models.py"
PASSES = 140
"""Tests that are not skipped; a smaller number means that a door is asked for less."""


async def test_all_standard_tests_pass(serve: Serve, tmp_path: Path) -> None:
    async with serve(ObedientEngine) as endpoint:
        report = tmp_path / "report.xml"
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), "-m", "pytest", "-q", "--noconftest", "--import-mode=importlib"),
            *("-c", os.devnull, "--rootdir", str(HERE), "-o", "asyncio_mode=auto", "--tb=short"),
            # That one compares the client with a picture of itself and asks the endpoint nothing.
            *("-k", "not test_serdes"),
            *("-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junit-xml={report}"),
            str(TESTS),
            cwd=tmp_path,
            env={**os.environ, "SERVED_URL": endpoint.url, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-8000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert len(cases) - len(skipped) == PASSES

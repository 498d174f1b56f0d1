"""A pytest plugin: every test asks for the one model that is served, whatever its class names."""

import pytest


@pytest.fixture(autouse=True)
def _served_model(request: pytest.FixtureRequest) -> None:
    if request.cls is not None:
        request.cls.model = "policy"

"""Tests over simulated engines run with each path that pieces can take, unless they say `paths`."""

from __future__ import annotations

import pytest
import transfer_world

PATHS = ("direct", "staged", "auto", "peer")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "paths(*names): the only paths that the test is about")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("paths")
    names = marker.args if marker is not None else PATHS
    if hasattr(metafunc.module, "World"):
        metafunc.parametrize("path", names, indirect=True)


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = getattr(request, "param", "direct")
    monkeypatch.setattr(transfer_world.World, "path", name)
    return str(name)

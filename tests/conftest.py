"""Leaves out the tests that are slow, because they start whole runs again and again, unless they are asked for."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        pytest.skip("starts whole runs again and again: make test-slow")

"""Skips this folder unless its marker is asked for, and shows at the end what was measured."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "fuzz" not in item.config.option.markexpr:
        pytest.skip("strangers for minutes: make test-fuzz")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(value)

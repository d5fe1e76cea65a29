"""Skips this folder unless its marker is asked for, and shows at the end what was compared, as a table."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "zoo" not in item.config.option.markexpr:
        pytest.skip("all of torchvision takes half an hour: make test-zoo")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[str, dict[str, object]] = {}
    for report in terminalreporter.getreports("passed"):
        told = dict(report.user_properties)
        if "network" in told:
            rows.setdefault(told["network"], {}).update(told)  # of both dtypes
    heading = list(dict.fromkeys(name for row in rows.values() for name in row))
    for cells in [
        heading,
        ["---"] * len(heading),
        *([row.get(name, ".") for name in heading] for row in rows.values()),
    ]:
        if heading:
            terminalreporter.write_line(f"| {' | '.join(map(str, cells))} |")

"""Shows at the end what was compared, as a table."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[str, dict[str, object]] = {}
    for report in terminalreporter.getreports("passed"):
        told = dict(report.user_properties)
        if "network" in told:
            rows.setdefault(told["network"], {}).update(told)  # of both dtypes
    heading = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [heading, ["---"] * len(heading), *([row.get(name, ".") for name in heading] for row in rows.values())]
    for cells in lines if rows else []:
        terminalreporter.write_line(f"| {' | '.join(map(str, cells))} |")

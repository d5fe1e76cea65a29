"""Leaves out the tiers of tests that take long, unless one is asked for, and shows at the end what was measured."""

from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples in every run. A limit in wall-clock time would fail whenever something else has the cores, and
# pytest-timeout ends what hangs.
hypothesis.settings.register_profile("adl_dist", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("adl_dist")

# Trainers of tests have one thread, and sums over several round differently; of small tensors several take longer.
torch.set_num_threads(1)

LEFT_OUT = {
    "docs": "every command of the pages takes a while: make test-docs",
    "fuzz": "strangers for minutes: make test-fuzz",
    "long": "long runs take minutes: make test-long",
    "slow": "another launcher, kill, signal or size: make test-slow",
    "slurm": "needs root and a SLURM cluster: make test-slurm",
    "zoo": "all of torchvision takes half an hour: make test-zoo",
}


# Tests that still expect the cut of 0.3.8, or show what the new one lacks. The list must become empty.
TO_PORT = {
    line for line in Path(__file__).with_name("to_port.txt").read_text().splitlines() if line[:1] not in ("", "#")
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in TO_PORT:
            item.add_marker(pytest.mark.xfail(reason="tests/to_port.txt", strict=False))
    # What takes longest comes first, so that two workers end together.
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


def pytest_runtest_setup(item):
    for marker, why in LEFT_OUT.items():
        if item.get_closest_marker(marker) and marker not in item.config.option.markexpr:
            pytest.skip(why)


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(value)

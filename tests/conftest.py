"""Leaves out the tiers of tests that take long, unless one is asked for, and shows at the end what was measured."""

import gc

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


def pytest_collection_modifyitems(items):
    # What takes longest comes first, so that two workers end together.
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


def pytest_configure():
    gc.disable()  # until all is imported


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported stays: the collector would look at 700,000 objects again and again
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


def pytest_runtest_setup(item):
    for marker, why in LEFT_OUT.items():
        if item.get_closest_marker(marker) and marker not in item.config.option.markexpr:
            pytest.skip(why)


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(value)

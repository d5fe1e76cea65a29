"""Leaves out the tiers of tests that take long, unless one is asked for, and shows at the end what was measured."""

import atexit
import gc
import sys

TIERS = {"docs", "fuzz", "long", "slow", "slurm", "zoo"}  # each has its own command: make test-docs, and so on


def pytest_collection_modifyitems(config, items):
    named = any("::" in word for word in config.args)  # a test by its name
    left_out = {tier for tier in TIERS if tier not in config.option.markexpr and not named}
    kept, deselected = [], []
    for item in items:
        is_left_out = not left_out.isdisjoint(mark.name for mark in item.iter_markers())
        (deselected if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=deselected)
    # What takes longest comes first, so that two workers end together.
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("ranks") is None)


def pytest_configure(config):
    gc.disable()  # until all is imported
    atexit.register(_freeze)
    if not config.getoption("numprocesses", None):  # the process that only hands out tests needs none of it
        _prepare()


def _freeze():
    """Spare Python the last search for garbage, of a second; triton would report what is not found as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def _prepare():
    import hypothesis
    import torch

    # The same examples in every run. A limit in wall-clock time would fail whenever something else has the cores, and
    # pytest-timeout ends what hangs.
    hypothesis.settings.register_profile("adl_dist", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("adl_dist")
    # Trainers of tests have one thread, and sums over several round differently; of small tensors several take longer.
    torch.set_num_threads(1)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported stays: the collector would look at 700,000 objects again and again
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(value)

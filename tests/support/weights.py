"""What a run of the command line has learnt, read as a user would."""

import pytest
import torch

from adl_dist.cli.main import main


def ended(*words):
    """The exit code of ``adl-dist WORDS``, run here."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def weights_of(folder, run="run"):
    """What ``adl-dist export`` writes of the run in ``folder/run``: parameters and buffers at its end."""
    assert ended("export", f"run_dir={folder / run}", f"out={folder / f'{run}.pt'}") == 0
    return torch.load(folder / f"{run}.pt", weights_only=True)


def assert_same(found, expected):
    """The same tensors, to the bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

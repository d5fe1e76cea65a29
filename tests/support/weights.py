"""What a run of the command line has learnt, read as a user would."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from adl_dist.cli.main import main


def ended(*words: str) -> int:
    """The exit code of ``adl-dist WORDS``, run here."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """What ``adl-dist export`` writes of the run in ``folder/run``."""
    assert ended("export", f"run_dir={folder / 'run'}", f"out={folder / 'model.pt'}") == 0
    state: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return state


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same tensors, to the bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

"""Of several ranks that end with an error one tells it, and the others live until it has: a launcher ends them all."""

import pytest

from adl_dist.cli import train
from adl_dist.cli.main import _tell
from adl_dist.errors import ConfigError, DivergedError, StageFailed

OF_ANOTHER = StageFailed("rank 2: boom", exit_code=1)
OF_ONE_GONE = StageFailed("stage 2: the process is gone", exit_code=1, is_gone=True)
OWN = DivergedError("the loss is nan", stage=1, update=0, epoch=0)
FOUND_BY_ALL = ConfigError("no such key")


@pytest.mark.parametrize(
    ("error", "rank", "launched", "waits", "tells"),
    [
        (OF_ANOTHER, 0, True, True, False),
        (OF_ANOTHER, 1, True, True, False),
        (OF_ANOTHER, 1, False, False, False),
        (OF_ONE_GONE, 0, True, False, True),
        (OF_ONE_GONE, 1, True, True, True),  # by then a rank 0 that could tell has done so, and this one was ended
        (OWN, 1, True, False, True),
        (FOUND_BY_ALL, 0, True, False, True),
        (FOUND_BY_ALL, 1, True, True, True),
    ],
)
def test_who_leaves_the_telling_to_another_rank_does_not_end_before_it(
    error, rank, launched, waits, tells, monkeypatch, capsys
):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(train, "_setting_up", error is FOUND_BY_ALL)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 3), *([("TORCHELASTIC_RUN_ID", "any")] * launched)):
        monkeypatch.setenv(name, str(value))
    _tell(error)
    assert any(slept) == waits
    prefix = "adl-dist: error: " + f"rank {rank}: " * waits
    assert capsys.readouterr().err == f"{prefix}{error}\n" * tells

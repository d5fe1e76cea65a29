"""Ranks whose scripts differ are refused by name; an optimizer may depend on the stage."""

import atexit
import contextlib
import io
import os
import re
import time

import pytest
import torch
from torch import nn

from adl_dist.errors import AdlError, ConfigError, StageFailed
from adl_dist.report import warning
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

CASES = {
    "seed": "do not begin with the same weights: the initial 1.weight differs; call torch.manual_seed",
    "shape": r"were not given the same job: model.3.weight is \[., 6\] on rank . and \[., 6\] on",
    "rate": r"were not given the same job: optimizer.lr is 0.(1 on rank 0 and 0.2 on rank 1|2 on rank 1 and 0.1 on)",
    "length": r"were not given the same job: epochs is \d on rank . and \d on rank .; start all ranks with one command",
    "stage": "trained",
}


def trained(case):
    """Train as one of two ranks; return the error message of this rank, or "trained"."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if case == "seed" else 0)
    optimizer = {
        "rate": lambda p: torch.optim.SGD(p, lr=0.1 + 0.1 * rank),
        "stage": lambda p: torch.optim.SGD(p, lr=0.1 if len(p[0]) == 6 else 0.2),
    }.get(case, lambda p: torch.optim.SGD(p, lr=0.1))
    last = nn.Linear(6, 5 + rank if case == "shape" else 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), last)
    try:
        trainer = toy_trainer(2, model=model, balance=[2, 2], optimizer=optimizer)
        trainer.fit(FixedImages(8), batch_size=4, monitoring=SILENT, epochs=1 + rank * (case == "length"))
    except AdlError as error:
        return str(error)
    return "trained"


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_different_scripts_are_refused(case):
    for said in run_ranks(2, trained, case):
        assert re.search(CASES[case], said), said


def trained_into(folder, other):
    """Train on two ranks, of which rank 1 is given ``other``; then rank 0 evaluates 0.6 s before rank 1."""
    rank = int(os.environ["RANK"])
    warning.SAY_SECONDS = 0.2
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        trainer = toy_trainer(2)
        given = {"monitoring": SILENT, "run_dir": other if rank else folder, "resume": "never"}
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, **given)
        time.sleep(0.6 * rank)
        loss = trainer.evaluate(FixedImages(8))["validation_loss"]
        with pytest.raises(ConfigError, match=r"every rank must make the same calls") as refusal:
            trainer.evaluate(FixedImages(8)) if rank else trainer.full_state_dict()
    return told.getvalue(), loss, str(refusal.value)


@pytest.mark.ranks
def test_the_folder_of_rank_0_counts_and_late_ranks_are_named(tmp_path):
    given = tmp_path / "other"
    (told, loss, refusal), (told_there, *rest) = run_ranks(2, trained_into, tmp_path / "run", given)
    assert "rank 0 waits in evaluate() for rank 1, which has not called it: call it on every rank ..." in told
    note = f"note: rank 1 was given run_dir={given}, but that of rank 0 counts: {tmp_path / 'run'}\n"
    assert told_there == note
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == 1
    assert rest == [loss, "rank 1 calls evaluate(), but rank 0 full_state_dict(): " + refusal.partition(": ")[2]]
    assert refusal.startswith("rank 0 calls full_state_dict(), but rank 1 evaluate(): ")


def called_by_rank_0_alone():
    trainer = toy_trainer(2, timeout_seconds=30)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=SILENT)
    if int(os.environ["RANK"]):
        atexit._run_exitfuncs()
        return None
    start = time.monotonic()
    with pytest.raises(StageFailed, match=r"rank 1 has ended without this call; every rank must make it"):
        trainer.full_state_dict()
    return time.monotonic() - start


@pytest.mark.ranks
def test_a_call_that_an_ended_rank_has_not_made_fails_at_once():
    assert run_ranks(2, called_by_rank_0_alone)[0] < 20

"""A run that is resumed after an epoch ends in the bits of the whole run, for what each method and option keeps."""

import functools

import pytest
import torch

from adl_dist.optimizers import with_rules
from tests.support.commands import assert_same
from tests.support.equations import assert_close
from tests.support.runs import sgd, toy_trainer, train, warm_up_schedule
from tests.support.tied import TIED_BALANCE, tied_net
from tests.support.toys import FixedImages
from tests.support.values import SILENT

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
ROWS = {
    "coded": {"codec": "int8", "shuffle": True},
    "2bw": {"method": "2bw", "options": {"mitigation": ["error_feedback"]}},
    "dsp": {"method": "dsp", "options": {"activation_queue": 2}, "dropout": 0.3},
    "paci": {"method": "paci", "ema": 0.9},
    "dgl": {"method": "dgl", "options": {"head": "linear"}},
    "dni": {"method": "dni", "options": {"head_layers": 0, "head_delay": 5, "head_sees_target": True}},
    "tied": {"model": tied_net, "balance": TIED_BALANCE[3], "optimizer": ADAMW, "ema": 0.9},
}


@pytest.mark.parametrize("case", ROWS)
def test_a_resumed_run_ends_in_the_same_bits(case, tmp_path):
    options = ROWS[case]
    train(3, 3, torch.float32, epochs=1, run_dir=tmp_path, **options)
    assert_same(train(3, 3, torch.float32, run_dir=tmp_path, **options)[0], train(3, 3, torch.float32, **options)[0])


RULES = [{"ndim": 1, "weight_decay": 0.0}, {"names": "6.*", "lr_factor": 0.25}, {"names": "1.conv.*", "frozen": True}]
OTHER_CUTS = {
    "rules": {"optimizer": with_rules(ADAMW, RULES), "ema": 0.9},
    "tied": {"model": tied_net, "optimizer": sgd},
}


@pytest.mark.parametrize("case", OTHER_CUTS)
def test_a_run_continues_with_another_cut(case, tmp_path):
    """Without delay any K trains the same, if each parameter finds its own state, group and average."""
    options, is_tied = OTHER_CUTS[case], case == "tied"

    def fit(K, epochs, folder=None):
        balance = {"balance": TIED_BALANCE[K]} if is_tied else {}
        model = {"model": options["model"]()} if is_tied else {}
        more = {**options, **model, **balance, "dtype": torch.float64, "lr_schedule": warm_up_schedule}
        trainer = toy_trainer(K, 2, "bp" if K == 1 else "1f1b", verify=False, **more)
        data = FixedImages(20, dtype=torch.float64)
        trainer.fit(data, epochs=epochs, batch_size=6, run_dir=folder, monitoring=SILENT)
        return trainer

    for K, epochs in ((3, 1), (2, 2)):
        trainer = fit(K, epochs, tmp_path)
    whole = fit(1, 2)
    assert_same_or_close = assert_close if is_tied else assert_same
    assert_same_or_close(trainer.full_state_dict(), whole.full_state_dict())
    if "ema" in options:
        assert_same(trainer.full_state_dict(ema=True), whole.full_state_dict(ema=True))

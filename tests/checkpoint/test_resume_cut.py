"""A checkpoint continues with another K or balance: nothing is lost, nothing is moved, and the run says so."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import yaml

import adl_dist
from adl_dist.errors import CheckpointError
from adl_dist.optim import multistep
from adl_dist.optimizers import Muon
from adl_dist.schedule import Pipeline
from tests.support.commands import assert_same, snapshot
from tests.support.runs import toy_trainer
from tests.support.tiers import slow
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

MICRO_BATCH, M = 3, 2
NUM_SAMPLES, PER_EPOCH = 17, 3  # six micro-batches, the last one of 2: three updates
# In the second, a stage of nothing but dropout has no parameters.
CUTS = [(4, None), (3, [3, 1, 3]), (1, None)]
SCHEDULE = partial(multistep, milestones=[1.5, 2.5], gamma=0.3, warmup_epochs=1.2)


def two_groups(parameters):
    """Decays matrices only, and learns the rest at half the rate; a stage may have none of either."""
    all_of_them = list(parameters)
    matrices, rest = ([p for p in all_of_them if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "lr": 0.025}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "two groups": two_groups,
    "muon": Muon,
    "nadamw": partial(torch.optim.NAdam, betas=(0.99, 0.999), momentum_decay=0.004, decoupled_weight_decay=True),
}


class Stopped(Exception):
    """In place of a signal."""


class Run:
    """The toy net with its trainer, its optimizers, and the learning rates of each update that it made."""

    def __init__(
        self, K, balance=None, *, optimizer="sgd", dtype=torch.float32, lr_schedule=None, method="adl", steps=M, seed=0,
        stop_after=None, **options
    ):  # fmt: skip
        self.model, self.dtype, self.batch_size = batch_norm_net(seed), dtype, MICRO_BATCH * steps
        self.optimizers = []  # of each stage that has parameters
        self.rates = []  # of each of them, each update, each group
        self._make, self._stop_after = OPTIMIZERS[optimizer], stop_after
        of_trainer = {"lr_schedule": lr_schedule, "dtype": dtype, **({} if balance is None else {"balance": balance})}
        self.trainer = toy_trainer(
            K, steps, method, options, model=self.model, optimizer=self._watched, **{"verify": False, **of_trainer}
        )

    def fit(self, run_dir, *, num_samples=NUM_SAMPLES, **more):
        data, more = FixedImages(num_samples, dtype=self.dtype), {"monitoring": SILENT, **more}
        self.trainer.fit(data, batch_size=self.batch_size, run_dir=run_dir, **more)
        return self

    def state(self):
        """Weights, buffers, optimizer state and learning rates by the uncut model's own names."""
        state = self.trainer.full_state_dict()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = [(o, group) for o in self.optimizers for group in o.param_groups]
        for optimizer, group, parameter in ((o, g, p) for o, g in groups for p in g["params"]):
            name = names.pop(id(parameter))
            state[f"lr of {name}"] = torch.tensor(group["lr"], dtype=torch.float64)
            assert optimizer.state[parameter], f"nothing is remembered of {name}"
            state |= {f"{key} of {name}": torch.as_tensor(v).clone() for key, v in optimizer.state[parameter].items()}
        assert names == {}, "every parameter belongs to the optimizer of its stage"
        return state

    def _watched(self, parameters):
        parameters = list(parameters)
        optimizer = self._make(parameters)
        rates = []

        def look(optimizer, *_):
            rates.append([group["lr"] for group in optimizer.param_groups])
            if rates is self.rates[-1] and len(rates) == self._stop_after:
                raise Stopped

        optimizer.register_step_pre_hook(look)
        self.optimizers.append(optimizer)
        self.rates.append(rates)
        return optimizer


# --- What is carried over ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [slow("adamw", torch.float32), ("two groups", torch.float64), ("muon", torch.float32)],
    ids=str,
)
def test_another_cut_starts_from_what_the_one_before_ended_with(optimizer, dtype, tmp_path):
    ended = None
    options = {"optimizer": optimizer, "dtype": dtype, "lr_schedule": SCHEDULE}
    for done, (K, balance) in enumerate(CUTS):
        if ended is not None:  # no longer than it is: read, and not trained
            read = Run(K, balance, seed=9, **options).fit(tmp_path, epochs=done)
            assert not any(read.rates)
            assert_same(read.state(), ended)
        run = Run(K, balance, seed=9 * done, **options).fit(tmp_path, epochs=done + 1)
        assert {len(rates) for rates in run.rates} == {PER_EPOCH}
        ended = run.state()


@pytest.mark.parametrize("lr_clock", ["update", "global"])
def test_after_a_change_of_cut_each_update_has_its_learning_rate(lr_clock, tmp_path):
    """That of the schedule at its own index, or, on the clock of slots, as far ahead as a stage of the new cut is."""
    options = {"optimizer": "two groups", "lr_schedule": SCHEDULE}
    (schedule,) = Run(1, **options).fit(tmp_path / "uncut", epochs=3).rates
    assert len({rates[0] for rates in schedule}) > PER_EPOCH, "they move"
    for done, K in enumerate((4, 2, 3)):
        run = Run(K, stop_after=None if done == 2 else PER_EPOCH + 1, lr_clock=lr_clock, **options)
        with pytest.raises(Stopped) if done < 2 else nullcontext():  # in the next epoch, which is lost with it
            run.fit(tmp_path / "run", epochs=3)
        pipeline = Pipeline(adl_dist.method("adl", accumulation_steps=M, lr_clock=lr_clock), K)
        leads = [pipeline.lr_lead(k) for k in range(K)]
        assert leads[0] == (0 if lr_clock == "update" else K - 1)
        for rates, lead in zip(run.rates, leads, strict=True):
            assert len(rates) >= PER_EPOCH
            first = done * PER_EPOCH + lead
            at = [min(first + update, 3 * PER_EPOCH - 1) for update in range(len(rates))]
            assert rates == [schedule[update] for update in at]


@pytest.mark.parametrize(("method", "steps", "optimizer"), [("adl", 6, "adamw"), ("1f1b", 2, "nadamw")])
def test_without_staleness_many_cuts_end_with_the_same_bits(method, steps, optimizer, tmp_path):
    """Bits, not 1e-12: a cut changes neither an operation nor the order in which gradients are added up."""
    options = {"optimizer": optimizer, "method": method, "steps": steps}
    size = 18  # six whole micro-batches
    uncut = Run(1, **options).fit(tmp_path / "uncut", epochs=6, num_samples=size)
    for done, K in enumerate((4, 2, 3)):
        run = Run(K, seed=9 * done, **options).fit(tmp_path / "run", epochs=2 * done + 2, num_samples=size)
    assert len(uncut.rates[0]) == 6 * 6 // steps
    assert_same(run.state(), uncut.state())


# --- What is told -----------------------------------------------------------------------------------------------------


def test_resuming_with_another_cut_says_so_once(tmp_path, capsys):
    def noted(balance, epochs):
        Run(len(balance), balance).fit(
            tmp_path, epochs=epochs, monitoring=adl_dist.Monitoring(quiet=False, report=False)
        )
        return [line for line in capsys.readouterr().out.splitlines() if "another cut" in line]

    def told():
        return yaml.safe_load((tmp_path / "config.yaml").read_text())["balance"]

    assert noted([1, 2, 2, 2], 1) == []
    (note,) = noted([3, 4], 2)
    change = "num_stages was 4 and is 2, balance was ['1.conv', '3', '5.conv'] and is ['3']"
    assert note.startswith(f"note: the run continues with another cut ({change}); weights and optimizer state")
    assert note.endswith("staleness and dropout streams are now those of the new cut, and values follow them")
    assert (tmp_path / "logs" / "rank0.log").read_text().count(note) == 1
    assert told() == [3, 4]
    assert noted([3, 4], 3) == []
    assert noted([2, 2, 3], 3) == [], "nothing is left that another cut could train"
    assert told() == [3, 4]


# --- What does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ((4, [1, 3, 2, 1]), (2, [3, 4]), "head0: stood after 0.1, and would now stand after 2.norm"),
        ((4, [1, 2, 3, 1]), (4, [1, 3, 2, 1]), "head1: stood after 2.norm, and would now stand after 3"),
    ],
    ids=["another K", "another balance"],
)
def test_local_losses_continue_in_their_places_only(old, new, message, tmp_path):
    """Also where a head of the same shapes stood in the other place."""
    greedy = {"method": "dgl", "head": "linear"}
    Run(*old, **greedy).fit(tmp_path, epochs=1)
    before = snapshot(tmp_path)
    log, _ = before.pop("logs/rank0.log"), before.pop("start.json")
    with pytest.raises(CheckpointError, match=rf"holds heads of another cut or kind \({message}\)"):
        Run(*new, **greedy).fit(tmp_path, epochs=2)
    after = snapshot(tmp_path)
    assert after.pop("logs/rank0.log") != log, "the new cut was tried out"
    after.pop("start.json")
    assert after == before
    # With fewer stages they continue if those that stay end where they did.
    run = Run(2, [old[1][0], 7 - old[1][0]], **greedy).fit(tmp_path, epochs=2)
    assert len(run.rates[0]) == PER_EPOCH

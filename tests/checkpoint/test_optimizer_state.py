"""Whatever an optimizer remembers survives a save and a resume, bit for bit, or is refused by name."""

import json
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from adl_dist.checkpoint import tensor_files
from adl_dist.checkpoint.nested import Packer, unpacked
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.errors import CheckpointError, ConfigError
from tests.support.commands import assert_same
from tests.support.kill import records
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT


class Own(torch.optim.Optimizer):
    """An optimizer that a user has written; what it does with a gradient is in ``change``."""

    def __init__(self, params, lr=0.05, **defaults):
        super().__init__(params, {"lr": lr, **defaults})
        self.prepare()

    def prepare(self):
        """Set attributes of the object."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * self.change(p, self.state[p], group))
        self.end()

    def begin(self, group):
        """Move what lies in the group."""

    def end(self):
        """Move what lies in the object."""

    def change(self, p, state, group):
        return p.grad


class CountsInGroups(Own):
    """As schedule-free optimizers do: a counter, a float and a tensor in the group."""

    def begin(self, group):
        group["k"] = group.get("k", 0) + 1
        group["weight_sum"] = group.get("weight_sum", 0.0) + 1 / 3 / group["k"]
        group.setdefault("d", torch.ones((), dtype=torch.float64)).mul_(0.9)

    def change(self, p, state, group):
        return p.grad * (group["d"] / group["weight_sum"]).to(p.dtype) / group["k"]


class CountsItself(Own):
    """In attributes that its ``state_dict()`` returns, and in ``state`` under a name."""

    def prepare(self):
        self.k, self._seen, self.constant = 0, [], {1, 2}

    def state_dict(self):
        return {**super().state_dict(), "counters": [self.k, self._seen]}

    def load_state_dict(self, state):
        self.k, self._seen = state["counters"]
        super().load_state_dict({key: value for key, value in state.items() if key != "counters"})

    def end(self):
        self.k += 1
        self._seen = [*self._seen[-1:], (self.k, None)]
        self.state["rounds"] = self.state.get("rounds", 0) + 1

    def change(self, p, state, group):
        return p.grad / (1 + self.k + len(self._seen) + self.state.get("rounds", 0))


class Nested(Own):
    """As L-BFGS, SOAP and Shampoo keep it, with matrices that are stored by columns."""

    def change(self, p, state, group):
        history = state.setdefault("history", {"grads": [], 0: (1, 2.5, None), "far": float("inf"), "side": "left"})
        history["grads"] = [*history["grads"][-2:], p.grad.clone()]
        history[0] = (history[0][0] + 1, *history[0][1:])
        matrix = p.grad.reshape(len(p), -1)
        state["Q"] = [torch.linalg.qr(matrix)[0].mT.contiguous().mT, None]
        assert type(history[0]) is tuple
        assert type(history[0][0]) is int
        return sum(history["grads"]) / history[0][0] + (state["Q"][0] @ (state["Q"][0].mT @ matrix)).reshape(p.shape)


class Widens(Own):
    """Keeps float64 averages of float32 parameters, an int that counts, and a bool."""

    def change(self, p, state, group):
        state["n"], state["flag"] = state.get("n", 0) + 1, not state.get("flag", False)
        average = state.setdefault("average", torch.zeros_like(p, dtype=torch.float64))
        average.mul_(0.7).add_(p.grad, alpha=0.3 / state["n"])
        return (average * (1.5 if state["flag"] else 0.5)).to(p.dtype)


class Run:
    """A trainer of the toy net, and the optimizers that it made."""

    def __init__(self, make, K=2, **options):
        self.optimizers = []

        def made(parameters):
            self.optimizers.append(make(parameters))
            return self.optimizers[-1]

        self.trainer = toy_trainer(K, 2, optimizer=made, model=batch_norm_net(), verify=False, **options)

    def fit(self, run_dir, epochs):
        self.trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, monitoring=SILENT)
        return self.trainer.full_state_dict()


@pytest.mark.parametrize("make", [Nested, Widens])
def test_a_resumed_run_ends_with_the_bits_of_a_whole_one(make, tmp_path):
    """The others: in a test of changed cuts below."""
    expected = Run(make).fit(None, 3)
    for epochs in (1, 2):
        Run(make).fit(tmp_path, epochs)
    assert_same(Run(make).fit(tmp_path, 3), expected)


def test_one_cycle_moves_the_momentum_and_is_not_stored(tmp_path):
    """It is a function of the update index, so another cut continues, too."""
    cycle = partial(OneCycleLR, max_lr=0.2, total_steps=9)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = Run(sgd, lr_schedule=cycle).fit(None, 3)
    Run(sgd, lr_schedule=cycle).fit(tmp_path, 1)
    run = Run(sgd, lr_schedule=cycle)
    assert_same(run.fit(tmp_path, 3), expected)
    momenta = {o.param_groups[0]["momentum"] for o in run.optimizers}
    assert momenta != {0.9}
    other = Run(sgd, 3, lr_schedule=cycle)
    other.fit(tmp_path, 3)
    assert {o.param_groups[0]["momentum"] for o in other.optimizers} == momenta


@pytest.mark.parametrize(
    ("make", "told"),
    [(CountsInGroups, r"param_groups\[0\]\.k, .*"), (CountsItself, "state.rounds, state_dict.counters")],
)
def test_values_of_a_whole_stage_need_the_same_cut(make, told, tmp_path):
    Run(make).fit(tmp_path, 1)
    with pytest.raises(CheckpointError, match=rf"\(num_stages 2, .*\) holds .* \({told}\), and .* cut differently"):
        Run(make, 3).fit(tmp_path, 2)
    assert_same(Run(make).fit(tmp_path, 2), Run(make).fit(None, 2))


def test_what_belongs_to_parameters_moves_to_another_cut(tmp_path):
    states = []
    for K in (2, 3):
        run = Run(Nested, K)
        run.fit(tmp_path, 1)
        states.append({p.shape: [*o.state[p]] for o in run.optimizers for p in o.param_groups[0]["params"]})
    assert states[0] == states[1]
    assert all(states[0].values())


# --- what cannot be saved ---------------------------------------------------------------------------------------------


class KeepsASet(Own):
    def change(self, p, state, group):
        state.setdefault("seen", [set()])[0].add(len(p))
        return p.grad


class Aliases(Own):
    def change(self, p, state, group):
        state["first"] = state["second"] = p.grad.clone()
        return p.grad


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (KeepsASet, r"4.conv.weight.seen.0 is a set; expected tensors, numbers, text, None, and lists,"),
        (Aliases, "4.conv.weight.second shares its memory with 4.conv.weight.first"),
    ],
)
def test_what_cannot_be_saved_is_told_after_the_first_update(make, told, tmp_path):
    """And without a run folder it trains."""
    Run(make).fit(None, 1)
    with pytest.raises(ConfigError, match=f"stage 1: what {make.__name__} remembers cannot be saved: {told}.* run_dir"):
        Run(make).fit(tmp_path, 1)
    losses = [record for record in records(tmp_path) if record["name"] == "train/loss"]
    assert [record["update"] for record in losses] in ([], [0])


def test_an_optimizer_that_refuses_a_parameter_is_told():
    muon = partial(torch.optim.Muon, lr=0.01)
    with pytest.raises(ConfigError, match=r"stage 0: the optimizer fails: ValueError: Muon only"):
        Run(muon, 1).fit(None, 1)


# --- devices ----------------------------------------------------------------------------------------------------------


def placed(folder, *, saved_on, steps_on_cpu=True):
    """Where a counter on the CPU and an average that is with its parameter come back, now that this is on "meta"."""
    on_gpu = torch.device("meta") if saved_on == "gpu" else torch.device("cpu")
    packer = Packer(on_gpu)
    text = json.dumps(packer.packed("w", {"step": torch.zeros(()), "average": torch.zeros(2, device=on_gpu)}))
    shard = Shard({name: torch.zeros(tensor.shape) for name, tensor in packer.tensors.items()})
    tensor_files.write(folder, {saved_on: shard})
    stored, _ = tensor_files.header(folder / saved_on)
    back = unpacked({"w": text}, stored, torch.device("meta"), steps_on_cpu=steps_on_cpu)["w"]
    return {key: value.device.type for key, value in back.items()}


def test_a_counter_comes_back_where_it_was_or_torch_keeps_it(tmp_path):
    """On a CPU nothing says which state goes to a GPU; "meta" stands for one."""
    assert placed(tmp_path / "1", saved_on="gpu") == {"step": "cpu", "average": "meta"}
    assert placed(tmp_path / "2", saved_on="cpu") == {"step": "cpu", "average": "meta"}
    assert placed(tmp_path / "3", saved_on="cpu", steps_on_cpu=False) == {"step": "meta", "average": "meta"}

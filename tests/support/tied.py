"""A net with tied weights, and what its training ends with by the equations; shares no code with the engine."""

import math
from collections import OrderedDict

import torch
from torch import nn

from tests.support.equations import modules_by_the_equations
from tests.support.oracle import Versions, leaf
from tests.support.runs import LR, MOMENTUM, WEIGHT_DECAY, train
from tests.support.slices import cut

# Ties of first and head, and of up, mid and more. K = 2: both are of the same stages, one of them under two names
# there. K = 3: each of its own stages. K = 4: of two and of three.
TIED_BALANCE = {1: [6], 2: [2, 4], 3: [1, 2, 3], 4: [2, 1, 1, 2]}
SHARED = ("first.2.weight", "head.1.weight"), ("up.1.weight", "mid.1.weight", "more.1.weight")


def tied_net(tied=True):
    torch.manual_seed(0)
    units = {
        "first": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10, bias=False)),
        **{name: nn.Sequential(nn.ReLU(), nn.Linear(10, 10)) for name in ("up", "mid", "more")},
        "down": nn.Sequential(nn.ReLU(), nn.Linear(10, 2)),
        "head": nn.Sequential(nn.ReLU(), nn.Linear(2, 10, bias=False)),
    }
    if tied:
        units["head"][1].weight = units["first"][2].weight
        units["mid"][1].weight = units["more"][1].weight = units["up"][1].weight
    return nn.Sequential(OrderedDict(units))


def train_tied(K, M, dtype=torch.float64, **options):
    """Return the weights of the net, and the summary, of a run on images; ``options`` are those of :func:`train`."""
    return train(K, M, dtype, **{"model": tied_net, "balance": TIED_BALANCE[K], "epochs": 2, **options})


class Shared(Versions):
    """W^0, W^1, ... of one parameter, each made from the one before with the sum of the gradients of all copies."""

    def __init__(self, parameter, lateness):
        owner = nn.Module()
        owner.weight = parameter
        super().__init__(owner, MOMENTUM, WEIGHT_DECAY)
        self.lateness, self.begin = lateness, 0  # D, and the updates when the pipeline was last empty

    def at(self, version):
        """What a module sees of it in its version: the updates with all groups but the last D before it."""
        return self.theta[self.begin + max(0, version - self.begin - self.lateness)]["weight"]


class Holder(Versions):
    """The versions of a module, of which some parameters, by their names, are ``shared``."""

    def __init__(self, module, shared, of_last, horizon=None):
        super().__init__(module, MOMENTUM, WEIGHT_DECAY)
        self.shared, self.of_last = shared, of_last
        self.horizon = horizon  # of SpecTrain's prediction, in updates: the mean staleness; None: no prediction
        for name in shared:
            for held in (self.theta[0], self.velocity, self.gradient):
                del held[name]

    def __setattr__(self, name, value):
        if name == "is_fresh":  # an epoch begins
            for one in getattr(self, "shared", {}).values():
                one.begin = one.updates
        super().__setattr__(name, value)

    @property
    def present(self):
        return self.theta[-1] | {name: one.at(self.updates) for name, one in getattr(self, "shared", {}).items()}

    def seen(self, version):
        if self.horizon is None:
            return self.leaves(version)
        own = ahead_of(self.theta, version, self.horizon)
        for name, one in self.shared.items():
            number = one.begin + max(0, version - one.begin - one.lateness)
            theta = [w["weight"] for w in one.theta]
            own |= {name: ahead_of([{name: w} for w in theta], number, self.horizon + one.lateness)[name]}
        return {name: leaf(weight) for name, weight in own.items()}

    def leaves(self, version):
        own = self.theta[version] | {name: one.at(version) for name, one in self.shared.items()}
        return {name: leaf(weight) for name, weight in own.items()}

    def accumulate(self, gradient, version=None):
        of_shared = {name: gradient[name] for name in self.shared}
        super().accumulate({name: g for name, g in gradient.items() if name not in of_shared}, version)
        for name, g in of_shared.items():
            self.shared[name].accumulate({"weight": g})

    def clip(self, longest):
        super().clip(longest)
        for together in self.of_last:  # those of one tie are clipped together
            norm = math.sqrt(sum(float((one.gradient["weight"] ** 2).sum()) for one in together))
            for one in together:
                one.gradient["weight"] = one.gradient["weight"] * min(1.0, longest / (norm + 1e-6))

    def skip(self):
        present = {name: self.theta[-1][name] for name in self.theta[-1]}
        self.gradient = {name: torch.zeros_like(weight) for name, weight in present.items()}
        self.theta.append(present)
        for together in self.of_last:
            for one in together:
                one.skip()

    def update(self, lr):
        shared, self.shared = self.shared, {}
        super().update(lr)
        self.shared = shared
        for together in self.of_last:
            for one in together:
                one.update(lr)


def ahead_of(theta, version, horizon):
    """Return w_s + t (w_s - w_s-1), by name."""
    before = theta[max(0, version - 1)]
    return {name: w + horizon * (w - before[name]) for name, w in theta[version].items()}


def tied_by_the_equations(
    K, M, delays, weights="stash", *, dtype=torch.float64, flushes=False, predict=False, **options
):
    """Return the weights of the net by the equations.

    ``flushes``: no copy is late. ``predict``: forwards see weights that are predicted by displacement, with a constant
    learning rate.
    """
    net = tied_net().to(dtype)
    modules = cut(net, num_stages=K, balance=TIED_BALANCE[K]) if K > 1 else [net]
    names = [[name for name, _ in module.named_parameters()] for module in modules]
    of_module, of_last = [{} for _ in modules], [{} for _ in modules]
    for group in SHARED:
        holders = [k for k in range(K) if any(name in names[k] for name in group)]
        late = 0 if flushes else math.ceil((delays[holders[0]] - delays[holders[-1]]) / M)
        one = Shared(net.get_parameter(group[0]), late)
        for k in holders:
            of_module[k][next(name for name in group if name in names[k])] = one
        of_last[holders[-1]].setdefault(tuple(holders), []).append(one)

    def versions(k, module):
        horizon = delays[k - 1] / M if predict else None
        return Holder(module, of_module[k - 1], [*of_last[k - 1].values()], horizon)

    made = modules_by_the_equations(modules, M, list(delays), weights, dtype=dtype, versions=versions, **options)
    finals = [{one_name: one.theta[-1]["weight"] for one_name, one in held.items()} for held in of_module]
    found = {name: final for held in finals for name, final in held.items()}
    for group in SHARED:
        made |= dict.fromkeys(group, next(found[name] for name in group if name in found))
    return made


__all__ = ["LR", "SHARED", "TIED_BALANCE", "tied_by_the_equations", "tied_net", "train_tied"]

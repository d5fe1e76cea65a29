"""Optimizers: those of torch, those that users write around them, and factories of many kinds."""

import functools

import torch
from torch import nn
from torch.optim import Optimizer

from adl_dist.optimizers import Muon
from tests.adversarial.cases import WIDTH, chain, linear

NUM_CLASSES = 5


def net():
    layers = [linear(6), nn.Tanh, linear(), lambda: nn.LayerNorm(WIDTH), linear(), nn.Tanh, linear(WIDTH, NUM_CLASSES)]
    return chain(*layers)()


def matrices():
    flat = functools.partial(linear, bias=False)
    return chain(flat(6), nn.Tanh, flat(), nn.Identity, flat(), nn.Tanh, flat(WIDTH, NUM_CLASSES))()


def partly_frozen():
    it = net()
    it[2].weight.requires_grad_(False)
    it[4].requires_grad_(False)
    return it


def front_frozen():
    it = net()
    it[0].requires_grad_(False)
    it[2].requires_grad_(False)
    return it


def named():
    it = net()
    for name, p in it.named_parameters():
        p.its_name = name
    return it


# --- Written by users --------------------------------------------------------------------------------------------

optim = torch.optim


class Lookahead(Optimizer):
    """Slow weights that follow every third step; the inner optimizer is an attribute, the count, too."""

    def __init__(self, inner, every=3):
        self.inner, self.every, self.calls = inner, every, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.calls += 1
        if self.calls % self.every == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class ScheduleFree(Optimizer):
    """Schedule-free SGD: counters live in the groups, the averaged point in the state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                z = state.setdefault("z", p.detach().clone())
                x = state.setdefault("x", p.detach().clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, share)
                p.copy_(z * 0.1 + x * 0.9)


class Shampoo(Optimizer):
    """Its state has lists and dictionaries."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sums = self.state[p].setdefault("sums", [torch.ones(n, dtype=p.dtype) for n in p.shape])
                info = self.state[p].setdefault("info", {"step": 0})
                info["step"] += 1
                step = p.grad.clone()
                for axis, total in enumerate(sums):
                    total += p.grad.pow(2).sum([i for i in range(p.ndim) if i != axis])
                    step /= total.view([-1 if i == axis else 1 for i in range(p.ndim)]).pow(0.25)
                p.sub_(step, alpha=group["lr"])


class ReplacesData(optim.SGD):
    """Writes ``p.data = ...``, as old code does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad.data


class ChangesGradients(optim.SGD):
    """Gradient centralisation: the gradients are changed in place before the step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class TwoInOne(Optimizer):
    """Muon for matrices, AdamW for the others, in one class."""

    def __init__(self, params, lr=1e-2):
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.parts = []
        if large := [p for p in params if p.ndim == 2]:
            self.parts.append(optim.Muon(large, lr=lr, weight_decay=0.1))
        if small := [p for p in params if p.ndim != 2]:
            self.parts.append(optim.AdamW(small, lr=lr))

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Sharpness(optim.SGD):
    """SAM: a step needs the loss once more."""

    def step(self, closure=None):
        if closure is None:
            raise TypeError("SAM needs a closure that computes the loss again")
        closure()
        return super().step()


class NotAnOptimizer:
    """Has all methods, but is no torch Optimizer."""

    def __init__(self, params, lr=0.1):
        self.params = list(params)
        self.param_groups = [{"params": self.params, "lr": lr}]
        self.state, self.defaults = {}, {"lr": lr}

    @torch.no_grad()
    def step(self):
        for p in self.params:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none=True):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state):
        pass


def averaged(params):
    """A hook after each step keeps an average, to which the weights are drawn."""
    it = optim.SGD(params, lr=0.05)
    mean = {p: p.detach().clone() for group in it.param_groups for p in group["params"]}

    @torch.no_grad()
    def draw(optimizer, args, kwargs):
        for p, m in mean.items():
            p.lerp_(m.lerp_(p, 0.2), 0.3)

    it.register_step_post_hook(draw)
    return it


# --- Factories ---------------------------------------------------------------------------------------------------


def split_by_shape(params):
    params = list(params)
    groups = [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02})
    return optim.SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9)


def filtering(params):
    return optim.SGD(filter(lambda p: p.requires_grad, params), lr=0.05, momentum=0.9)


def by_name(params):
    """Decay for those whose name says so; the names were written on the parameters."""
    params = list(params)
    decays = [p for p in params if p.its_name.endswith("weight")]
    others = [p for p in params if not p.its_name.endswith("weight")]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others}]
    return optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-3)


of = functools.partial
OPTIMIZERS = {
    "sgd_plain": of(optim.SGD, lr=0.1),
    "sgd_nesterov": of(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_one_by_one": of(optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "sgd_fused": of(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam_amsgrad": of(optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam_tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(1e-2, dtype=torch.float64)),
    "adamw_fused": of(optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "adagrad": of(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adafactor": of(optim.Adafactor, lr=1e-2),
    "asgd": of(optim.ASGD, lr=1e-2, t0=2),
    "torchs_muon": of(optim.Muon, lr=1e-2, weight_decay=0.1),
    "muon_for_matrices": of(Muon, rest_options={"eps": 1e-3}),
    "muon_and_sgd": of(Muon, rest="sgd", rest_options={"weight_decay": 0.1}),
    "muon_partly_frozen": of(Muon, rest="sgd"),
    "schedule_free": ScheduleFree,
    "shampoo": Shampoo,
    "replaces_data": of(ReplacesData, lr=0.1),
    "changes_gradients": of(ChangesGradients, lr=0.1, momentum=0.9),
    "two_in_one": TwoInOne,
    "step_hook": averaged,
    "lookahead": lambda p: Lookahead(optim.SGD(p, lr=0.05, momentum=0.9)),
    "split_by_shape": split_by_shape,
    "filtering": filtering,
    "by_name": by_name,
    "lbfgs": of(optim.LBFGS, lr=0.1),
    "sharpness": of(Sharpness, lr=0.1),
    "not_an_optimizer": NotAnOptimizer,
}
REFUSED = {
    "lbfgs": "LBFGS.step needs a closure, which evaluates the loss itself, and no pipeline can do that; choose another",
    "sharpness": "optimizer: Sharpness fails in update 0: TypeError: SAM needs a closure .*; expected step",
    "not_an_optimizer": "optimizer must return a torch.optim.Optimizer, got NotAnOptimizer; expected a function of",
}
BUILDS = {"torchs_muon": matrices, "muon_partly_frozen": partly_frozen, "filtering": front_frozen, "by_name": named}

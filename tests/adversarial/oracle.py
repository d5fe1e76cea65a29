"""Training with delayed gradients on one uncut model, in plain torch. Shares no code with the engine.

A backward that uses the weights of its own forward (``stash``) is plain autograd through the whole model, if every
parameter holds the version that its stage had then. Stage k has d_k micro-batches' delay: micro-batch b of an epoch
meets max(0, floor((b - d_k) / M)) updates of it. So it is enough to make each stage's update d_k micro-batches late,
and nothing has to be copied: whatever refers to a parameter (a tie, an alias, a hook) sees what it sees uncut.
"""

from collections import deque

import torch

from adl_dist.seeds import stream_seed


def delays_of(method, K, M):
    """d_0 .. d_{K-1} of a method that stashes: floor((b - d) / M) updates are what it meets."""
    if method in ("adl", "fdg"):
        return [2 * (K - 1 - k) for k in range(K)]
    if method in ("ddg", "pipedream"):
        return [K - 1 - k for k in range(K)]
    if method in ("bp", "gpipe", "1f1b"):
        return [0] * K
    if method == "2bw":  # one version back for the whole group, in every stage
        return [M] * K
    raise ValueError(method)


class Uncut:
    """Trains ``model`` as K stages would, without cutting it.

    Args:
        owner: the stage (0 ..) of each parameter, by its name; all 0: plain torch.
        optimizer: makes the optimizer of one stage from its parameters.
        lr_schedule: makes the schedule of one optimizer, stepped per update, or None.
        begins: unit of ``model`` where stages 1 .. begin; given, torch's random stream is that of (stage, micro-batch).
        count: what the loss of a target averages over, as a number; None: samples.
    """

    def __init__(self, model, owner, optimizer, loss_fn, *, delays, M, lr_schedule=None, begins=None, count=None):
        self.model, self.loss_fn, self.delays, self.M = model, loss_fn, delays, M
        self.count = count or len
        self.own = owned(model, owner, len(delays))
        self.optimizers = [optimizer(own) if any(p.requires_grad for p in own) else None for own in self.own]
        self.schedules = [lr_schedule(o) if lr_schedule and o is not None else None for o in self.optimizers]
        self.losses, self.outputs, self.validation = [], [], []
        self._epoch = self._micro_batch = 0
        self._reseeds = begins is not None
        for k, unit in enumerate(begins or (), start=1):
            model[unit].register_forward_pre_hook(lambda *_, k=k: self._seed(k))

    def _seed(self, stage):
        if self.model.training:
            torch.manual_seed(stream_seed(0, "dropout", self._epoch, stage, self._micro_batch))

    def epoch(self, batches):
        """Train on ``batches`` of (input, target); the pipeline is empty before and after."""
        self.model.train()
        pending, made, group_grads = [deque() for _ in self.own], [0] * len(self.own), {}
        sizes = [self.count(target) for _, target in batches]
        for b, (x, target) in enumerate(batches):
            self._micro_batch = b
            for k, delay in enumerate(self.delays):
                while made[k] < (b - delay) // self.M:
                    self._update(k, pending[k].popleft())
                    made[k] += 1
            for p in self.model.parameters():
                p.grad = group_grads.get(p)
            if self._reseeds:
                self._seed(0)
            loss = self.loss_fn(self.model(x.clone()), target)
            self.losses.append(loss.detach().clone())
            group = sizes[b // self.M * self.M :][: self.M]
            (loss * (sizes[b] / sum(group))).backward()
            group_grads = {p: p.grad for p in self.model.parameters()}
            if (b + 1) % self.M == 0 or b + 1 == len(batches):
                for k, own in enumerate(self.own):
                    pending[k].append([group_grads.get(p) for p in own])
                group_grads = {}
        for k, left in enumerate(pending):
            for gradients in left:
                self._update(k, gradients)
        self._epoch += 1

    def cut_again(self, owner, optimizer, delays, lr_schedule):
        """Go on as other stages, each with its parameters' part of what the optimizers remember."""
        old = {p: o.state[p] for o in self.optimizers if o is not None for p in o.state}
        made = max(schedule.last_epoch for schedule in self.schedules if schedule is not None)
        self.delays, self.own = delays, owned(self.model, owner, len(delays))
        self.optimizers = [optimizer(own) if any(p.requires_grad for p in own) else None for own in self.own]
        for own, new in zip(self.own, self.optimizers, strict=True):
            for p in own:
                if p in old:
                    new.state[p] = old[p]
        self.schedules = [None if o is None else lr_schedule(o) for o in self.optimizers]
        for new, schedule in zip(self.optimizers, self.schedules, strict=True):
            if new is not None:
                for _ in range(made):
                    new._opt_called = True  # or the schedule warns
                    schedule.step()

    def _update(self, k, gradients):
        for p, gradient in zip(self.own[k], gradients, strict=True):
            p.grad = gradient
        if self.optimizers[k] is not None:
            self.optimizers[k].step()
            if self.schedules[k] is not None:
                self.schedules[k].step()
        for p in self.own[k]:
            p.grad = None

    @torch.no_grad()
    def evaluate(self, batches):
        """Keep the outputs and the mean loss of ``batches``."""
        self.model.eval()
        outputs = [self.model(x.clone()) for x, _ in batches]
        counts = [self.count(target) for _, target in batches]
        losses = [self.loss_fn(output, target) for output, (_, target) in zip(outputs, batches, strict=True)]
        self.outputs += outputs
        self.validation.append(float(sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)))


def owned(model, owner, K):
    """The parameters of each of K stages, in the model's order."""
    stages = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages.setdefault(parameter, set()).add(owner[name] if K > 1 else 0)
    torn = [name for name, p in model.named_parameters() if len(stages[p]) > 1]
    assert torn == [], f"one parameter in two stages: {torn}"
    return [[p for p in model.parameters() if stages[p] == {k}] for k in range(K)]

"""Training with delayed gradients on one uncut model, in plain torch. Shares no code with the engine.

A backward that uses the weights of its own forward (``stash``) is plain autograd through the whole model, if every
parameter holds the version that its stage had then. Stage k has a delay of 2 (K - 1 - k) micro-batches (ADL):
micro-batch b of an epoch meets max(0, floor((b - d_k) / M)) updates of it. So it is enough to make each stage's update
d_k micro-batches late, and nothing has to be copied.
"""

from collections import deque


class Uncut:
    """Trains ``model`` as K stages would, without cutting it.

    Args:
        own: the parameters of each stage.
        optimizer: makes the optimizer of one stage from its parameters.
        lr_schedule: makes the schedule of one optimizer, stepped per update.
    """

    def __init__(self, model, own, optimizer, loss_fn, *, M, lr_schedule):
        self.model, self.own, self.loss_fn, self.M = model, own, loss_fn, M
        self.delays = [2 * (len(own) - 1 - k) for k in range(len(own))]
        trained = [any(p.requires_grad for p in one) for one in own]
        self.optimizers = [optimizer(one) if trains else None for one, trains in zip(own, trained, strict=True)]
        self.schedules = [o and lr_schedule(o) for o in self.optimizers]

    def epoch(self, batches):
        """Train on ``batches`` of (input, target); the pipeline is empty before and after."""
        self.model.train()
        pending, made, group_grads = [deque() for _ in self.own], [0] * len(self.own), {}
        for b, (x, target) in enumerate(batches):
            for k, delay in enumerate(self.delays):
                while made[k] < (b - delay) // self.M:
                    self._update(k, pending[k].popleft())
                    made[k] += 1
            for p in self.model.parameters():
                p.grad = group_grads.get(p)
            group = batches[b // self.M * self.M :][: self.M]
            loss = self.loss_fn(self.model(x.clone()), target)
            (loss * (len(target) / sum(len(of_group) for _, of_group in group))).backward()
            group_grads = {p: p.grad for p in self.model.parameters()}
            if (b + 1) % self.M == 0 or b + 1 == len(batches):
                for k, own in enumerate(self.own):
                    pending[k].append([group_grads.get(p) for p in own])
                group_grads = {}
        for k, left in enumerate(pending):
            for gradients in left:
                self._update(k, gradients)

    def _update(self, k, gradients):
        for p, gradient in zip(self.own[k], gradients, strict=True):
            p.grad = gradient
        if self.optimizers[k] is not None:
            self.optimizers[k].step()
            self.schedules[k].step()
        for p in self.own[k]:
            p.grad = None

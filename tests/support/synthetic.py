"""Synthetic gradients (DNI) written straight from the equations of Jaderberg et al. Shares no code with the engine.

As in :mod:`tests.support.oracle`: it goes through the micro-batches one by one, keeps every past version of every
module and head, and looks up those that the equations name.
"""

import copy

import torch
from torch import nn
from torch.func import functional_call

from tests.support.oracle import Versions, leaf, place_in_group, state_of


def train_by_synthetic_gradients(
    modules, heads, epochs, *, M, loss_fn, lr, momentum=0.0, weight_decay=0.0, delay=2, sees_target=False,
    reduction="mean", head_lr_factor=1.0, clip_norm=None, num_terms=len,
):  # fmt: skip
    """Train; return the state of the modules, that of each head, and (square error, square) of all it was to predict.

    Module k (from 1) computes h_k = f_k(h_k-1), and head k predicts n dL/dh_k, with n the samples that L is the mean
    over in all: the gradient of each sample's own loss. delta_K is the gradient of the loss, and
    delta_k = (dh_k/dh_k-1)^T p_k with p_k the prediction of head k: what head k-1 wants to have predicted.

    Args:
        delay: head k learns from micro-batch b after the forward of b + delay.
        num_terms: from a target to what ``loss_fn`` divides by, if not samples. Heads count samples all the same.
    """
    K = len(modules)
    modules = [copy.deepcopy(module).train() for module in modules]
    heads = [copy.deepcopy(head).train() for head in heads]
    theta = [Versions(module, momentum, weight_decay) for module in modules]
    phi = [Versions(head, momentum, weight_decay) for head in heads]
    errors = [[] for _ in heads]

    for batches in epochs:
        base = theta[0].updates
        for b, (x, target) in enumerate(batches):
            (of_terms, _), (share, last_of_group) = (place_in_group(batches, b, M, n) for n in (num_terms, len))
            weight, of_loss = (share, of_terms) if reduction == "mean" else (1.0, 1.0)
            sees = (target,) if sees_target else (None,)
            h, outs, arrived = x, [], [None] * (K + 1)
            for k, module in enumerate(modules):
                z, w = leaf(h), theta[k].leaves(base + b // M)  # every group before it is applied
                h = functional_call(module, w, (z,))
                outs.append(h.detach())
                if k + 1 == K:
                    given = torch.autograd.grad(loss_fn(h, target) * of_loss, h, retain_graph=True)
                else:
                    # The head has learned from b - delay - 1 and all before, which make so many whole groups.
                    seen = phi[k].leaves(base + max(0, b - delay) // M)
                    with torch.no_grad():
                        given = (functional_call(heads[k], seen, (h.detach(), *sees)) * (weight / len(x)),)
                arrived[k], *gradient = torch.autograd.grad(h, [z, *w.values()], given)
                theta[k].accumulate(dict(zip(w, gradient, strict=True)))
            for k, head in enumerate(heads):
                w = phi[k].leaves(base + b // M)
                wanted = arrived[k + 1] * (len(x) / weight)
                error = (functional_call(head, w, (outs[k], *sees)) - wanted).square().mean()
                errors[k].append((float(error.detach()), float(wanted.square().mean())))
                gradient = torch.autograd.grad(error * weight, [*w.values()])
                phi[k].accumulate(dict(zip(w, gradient, strict=True)))
            if last_of_group:
                for versions, factor in [(v, 1.0) for v in theta] + [(v, head_lr_factor) for v in phi]:
                    if clip_norm is not None:
                        versions.clip(clip_norm)
                    versions.update(lr[versions.updates] * factor)

    return state_of(modules, theta), [state_of([head], [w]) for head, w in zip(heads, phi, strict=True)], errors


class ByHand(nn.Module):
    """A head as the paper has it, on images [C, H, W]: hidden convolutions with BatchNorm and ReLU, the last zero."""

    def __init__(self, weights, num_layers, num_classes=0):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w.detach().clone()) for w in weights)
        self.num_layers, self.num_classes = num_layers, num_classes

    def forward(self, h, target):
        if self.num_classes:
            masks = torch.zeros(len(h), self.num_classes, *h.shape[2:], dtype=h.dtype)  # an ignored one has none
            for sample, label in enumerate(target.tolist()):
                if label >= 0:
                    masks[sample, label] = 1.0
            h = torch.cat([h, masks], dim=1)
        weights = iter(self.weights)
        apply = nn.functional.linear if h.ndim == 2 else lambda x, w, b=None: torch.conv2d(x, w, b, padding=1)
        samples = (0, *range(2, h.ndim))
        for _ in range(self.num_layers):
            y = apply(h, next(weights))
            gamma, beta = (next(weights).view(1, -1, *[1] * (h.ndim - 2)) for _ in range(2))
            mean, var = y.mean(samples, keepdim=True), y.var(samples, correction=0, keepdim=True)
            h = ((y - mean) / (var + 1e-5).sqrt() * gamma + beta).relu()
        return apply(h, next(weights), next(weights))

"""Accumulated Decoupled Learning written straight from the paper's equations. Shares no code with the engine.

It keeps every past weight version of every module and, for each micro-batch, calls autograd once on the network
assembled from the versions that Eq. 15 names. Modules are counted from 1, as in the paper.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


def train_by_the_equations(
    modules: Sequence[nn.Module],
    epochs: Sequence[Sequence[tuple[Tensor, Tensor]]],
    *,
    M: int,
    loss_fn: nn.Module,
    lr: Sequence[float],
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> dict[str, Tensor]:
    """Train and return all parameters and buffers.

    Args:
        modules: module 1..K, their parameter names being those of the whole network.
        epochs: the micro-batches U_0, U_1, ... of each epoch; the pipeline is empty between epochs.
        M: accumulation steps.
        lr: gamma_s for each update s of the whole run.
    """
    K = len(modules)
    # theta[k-1][s]: the parameters of module k after s updates.
    theta = [[{n: p.detach().clone() for n, p in m.named_parameters()}] for m in modules]
    velocity = [{n: torch.zeros_like(p) for n, p in t[0].items()} for t in theta]
    for module in modules:
        module.train()

    for batches in epochs:
        updates_before = len(theta[0]) - 1
        gradient = [{n: torch.zeros_like(p) for n, p in t[0].items()} for t in theta]
        for b, (x, target) in enumerate(batches):
            # Eq. 15: batch b meets theta_k with update index floor((b - 2(K - k)) / M), none before the first.
            index = [updates_before + max(0, math.floor((b - 2 * (K - k)) / M)) for k in range(1, K + 1)]
            mixed = [{n: p.clone().requires_grad_() for n, p in theta[k][index[k]].items()} for k in range(K)]
            z = x
            for module, parameters in zip(modules, mixed, strict=True):
                z = functional_call(module, parameters, (z,))
            loss = loss_fn(z, target)

            # Eq. 16 with 1/M as the share of samples, which is 1/M for micro-batches of equal size.
            group = batches[b // M * M : b // M * M + M]
            share = len(target) / sum(len(t) for _, t in group)
            leaves = [p for parameters in mixed for p in parameters.values()]
            g = iter(torch.autograd.grad(loss * share, leaves))
            for k in range(K):
                for name in mixed[k]:
                    gradient[k][name] += next(g)

            if (b + 1) % M == 0 or b + 1 == len(batches):
                s = len(theta[0]) - 1
                for k in range(K):
                    new = {}
                    for name, w in theta[k][s].items():
                        step = gradient[k][name] + weight_decay * w
                        velocity[k][name] = momentum * velocity[k][name] + step
                        new[name] = w - lr[s] * velocity[k][name]
                        gradient[k][name] = torch.zeros_like(w)
                    theta[k].append(new)

    final: dict[str, Tensor] = {}
    for module, versions in zip(modules, theta, strict=True):
        final |= {n: b.detach().clone() for n, b in module.named_buffers()} | versions[-1]
    return final

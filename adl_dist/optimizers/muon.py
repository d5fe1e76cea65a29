"""Muon for the matrices of a stage, AdamW or SGD for the rest."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adl_dist.optimizers.by_role import ByRole, check_values, checked_options


class Muon(ByRole):
    """Muon (Jordan et al. 2024) by torch's own ``torch.optim.Muon``, for the matrices and convolutions of a model.

    For each matrix W [out, rest] with gradient G, momentum mu, rate eta and weight decay lambda:

        B <- mu B + (1 - mu) G
        O <- NewtonSchulz((1 - mu) G + mu B)       nearly the U V^T of its singular value decomposition U S V^T
        W <- (1 - eta lambda) W - eta sqrt(max(1, out / rest)) O

    The weights of a convolution are seen as [out, rest]. Embeddings, the head, norms, biases and all that is no matrix
    are trained by ``rest``. The direction of a step does not depend on the gradient's length, which is why it bears
    stale gradients better than SGD and Adam do (Zmushko et al., ICML 2026, arXiv 2606.30634). Newton-Schulz computes in
    bfloat16, whatever the dtype of the weights.
    """

    def __init__(  # 12: those of torch's Muon, and four for the rest
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.02,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        rest: str = "adamw",
        rest_lr: float | None = None,
        rest_options: Mapping[str, Any] | None = None,
        rest_names: Sequence[str] = (),
    ) -> None:
        """Take the parameters of a stage.

        Args:
            params: parameters of a model that :func:`~adl_dist.optimizers.mark_roles` has seen, as a Trainer's has.
            lr: rate of the matrices, eta.
            weight_decay: lambda, of the matrices; it is multiplied by the rate.
            momentum: mu.
            nesterov: whether the gradient looks ahead, as above; else O is that of B.
            ns_steps: steps of the Newton-Schulz iteration.
            adjust_lr_fn: the factor of the rate, by shape, of ``torch.optim.Muon``: None (``original``, as above), or
                ``match_rms_adamw``, with which rates that are good for AdamW are good here.
            rest: optimizer of the rest: ``adamw`` (betas .9 and .95, no weight decay) or ``sgd`` (momentum .9).
            rest_lr: its rate; None: 0.003 for ``adamw``, 0.1 for ``sgd``.
            rest_options: its other options, by torch's names.
            rest_names: parameters that belong to the rest, too: names of the uncut model, with ``*`` and ``?``.

        Raises:
            ConfigError: an option that is not known, a value out of range, or parameters of another model.
        """
        options = {
            **{"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov},
            **{"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn},
        }
        of_matrices = checked_options(torch.optim.Muon, options, "optimizer")
        more: dict[str, Any] = {"rest": rest, "rest_lr": rest_lr, "rest_options": rest_options}
        super().__init__(params, of_matrices, **more, rest_names=rest_names)

    def check_matrices(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError if torch's Muon refuses a value in ``group``."""
        check_values(torch.optim.Muon, group, where)

    def step_matrices(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Update ``params`` [out, ...] by torch's Muon."""
        inner = torch.optim.Muon([{"params": []}])
        weights, state = [], defaultdict[torch.Tensor, Any](dict)
        for p in params:
            assert p.grad is not None
            weights.append(p.detach().flatten(1))
            weights[-1].grad = p.grad.flatten(1)
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            state[weights[-1]]["momentum_buffer"] = self.state[p]["momentum_buffer"].view(len(p), -1)
        inner.param_groups, inner.state = [{**group, "params": weights}], state
        inner.step()
        for p, weight in zip(params, weights, strict=True):
            if weight.data_ptr() != p.data_ptr():  # weights in the memory format channels_last
                p.copy_(weight.view(p.shape))

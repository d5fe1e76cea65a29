"""Muon for the matrices of a stage, AdamW or SGD for the rest."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adl_dist.optimizers.by_role import ByRole, check_values, checked_options


class Muon(ByRole):
    """Muon (Jordan et al. 2024) for matrices, by ``torch.optim.Muon``.

    For each matrix W [out, rest] with gradient G, momentum mu, rate eta and weight decay lambda:

        B <- mu B + (1 - mu) G
        O <- NewtonSchulz((1 - mu) G + mu B)       nearly the U V^T of its singular value decomposition U S V^T
        W <- (1 - eta lambda) W - eta sqrt(max(1, out / rest)) O

    The weights of a convolution are seen as [out, rest]. ``rest`` trains embeddings, the head, norms, biases and other
    parameters that are not matrices. The direction of a step does not depend on the gradient's length, so Muon
    tolerates stale gradients better than SGD and Adam (Zmushko et al., ICML 2026, arXiv 2606.30634). Newton-Schulz
    computes in bfloat16 for any dtype of the weights.
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
        """Divide the parameters of a stage into matrices and the rest.

        Args:
            params: parameters of a model with marked roles, see :func:`~adl_dist.optimizers.mark_roles`; a Trainer
                marks its model.
            lr: eta, the rate of the matrices.
            weight_decay: lambda of the matrices; it is multiplied by the rate.
            momentum: mu.
            nesterov: whether to use Nesterov's momentum, as above; otherwise O is NewtonSchulz(B).
            ns_steps: steps of the Newton-Schulz iteration.
            adjust_lr_fn: the rate's factor by shape: ``original`` (default, as above) or ``match_rms_adamw``, for which
                good rates are those of AdamW.
            rest: optimizer of the rest: ``adamw`` (betas .9 and .95, no weight decay) or ``sgd`` (momentum .9).
            rest_lr: the rate of the rest, by default 0.003 for ``adamw`` and 0.1 for ``sgd``.
            rest_options: other options of the optimizer of the rest, by torch's names.
            rest_names: further parameters of the rest: names of the uncut model, with ``*`` and ``?``.

        Raises:
            ConfigError: If an option is unknown or out of range, or the parameters have no role.
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

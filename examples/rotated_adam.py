"""Adam with basis rotation (Jung et al., ICML 2026, arXiv 2602.03515) for matrices, AdamW or SGD for the rest.

In this folder: adl-dist train optimizer._target_=rotated_adam.RotatedAdam optimizer.lr=0.003

With gradient G [out, rest], at update t = 0, 1, ..., U and V being identities at first:

    M <- b1 M + (1 - b1) G,   L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G
    U <- Q of qr(L U), V <- Q of qr(R V)    at t = every, 2 every, ...
    S <- b2 S + (1 - b2) (U^T G V)^2
    W <- (1 - lr wd) W - lr U [ (U^T M V / (1 - b1^(t+1))) / (sqrt(S / (1 - b2^(t+1))) + eps) ] V^T
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.optimizers.by_role import ByRole


class RotatedAdam(ByRole):
    """``source=first``: L and R are those of M; ``unilateral``: only the shorter side is rotated, up to ``max_dim``."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 3e-3, *, betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-8, weight_decay: float = 0.01, rotation: str = "bilateral", source: str = "second",
        every: int = 10, max_dim: int = 2048, **rest: Any,
    ) -> None:  # fmt: skip
        group = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        group |= {"rotation": rotation, "source": source, "every": every, "max_dim": max_dim}
        super().__init__(params, group, **rest)

    def step_matrices(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Update ``params`` by the equations above."""
        for p in params:
            grad, state, (b1, b2) = p.grad.flatten(1), self.state[p], group["betas"]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
            t, state["step"] = state["step"], state["step"] + 1
            M, bases = state["exp_avg"].lerp_(grad, 1 - b1), list[Tensor | None]()
            X = M if group["source"] == "first" else grad
            for side, G in (("left", X), ("right", X.mT)):
                shorter = "left" if len(grad) <= grad.shape[1] else "right"
                if len(G) <= group["max_dim"] and (group["rotation"] == "bilateral" or side == shorter):
                    moments = state.setdefault(side, G.new_zeros(len(G), len(G)))
                    moments.mul_(b2).addmm_(G, G.mT, alpha=1 - b2)
                    if t and t % group["every"] == 0:
                        state[f"{side}_basis"] = torch.linalg.qr(turned(moments, None, state.get(f"{side}_basis"))).Q
                bases.append(state.get(f"{side}_basis"))
            S = state["exp_avg_sq"].mul_(b2).addcmul_(rotated := turned(grad, *bases), rotated, value=1 - b2)
            step = turned(M, *bases) / (1 - b1 ** (t + 1)) / ((S / (1 - b2 ** (t + 1))).sqrt() + group["eps"])
            step = turned(step, *(None if basis is None else basis.mT for basis in bases))
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * step.view(p.shape))


def turned(X: Tensor, U: Tensor | None, V: Tensor | None) -> Tensor:
    """Return U^T X V, where None is the identity."""
    X = X if U is None else U.mT @ X
    return X if V is None else X @ V

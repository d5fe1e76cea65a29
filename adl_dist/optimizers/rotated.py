"""Adam in the eigenbasis of the gradient's second moments for the matrices of a stage, AdamW or SGD for the rest."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.optimizers.by_role import ByRole

ROTATIONS, SOURCES = ("bilateral", "unilateral"), ("second", "first")


class RotatedAdam(ByRole):
    """Adam with basis rotation (Jung et al., ICML 2026, arXiv 2602.03515), for delayed gradients.

    Adam's step by coordinates suffers most from delay where the loss is curved along other directions than these, so
    each matrix W [out, rest] is stepped in a basis U [out, out], V [rest, rest] close to its principal directions.
    With gradient G, at update t = 0, 1, ..., U and V being identities at first:

        M <- b1 M + (1 - b1) G
        L <- b2 L + (1 - b2) G G^T                 from M in place of G with source=first
        R <- b2 R + (1 - b2) G^T G
        U <- Q of qr(L U), V <- Q of qr(R V)       a power step, at t = f, 2 f, ...
        S <- b2 S + (1 - b2) (U^T G V)^2
        W <- (1 - eta lambda) W - eta U [ (U^T M V / (1 - b1^(t+1))) / (sqrt(S / (1 - b2^(t+1))) + eps) ] V^T

    S stays as it is when the basis moves. SOAP (Vyas et al. 2024) begins with eigenvectors of the first gradient, and
    applies no step then; here the first step is applied, and in that basis U^T G V would be diagonal, so that Adam
    would make full steps of the rounding errors next to the diagonal. Memory: M, S, and 2 (out^2 + rest^2) numbers for
    each matrix; without rotation of a side, none for that side.
    """

    def __init__(  # 14: those of AdamW, four of the rotation, and four for the rest
        self,
        params: Iterable[nn.Parameter],
        lr: float = 3e-3,
        *,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rotation: str = "bilateral",
        source: str = "second",
        every: int = 10,
        max_dim: int = 2048,
        rest: str = "adamw",
        rest_lr: float | None = None,
        rest_options: Mapping[str, Any] | None = None,
        rest_names: Sequence[str] = (),
    ) -> None:
        """Take the parameters of a stage.

        Args:
            params: parameters of a model that :func:`~adl_dist.optimizers.mark_roles` has seen, as a Trainer's has.
            lr: rate of the matrices, eta.
            betas: b1 and b2.
            eps: added to the root.
            weight_decay: lambda, of the matrices; it is multiplied by the rate.
            rotation: ``bilateral``, or ``unilateral``: only the shorter side is rotated.
            source: whether the basis follows the ``second`` moments of the gradient, or of M, the ``first``.
            every: updates from one power step to the next, f.
            max_dim: a longer side is not rotated.
            rest: optimizer of the rest: ``adamw`` (betas .9 and .95, no weight decay) or ``sgd`` (momentum .9).
            rest_lr: its rate; None: 0.003 for ``adamw``, 0.1 for ``sgd``.
            rest_options: its other options, by torch's names.
            rest_names: parameters that belong to the rest, too: names of the uncut model, with ``*`` and ``?``.

        Raises:
            ConfigError: an option that is not known, a value out of range, or parameters of another model.
        """
        group: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        group |= {"rotation": rotation, "source": source, "every": every, "max_dim": max_dim}
        self.check_matrices(group, "optimizer")
        more: dict[str, Any] = {"rest": rest, "rest_lr": rest_lr, "rest_options": rest_options}
        super().__init__(params, group, **more, rest_names=rest_names)

    def check_matrices(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError, which begins with ``where``, for a value in ``group`` that is out of range."""
        _check(group, where)

    def step_matrices(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Update ``params`` [out, ...] as above."""
        for p in params:
            assert p.grad is not None
            if not (state := self.state[p]):
                state.update(_fresh(p, group))
            step = _stepped(state, p.grad.flatten(1), group)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(group["lr"] * step.view(p.shape))


def _check(group: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for an option of the matrices that is out of range."""
    b1, b2 = group["betas"] if len(group["betas"]) == 2 else (-1, -1)
    for is_right, key, expected in (
        (group["lr"] >= 0, "lr", "at least 0"),
        (0 <= b1 < 1 and 0 <= b2 < 1, "betas", "two numbers in [0, 1)"),
        (group["eps"] >= 0, "eps", "at least 0"),
        (group["weight_decay"] >= 0, "weight_decay", "at least 0"),
        (group["rotation"] in ROTATIONS, "rotation", f"one of {', '.join(ROTATIONS)}"),
        (group["source"] in SOURCES, "source", f"one of {', '.join(SOURCES)}"),
        (group["every"] >= 1, "every", "at least 1 update"),
        (group["max_dim"] >= 0, "max_dim", "at least 0"),
    ):
        if not is_right:
            way_out = "correct it, or omit it for the default"
            raise ConfigError(f"{where}.{key} must be {expected}, got {group[key]}; {way_out}")


def _fresh(p: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of ``p`` before its first step; ``left`` and ``right`` only for a side that is rotated."""
    rows, columns = len(p), p.numel() // len(p)
    sides = {"left": rows, "right": columns}
    if group["rotation"] == "unilateral":
        sides = {"left": rows} if rows <= columns else {"right": columns}
    state: dict[str, Any] = {"step": 0, "exp_avg": p.new_zeros(rows, columns), "exp_avg_sq": p.new_zeros(rows, columns)}
    return state | {side: p.new_zeros(n, n) for side, n in sides.items() if n <= group["max_dim"]}


def _stepped(state: dict[str, Any], grad: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Take in ``grad`` [out, rest], and return the step [out, rest] before the learning rate."""
    b1, b2 = group["betas"]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(grad, 1 - b1)
    of = mean if group["source"] == "first" else grad
    bases: dict[str, Tensor | None] = {}
    for side, moments in (("left", of), ("right", of.mT)):
        if side in state:
            state[side].mul_(b2).addmm_(moments, moments.mT, alpha=1 - b2)
            if state["step"] and state["step"] % group["every"] == 0:
                basis = state.get(f"{side}_basis")
                moved = state[side] if basis is None else state[side] @ basis
                state[f"{side}_basis"] = torch.linalg.qr(moved).Q
        bases[side] = state.get(f"{side}_basis")
    rotated = _rotated(grad, bases["left"], bases["right"])
    square.mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
    state["step"] += 1
    root = (square / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
    step = _rotated(mean, bases["left"], bases["right"]).div_(1 - b1 ** state["step"]).div_(root)
    back = [None if basis is None else basis.mT for basis in bases.values()]
    return _rotated(step, *back)


def _rotated(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return U^T X V; None: the identity. A copy in any case."""
    matrix = matrix.clone() if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right

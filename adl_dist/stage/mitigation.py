"""Mitigations of staleness in one stage, for a mean delay of t updates.

The table of mitigations is in :mod:`adl_dist.schedule.mitigations`. A stage whose gradients are fresh has no
mitigation, and runs the same code as without any. In the equations w_s are the weights after s updates, eta_s the
learning rate with all factors, and u_s all that the optimizer itself takes off the weights in update s.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from adl_dist.errors import ConfigError
from adl_dist.schedule import Pipeline
from adl_dist.schedule.actions import Tie

Group = dict[str, Any]


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Compute without a graph, on parameters as plain tensors, in the block."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class Mitigation:
    """The mitigations chosen for one stage, and their state.

    Attributes:
        compensates: whether gradients of older versions are corrected.
        history: for each parameter, the tensors of its last updates that mitigations need; saved in checkpoints.
    """

    def __init__(
        self, pipeline: Pipeline, stage: int, optimizer: Optimizer, lr_factor: float, tie: Tie | None = None
    ) -> None:
        """Mitigate the staleness of ``stage``, or of its copy of tied weights.

        The learning rates of ``optimizer`` are multiplied by ``lr_factor``. With ``tie``, ``optimizer`` trains these
        weights, and all their copies use the same staleness, the mean of all of them.

        Raises:
            ConfigError: If the mitigations need a different optimizer.
        """
        self._method, self._optimizer, self._lr_factor = pipeline.method, optimizer, lr_factor
        at = stage if tie is None else tie
        self._rows, self._staleness = pipeline.mitigations(at), pipeline.mean_staleness(at)
        self._lag, self._remembers_displacement = pipeline.feedback_lag(at), pipeline.remembers_displacement(at)
        # Copies of tied weights step alike, but each stage looks ahead as far as its own gradients are late.
        late = pipeline.steady_staleness(stage) if tie is None else pipeline.tied_staleness(tie, stage)
        self._horizon_updates = sum(late) / len(late)
        self._looks_ahead = not self._rows.isdisjoint({"predict", "nesterov"})
        self._is_stale = True
        self.compensates = "delay_compensation" in self._rows
        self.history: dict[Tensor, dict[str, Any]] = {}
        self._check(f"stage {stage}")

    def _check(self, where: str) -> None:
        """Raise ConfigError if a mitigation does not work with the optimizer."""
        kind, method = type(self._optimizer), self._method
        momenta = [_momentum(group) for group in self._optimizer.param_groups]
        is_sgd, is_adam, has_momentum = kind is SGD, kind in (Adam, AdamW), all(mu > 0 for mu in momenta)
        needs = {
            "spike": ("torch.optim.SGD with momentum", is_sgd and has_momentum),
            "nesterov": ("an optimizer without momentum, for which it stands", not any(momenta)),
            "predict_from=momentum": ("SGD with momentum, Adam or AdamW", is_adam or (is_sgd and has_momentum)),
            "predict_horizon=geometric": ("an optimizer with momentum", has_momentum),
        }
        chosen = {*self._rows}
        if "predict" in chosen:
            chosen |= {f"predict_from={method.predict_from}", f"predict_horizon={method.predict_horizon}"}
        for name, (wanted, fits) in needs.items():
            if name in chosen and not fits:
                key = f"method.{name}" if "=" in name else f"method.mitigation={name}"
                found = " and ".join(f"{momentum:g}" for momentum in sorted({*momenta}))  # of each group
                raise ConfigError(
                    f"{where}: {key} needs {wanted}, got {kind.__name__} with momentum {found}; use another optimizer "
                    "or another mitigation"
                )

    def begin(self, epoch: int) -> None:
        """Prepare for ``epoch``.

        In an epoch that flushes, no gradient is stale, and mitigations only keep their state.
        """
        self._is_stale = epoch >= self._method.flush_epochs

    # --- rate -----------------------------------------------------------------------------------------------

    def rate(self, update: int) -> float:
        """Return the factor on the learning rate of ``update``.

        ``discount`` divides it by max(t, 1) ** p.

        p = ``discount_power`` (1 - min(s / S, 1)), S = ``discount_updates``.
        """
        if "discount" not in self._rows or not self._is_stale:
            return self._lr_factor
        length = self._method.discount_updates
        left = 1.0 if length is None else 1.0 - min(update / length, 1.0)
        return self._lr_factor * float(max(self._staleness, 1.0) ** (-self._method.discount_power * left))

    # --- forward_weights ------------------------------------------------------------------------------------

    def forward_weights(self, update: int) -> dict[nn.Parameter, Tensor]:
        """Return the predicted weights for forwards before ``update``.

        They are in new memory, by parameter; parameters without a prediction are left out.
        """
        ahead: dict[nn.Parameter, Tensor] = {}
        with _plain_tensors():
            for group in self._optimizer.param_groups if self._is_stale and self._looks_ahead else ():
                rate = float(group["lr"]) * self.rate(update)
                if self._remembers_displacement:
                    self._displaced(ahead, group, rate)
                elif isinstance(self._optimizer, SGD):
                    self._ahead_by_sgd(ahead, group, rate)
                else:
                    self._ahead_by_adam(ahead, group, rate)
        return ahead

    def _displaced(self, ahead: dict[nn.Parameter, Tensor], group: Group, rate: float) -> None:
        """Add to ``ahead`` w_s + c (w_s - w_s-1), predicted by displacement.

        c = gamma (``nesterov``), or the horizon times eta_s / eta_s-1 (``predict``).
        """
        known = [p for p in group["params"] if "displacement" in self.history.get(p, ())]
        if not known:
            return
        pasts = [self.history[p] for p in known]
        if "nesterov" in self._rows:
            factors = [self._method.nesterov_gamma] * len(known)
        else:
            horizon = self._horizon(_momentum(group))
            factors = [horizon * rate / past["rate"] if past["rate"] else 0.0 for past in pasts]
        steps = torch._foreach_mul([past["displacement"] for past in pasts], factors)
        torch._foreach_add_(steps, known)
        ahead.update(zip(known, steps, strict=True))

    def _horizon(self, momentum: float) -> float:
        """Return the horizon in updates: t, or mu + mu^2 + .. + mu^t."""
        if self._method.predict_horizon == "linear":
            return self._horizon_updates
        return momentum * _series(momentum, self._horizon_updates)

    def _ahead_by_sgd(self, ahead: dict[nn.Parameter, Tensor], group: Group, rate: float) -> None:
        """Add to ``ahead`` w - eta (horizon) v, predicted by SGD's velocity v."""
        state = self._optimizer.state
        known = [p for p in group["params"] if state.get(p, {}).get("momentum_buffer") is not None]
        if known:
            velocities = [_dense(state[p]["momentum_buffer"]) for p in known]
            steps = torch._foreach_add(known, velocities, alpha=-rate * self._horizon(_momentum(group)))
            ahead.update(zip(known, steps, strict=True))

    def _ahead_by_adam(self, ahead: dict[nn.Parameter, Tensor], group: Group, rate: float) -> None:
        """Add to ``ahead`` weights predicted by Adam's moments.

        ``linear``: t times the last update; ``geometric``: the next ceil(t) updates if all gradients were 0.

        AdamW's decay belongs to an update. Gradients of 0 are counted in the mean m, and not in the mean square v.
        """
        decay = group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
        for p in group["params"]:
            if not (state := self._optimizer.state.get(p)):
                continue
            if self._method.predict_horizon == "linear":
                ahead[p] = p - rate * self._horizon_updates * (_adam_step(state, group, 0) + decay * p)
                continue
            weights = p.clone()
            for later in range(1, math.ceil(self._horizon_updates) + 1):
                weights = weights * (1 - rate * decay) - rate * _adam_step(state, group, later)
            ahead[p] = weights

    # --- gradient -------------------------------------------------------------------------------------------

    def compensate(self, newest: Sequence[Tensor], older: Sequence[Tensor]) -> None:
        """Correct each older gradient g to g + lambda g g (w_newest - w_older)."""
        factor = self._method.delay_compensation_lambda
        with _plain_tensors():
            for now, then in zip(newest, older, strict=True):
                if then.grad is None:
                    continue
                if then.grad.is_sparse:  # and stays so: the optimizer may have sparse velocities
                    grad = then.grad.coalesce()
                    then.grad = grad + factor * (grad * grad) * (now - then)
                else:
                    then.grad.addcmul_(then.grad * then.grad, now - then, value=factor)

    # --- applied --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer, and correct its update by the chosen mitigations."""
        parameters = [p for group in self._optimizer.param_groups for p in _trained(group)]
        with _plain_tensors():
            gradients = self._decayed_gradients() if "spike" in self._rows and self._is_stale else {}
            before = [p.clone() for p in parameters] if self._lag or self._remembers_displacement else []
        self._optimizer.step()
        with _plain_tensors():
            if gradients:
                self._spread(gradients)
            if self._lag:
                self._feed_back(parameters, before)
            if "nesterov" in self._rows and self._is_stale:
                self._look_ahead(parameters, before)
            if self._remembers_displacement:
                self._remember(parameters, before)

    def _decayed_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients, with weight decay, that SGD adds to its velocity."""
        found: dict[nn.Parameter, Tensor] = {}
        for group in self._optimizer.param_groups:
            if known := [p for p in group["params"] if p.grad is not None]:
                signed = torch._foreach_mul([_dense(p.grad) for p in known], -1.0 if group["maximize"] else 1.0)
                torch._foreach_add_(signed, known, alpha=group["weight_decay"])
                found |= dict(zip(known, signed, strict=True))
        return found

    def _spread(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Apply spike compensation in place of SGD's update.

        w - eta (a v + b g), a = mu^n, b = 1 + mu + .. + mu^(n-1).

        n = t, or t + 1 with Nesterov's momentum, for which SGD itself has a = mu, b = 1. A late gradient catches up: it
        moves the weights at once by as much as if it had come in time, and then on as with SGD.
        """
        for group in self._optimizer.param_groups:
            mu, rate, damped = group["momentum"], float(group["lr"]), 1 - group["dampening"]
            done = (mu, 1.0) if group["nesterov"] else (1.0, 0.0)
            n = self._staleness + group["nesterov"]
            moved = [p for p in group["params"] if p in gradients]
            if moved:
                velocities = [_dense(self._optimizer.state[p]["momentum_buffer"]) for p in moved]
                torch._foreach_add_(moved, velocities, alpha=-rate * (mu**n - done[0]))
                now = -rate * (_series(mu, n) * damped - done[1])
                torch._foreach_add_(moved, [gradients[p] for p in moved], alpha=now)

    def _feed_back(self, parameters: Sequence[nn.Parameter], before: list[Tensor]) -> None:
        """Move the parameters to w_s - u_s - c (u_s - u_s-lag)."""
        updates = torch._foreach_sub(before, list(parameters))
        for p, update in zip(parameters, updates, strict=True):
            past = self.history.setdefault(p, {}).setdefault("updates", [])
            if len(past) >= self._lag and self._is_stale:
                p.sub_(update - past[-self._lag], alpha=self._method.error_feedback_coefficient)
            past.append(update)
            del past[: -self._lag]

    def _look_ahead(self, parameters: Sequence[nn.Parameter], before: list[Tensor]) -> None:
        """Move the parameters to w_s + gamma (w_s - w_s-1) - (1 - gamma) u_s."""
        gamma = self._method.nesterov_gamma
        for p, earlier in zip(parameters, before, strict=True):
            p.add_(earlier - p, alpha=gamma)
            if (past := self.history.get(p)) is not None and "displacement" in past:
                p.add_(past["displacement"], alpha=gamma)

    def _remember(self, parameters: Sequence[nn.Parameter], before: list[Tensor]) -> None:
        """Keep w_s+1 - w_s, in the memory of ``before``, and eta_s."""
        torch._foreach_neg_(before)
        torch._foreach_add_(before, list(parameters))
        steps = iter(before)
        for group in self._optimizer.param_groups:
            rate = float(group["lr"])
            for p in _trained(group):
                self.history.setdefault(p, {}).update(displacement=next(steps), rate=rate)


def mitigation_of(
    pipeline: Pipeline, stage: int, optimizer: Optimizer, lr_factor: float = 1.0, tie: Tie | None = None
) -> Mitigation | None:
    """Return the mitigation for ``stage`` or its ``tie``; None without any.

    Raises:
        ConfigError: If the mitigations need a different optimizer.
    """
    is_stale = pipeline.mitigations(stage if tie is None else tie)
    return Mitigation(pipeline, stage, optimizer, lr_factor, tie) if is_stale else None


def _trained(group: Group) -> list[nn.Parameter]:
    return [p for p in group["params"] if p.requires_grad]


def _dense(tensor: Tensor) -> Tensor:
    """Return a gradient or velocity, which may be sparse, as a dense tensor."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def _momentum(group: Group) -> float:
    """Return mu of SGD or the first beta of Adam; 0 without momentum."""
    return float(group["momentum"] if "momentum" in group else group.get("betas", (0.0,))[0])


def _adam_step(state: Group, group: Group, later: int) -> Tensor:
    """Return m^ / (sqrt(v^) + eps) of Adam, ``later`` updates ahead.

    The gradients of these updates are taken as 0: m decays, and both bias corrections count them. v does not decay.
    """
    b1, b2 = map(float, group["betas"])
    step = float(state["step"]) + later
    square: Tensor = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean: Tensor = state["exp_avg"] * float(b1**later / (1 - b1**step))
    return mean / ((square / float(1 - b2**step)).sqrt() + float(group["eps"]))


def _series(mu: float, n: float) -> float:
    """Return 1 + mu + .. + mu^(n-1), for any n of at least 0."""
    return n if mu == 1 else (1 - mu**n) / (1 - mu)

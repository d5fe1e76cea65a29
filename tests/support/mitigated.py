"""The equations of each mitigation, for the oracle: what a forward sees of a version, and how the next one is made."""

import math

import torch

from tests.support.oracle import Versions, leaf

MU, DECAY = 0.9, 1e-2  # of SGD
BETAS, EPS, ADAM_DECAY = (0.8, 0.95), 1e-8, 0.1


class Mitigated(Versions):
    """theta^0, theta^1, ... of one module whose gradients are ``tau`` updates late on average.

    Args:
        kind: the optimizer: sgd (with momentum), nesterov (SGD's), plain (SGD without momentum), adamw.
        rate_of: from an update of the run to its learning rate, before any discount.
        rows: the mitigations by name, each with its options; without delay none of them does anything.
    """

    def __init__(self, module, *, tau, kind, rate_of, rows):
        super().__init__(module, MU if kind in ("sgd", "nesterov") else 0.0, DECAY)
        self.tau, self.kind, self.chosen = tau, kind, rows if tau > 0 else {}
        self.undiscounted = rate_of
        self.mean, self.square = ({n: torch.zeros_like(w) for n, w in self.present.items()} for _ in range(2))
        self.made = 0  # updates that were not skipped
        self.moments = [self._moments()]  # of the optimizer, when a version was made
        self.last = [None]  # of each version: (the weights before the last update that moved them, its rate)
        self.raw = []  # u_0, u_1, ...: what the optimizer itself takes off
        self.by_version = {}

    @property
    def rows(self):
        return {} if self.is_fresh else self.chosen

    def rate(self, s):
        """PipeMare, T1."""
        if "discount" not in self.rows:
            return self.undiscounted(s)
        power, S = self.rows["discount"].get("power", 0.5), self.rows["discount"].get("updates")
        if S is not None:
            power *= 1 - min(s / S, 1)
        return self.undiscounted(s) / max(1, self.tau) ** power

    # --- What a forward sees ---------------------------------------------------------------------------------

    def seen(self, version):
        return {n: leaf(w) for n, w in self.ahead(version).items()}

    def ahead(self, version):
        w = self.theta[version]
        if "nesterov" in self.rows and self.last[version]:
            before, _ = self.last[version]
            return {n: w[n] + self.rows["nesterov"].get("gamma", 0.99) * (w[n] - before[n]) for n in w}
        if "predict" not in self.rows:
            return w
        options = {"horizon": "linear", "source": "displacement"} | self.rows["predict"]
        eta, (velocity, mean, square, made) = self.rate(version), self.moments[version]
        mu = BETAS[0] if self.kind == "adamw" else self.momentum
        tau = self.tau if options["horizon"] == "linear" else mu * (1 - mu**self.tau) / (1 - mu)
        if options["source"] == "displacement":
            if self.last[version] is None:
                return w
            before, rate = self.last[version]
            return {n: w[n] + tau * (w[n] - before[n]) * eta / rate for n in w}
        if self.kind != "adamw":
            return {n: w[n] - eta * tau * velocity[n] for n in w}
        if made == 0:
            return w
        if options["horizon"] == "linear":
            step = {n: self._adam_step(mean[n], square[n], made) + ADAM_DECAY * w[n] for n in w}
            return {n: w[n] - self.tau * eta * step[n] for n in w}
        w = dict(w)
        for j in range(1, math.ceil(self.tau) + 1):
            for n in w:
                decayed = w[n] * (1 - eta * ADAM_DECAY)
                root = (square[n] / (1 - BETAS[1] ** (made + j))).sqrt() + EPS
                w[n] = decayed - eta / (1 - BETAS[0] ** (made + j)) * BETAS[0] ** j * mean[n] / root
        return w

    # --- The gradient ----------------------------------------------------------------------------------------

    def accumulate(self, gradient, version=None):
        """DC-ASGD, of the sum over the micro-batches of one version."""
        if "delay_compensation" not in self.rows:
            super().accumulate(gradient)
            return
        sums = self.by_version.setdefault(version, {n: torch.zeros_like(w) for n, w in self.present.items()})
        for n, g in gradient.items():
            sums[n] = sums[n] + g

    def compensated(self):
        for version, sums in self.by_version.items():
            then, factor = self.ahead(version), self.rows["delay_compensation"].get("lambda", 0.04)
            for n, g in sums.items():
                self.gradient[n] = self.gradient[n] + g + factor * g * g * (self.present[n] - then[n])
        self.by_version = {}

    def clip(self, longest):
        self.compensated()
        super().clip(longest)

    # --- The update ------------------------------------------------------------------------------------------

    def skip(self):
        self.by_version = {}
        super().skip()
        self.last.append(self.last[-1])
        self.moments.append(self.moments[-1])

    def update(self, lr):
        """``lr`` is not looked at: ``rate`` knows it."""
        self.compensated()
        s, w = self.updates, self.present
        eta = self.rate(s)
        u = self._of_adamw(eta) if self.kind == "adamw" else self._of_sgd(eta)
        new = {n: w[n] - u[n] for n in w}
        if "error_feedback" in self.rows:
            lag = self.rows["error_feedback"].get("lag", math.ceil(self.tau))
            if self.made >= lag:
                past, c = self.raw[self.made - lag], self.rows["error_feedback"].get("c", 1.0)
                new = {n: w[n] - u[n] - c * (u[n] - past[n]) for n in w}
        if "nesterov" in self.rows:  # Ajanthan et al., Eq. 10
            gamma = self.rows["nesterov"].get("gamma", 0.99)
            before = self.last[-1][0] if self.last[-1] else w
            new = {n: w[n] + gamma * (w[n] - before[n]) - (1 - gamma) * u[n] for n in w}
        self.raw.append(u)
        self.made += 1
        self.gradient = {n: torch.zeros_like(t) for n, t in w.items()}
        self.theta.append(new)
        self.last.append((w, eta))
        self.moments.append(self._moments())

    def _of_sgd(self, eta):
        step = {}
        for n, w in self.present.items():
            g = self.gradient[n] + self.weight_decay * w
            v = self.velocity[n] = self.momentum * self.velocity[n] + g
            if "spike" in self.rows:  # Kosson et al.; Nesterov's momentum is that of a delay of 1
                T = self.tau + (self.kind == "nesterov")
                step[n] = self.momentum**T * v + (1 - self.momentum**T) / (1 - self.momentum) * g
            else:
                step[n] = g + self.momentum * v if self.kind == "nesterov" else v
        return {n: eta * t for n, t in step.items()}

    def _of_adamw(self, eta):
        step, (b1, b2) = {}, BETAS
        for n, w in self.present.items():
            g = self.gradient[n]
            self.mean[n] = b1 * self.mean[n] + (1 - b1) * g
            self.square[n] = b2 * self.square[n] + (1 - b2) * g * g
            step[n] = eta * (ADAM_DECAY * w + self._adam_step(self.mean[n], self.square[n], self.made + 1))
        return step

    def _adam_step(self, mean, square, t):
        return mean / (1 - BETAS[0] ** t) / ((square / (1 - BETAS[1] ** t)).sqrt() + EPS)

    def _moments(self):
        return dict(self.velocity), dict(self.mean), dict(self.square), self.made

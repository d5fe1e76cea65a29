"""Training with delayed gradients written straight from the equations of the papers. Shares no code with the engine.

It goes through the micro-batches one by one, keeps every past weight version of every module, and looks up the versions
that the equations name; nothing is ever in flight. Modules are counted from 1, as in the papers, and must draw no
random numbers. The caller's modules stay as they are.
"""

import contextlib
import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.grad import conv2d_input, conv2d_weight

from tests.support.toys import Block


def train_by_the_equations(
    modules, epochs, *, M, loss_fn, lr, momentum=0.0, weight_decay=0.0, delays=None, weights="stash", shrink=1.0,
    reduction="mean", lr_of=None, clip_norm=None, skipped=(), unseen=(), num_terms=len, versions=None, flush_epochs=0,
    crossing=None
):  # fmt: skip
    """Train and return all parameters and buffers, by name.

    Args:
        modules: module 1..K, their parameter names being those of the whole network. What one hands to the next is a
            tensor or a tuple of tensors.
        epochs: the micro-batches U_0, U_1, ... of each epoch, (input, target); the pipeline is empty between epochs.
        M: accumulation steps; group g of an epoch is U_gM .. U_gM+M-1, fewer at its end.
        lr: gamma_s for each update s of the whole run.
        delays: d_k of module 1..K in micro-batches, never increasing; None: 2(K-k), those of ADL.
        weights: those of the backward.
            stash: the forward's (ADL, Eq. 15; DDG, FDG, PipeDream).
            recompute: the present ones, the forward being replayed from its input (FR, DSP).
            latest: the present ones in every backward formula, the activations being those of the forward (PACI).
            2bw: forward and backward take the version of the group before, whatever the delays (PipeDream-2BW).
        shrink: beta of FDG.
        reduction: mean: a gradient is the mean over the samples of its group; sum: over micro-batches the sum.
        lr_of: the learning rate of (module k, update s), instead of ``lr``.
        clip_norm: the norm that the gradient of each module, by itself, is scaled down to if it is longer.
        skipped: groups of every epoch that leave weights and momentum as they are; the update index moves on.
        unseen: micro-batches of theirs that no running statistic remembers.
        num_terms: from a target to what ``loss_fn`` divides by; the samples, or what it counts instead.
        flush_epochs: epochs at the start without any delay.
        versions: from k and module k to its versions, where they are made by other equations than those of SGD.
        crossing: from ("act" or "grad", epoch, k, b) and what module k sends of b to what arrives; None: the same.
    """
    assert weights in ("stash", "recompute", "latest", "2bw"), weights
    assert reduction in ("mean", "sum"), reduction
    K = len(modules)
    d = [2 * (K - k) for k in range(1, K + 1)] if delays is None else list(delays)
    assert len(d) == K, d
    assert d == sorted(d, reverse=True), d
    modules = [copy.deepcopy(module).train() for module in modules]
    make = versions or (lambda k, module: Versions(module, momentum, weight_decay))
    theta = [make(k, module) for k, module in enumerate(modules, start=1)]

    delayed = d
    for epoch, batches in enumerate(epochs):
        base = theta[0].updates
        is_fresh = epoch < flush_epochs
        d = [0] * K if is_fresh else delayed
        for versions in theta:
            versions.is_fresh = is_fresh
        for b, (u, target) in enumerate(batches):
            share, last_of_group = place_in_group(batches, b, M, num_terms)
            if b in unseen:
                assert b // M in skipped
                if last_of_group:
                    for versions in theta:
                        versions.skip()
                continue
            # The forward. Eq. 15: batch b meets theta_k with update index floor((b - d_k) / M), none before the first.
            # PipeDream-2BW, section 3.1: micro-batch b meets max(floor(b / M) - 1, 0) in every stage.
            index = [max(0, b // M - 1 if weights == "2bw" and not is_fresh else (b - d[k]) // M) for k in range(K)]
            graphs, kept = [], []
            z = u
            for k, module in enumerate(modules):
                x, w = leaf(z), theta[k].seen(base + index[k])
                with keeping(module, only_if=weights == "latest") as seen:
                    z = functional_call(module, w, (x,))
                graphs.append((x, w, z))
                kept.append(seen)
                if crossing is not None and k + 1 < K:
                    z = crossing("act", epoch, k + 1, b, z)

            # Eq. 16 with 1/M as the share of samples, which is 1/M for micro-batches of equal size.
            z = leaf(z)
            error = torch.autograd.grad(loss_fn(z, target) * (share if reduction == "mean" else 1.0), floats(z))

            # The backward, which in module k happens after the updates of the groups before: theta[k].present.
            for k in reversed(range(K)):
                x, w, y = graphs[k]
                if k + 1 < K:
                    error = [shrink * e for e in error]  # FDG: beta on what comes in; module k sees beta^(K-k) in all
                if weights == "latest":
                    *error, gradient = backward_by_hand(modules[k], theta[k].present, kept[k], *error)
                else:
                    if weights == "recompute":
                        # FR and DSP: the stored input once more through the present weights, then the error that came
                        # in, which belongs to the output of the first forward. Running statistics moved then.
                        w = theta[k].leaves(theta[k].updates)
                        unmoved = {n: t.clone() for n, t in modules[k].named_buffers()}
                        y = functional_call(modules[k], w | unmoved, (x,))
                        if k + 1 == K and d[k] > 0:  # the loss belongs to the last module and is replayed with it
                            z = leaf(y)
                            scale = share if reduction == "mean" else 1.0
                            error = torch.autograd.grad(loss_fn(z, target) * scale, floats(z))
                    of_all = torch.autograd.grad(floats(y), [*floats(x), *w.values()], error)
                    error, of_w = of_all[: len(floats(x))], of_all[len(floats(x)) :]
                    gradient = dict(zip(w, of_w, strict=True))
                theta[k].accumulate(gradient, base + index[k])
                if crossing is not None and k > 0:
                    error = crossing("grad", epoch, k + 1, b, tuple(error))

            if last_of_group:
                for k in range(K):
                    if b // M in skipped:
                        theta[k].skip()
                        continue
                    if clip_norm is not None:
                        theta[k].clip(clip_norm)
                    s = theta[k].updates
                    theta[k].update(lr[s] if lr_of is None else lr_of(k + 1, s))

    return state_of(modules, theta)


def train_greedily(modules, heads, epochs, *, M, loss_fn, lr, momentum=0.0, weight_decay=0.0, num_terms=len):
    """Train every module on its own loss (DGL); return the parameters and buffers of the modules, and of each head.

    No gradient leaves a module, so that module k can do a whole epoch before module k+1 begins.

    Args:
        modules: as above, and so are the arguments that are not named here.
        heads: the auxiliary networks of module 1..K-1; the loss of module K is the true one.
        M: accumulation steps; group g of module k is its steps gM .. gM+M-1 of the epoch.
    """
    K = len(modules)
    modules = [copy.deepcopy(module).train() for module in modules]
    heads = [*(copy.deepcopy(head).train() for head in heads), nn.Identity()]
    assert len(heads) == K, len(heads)
    theta = [Versions(module, momentum, weight_decay) for module in modules]
    phi = [Versions(head, momentum, weight_decay) for head in heads]

    for batches in epochs:
        passed_on = list(batches)
        for k in range(K):
            steps, passed_on = passed_on, []
            for j, (x, target) in enumerate(steps):
                w, h = theta[k].leaves(theta[k].updates), phi[k].leaves(phi[k].updates)
                y = functional_call(modules[k], w, (x,))
                passed_on.append((leaf(y), target))  # of the weights before the update
                share, last_of_group = place_in_group(steps, j, M, num_terms)
                loss = loss_fn(functional_call(heads[k], h, (y,)), target) * share
                gradient = iter(torch.autograd.grad(loss, [*w.values(), *h.values()]))
                for versions, names in ((theta[k], w), (phi[k], h)):
                    versions.accumulate({n: next(gradient) for n in names})
                    if last_of_group:
                        versions.update(lr[versions.updates])

    return state_of(modules, theta), [state_of([head], [w]) for head, w in zip(heads[:-1], phi[:-1], strict=True)]


class Versions:
    """theta^0, theta^1, ... of one module, each made from the one before as torch.optim.SGD does it."""

    def __init__(self, module, momentum, weight_decay):
        self.theta = [{n: p.detach().clone() for n, p in module.named_parameters()}]
        self.velocity = {n: torch.zeros_like(w) for n, w in self.present.items()}
        self.gradient = {n: torch.zeros_like(w) for n, w in self.present.items()}
        self.momentum, self.weight_decay = momentum, weight_decay
        self.is_fresh = False

    @property
    def updates(self):
        return len(self.theta) - 1

    @property
    def present(self):
        return self.theta[-1]

    def leaves(self, version):
        return {n: leaf(w) for n, w in self.theta[version].items()}

    def seen(self, version):
        """What a forward sees of a version."""
        return self.leaves(version)

    def accumulate(self, gradient, version=None):
        """Add the gradient of a micro-batch whose forward saw ``version``."""
        assert gradient.keys() == self.gradient.keys()
        for n, g in gradient.items():
            self.gradient[n] = self.gradient[n] + g

    def clip(self, longest):
        """g = g min(1, c / (|g| + 1e-6)), as torch.nn.utils.clip_grad_norm_ is documented."""
        norm = sum(float((g * g).sum()) for g in self.gradient.values()) ** 0.5
        self.gradient = {n: g * min(1.0, longest / (norm + 1e-6)) for n, g in self.gradient.items()}

    def skip(self):
        """The next version is the present one."""
        self.gradient = {n: torch.zeros_like(w) for n, w in self.present.items()}
        self.theta.append(self.present)

    def update(self, lr):
        """v = mu v + (g + wd w); w = w - lr v. Each multiply-add is rounded once, as torch.optim.SGD's are.

        Rounded twice, a weight may differ in its last digit; where that digit decides how autocast rounds the weight to
        bfloat16, the whole run differs by more than any float32 tolerance, and whether it does depends on the CPU.
        """
        new = {}
        for n, w in self.present.items():
            g = torch.add(self.gradient[n], w, alpha=self.weight_decay)
            self.velocity[n] = torch.add(self.momentum * self.velocity[n], g)
            new[n] = torch.add(w, self.velocity[n], alpha=-lr)
            self.gradient[n] = torch.zeros_like(w)
        self.theta.append(new)


def leaf(z):
    """``z`` without its graph, the start of a new one."""
    if isinstance(z, tuple):
        return tuple(leaf(t) for t in z)
    return z.detach().clone().requires_grad_(z.is_floating_point())


def floats(z):
    """The tensors that have a gradient."""
    return [t for t in (z if isinstance(z, tuple) else (z,)) if t.is_floating_point()]


def place_in_group(steps, b, M, num_terms):
    """The share of step b in the terms of its group, and whether it ends it."""
    group = steps[b // M * M : b // M * M + M]
    share = num_terms(steps[b][1]) / sum(num_terms(target) for _, target in group)
    return share, (b + 1) % M == 0 or b + 1 == len(steps)


def state_of(modules, theta):
    state = {}
    for module, versions in zip(modules, theta, strict=True):
        state |= {n: t.detach().clone() for n, t in module.named_buffers()} | versions.present
    return state


@contextlib.contextmanager
def keeping(module, *, only_if=True):
    """Keep input and output of every layer inside ``module`` by its name, as autograd keeps them for the backward."""
    seen = {}

    def keep(name):
        return lambda _, inputs, output: seen.update({name: (inputs[0].detach(), output.detach())})

    hooks = [layer.register_forward_hook(keep(name)) for name, layer in module.named_modules() if only_if]
    yield seen
    for hook in hooks:
        hook.remove()


def backward_by_hand(layer, now, kept, error, name=""):
    """Return the gradient by the input of ``layer`` and by each weight, from ``error``, that by its output.

    With the weights of the forward it is the gradient. With others it is the hybrid that PyTorch computes when weights
    change in place under a live graph (PACI; the authors' code of DDG, FDG, ADL).

    Args:
        layer: one of the kinds in batch_norm_net, or a Sequential of them.
        now: the weights, named as seen from the outermost layer.
        kept: input and output of each layer in the forward, named likewise.
        error: the gradient of the loss by the output.
        name: name of ``layer``, seen from the outermost one.
    """
    x, y = kept[name]
    inside = f"{name}." if name else ""
    weight, bias = inside + "weight", inside + "bias"
    match layer:
        case nn.Sequential():
            gradient = {}
            for child, sub in reversed(layer._modules.items()):
                error, more = backward_by_hand(sub, now, kept, error, inside + child)
                gradient |= more
            return error, gradient
        case Block():  # y = relu(x + norm(conv(x)))
            error = error * (y > 0)
            through, of_norm = backward_by_hand(layer.norm, now, kept, error, inside + "norm")
            through, of_conv = backward_by_hand(layer.conv, now, kept, through, inside + "conv")
            return error + through, of_norm | of_conv
        case nn.Conv2d(bias=None):
            how = {"stride": layer.stride, "padding": layer.padding}
            of_weight = conv2d_weight(x, now[weight].shape, error, **how)
            return conv2d_input(x.shape, now[weight], error, **how), {weight: of_weight}
        case nn.BatchNorm2d():  # y = gamma x^ + beta with x^ = (x - mean) / sigma
            samples = (0, 2, 3)
            inv_std = (x.var(samples, correction=0, keepdim=True) + layer.eps).rsqrt()
            x_hat = (x - x.mean(samples, keepdim=True)) * inv_std
            gamma = now[weight].view(1, -1, 1, 1)
            along = error.mean(samples, keepdim=True) + x_hat * (error * x_hat).mean(samples, keepdim=True)
            of_gamma, of_beta = (error * x_hat).sum(samples), error.sum(samples)
            return gamma * inv_std * (error - along), {weight: of_gamma, bias: of_beta}
        case nn.ReLU():
            return error * (y > 0), {}
        case nn.Dropout(p=0.0):
            return error, {}
        case nn.AdaptiveAvgPool2d(output_size=1):
            return error.expand_as(x) / (x.shape[2] * x.shape[3]), {}
        case nn.Flatten():
            return error.reshape(x.shape), {}
        case nn.Linear():
            of_bias = {} if layer.bias is None else {bias: error.sum(0)}
            return error @ now[weight], {weight: error.T @ x} | of_bias
    raise TypeError(f"no backward was written for {type(layer).__name__}")

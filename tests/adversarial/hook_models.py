"""Hooks of all kinds: of parameters, modules, activations, forward and backward (W5)."""

import torch
from torch import nn

from tests.adversarial.cases import WIDTH, Inner, block, model


def hooked(register):
    """A block whose child has what ``register`` does to it."""

    def build():
        it = Inner.__new__(HookedBlock)
        HookedBlock.__init__(it)
        register(it)
        return it

    return build


class HookedBlock(Inner):
    def forward(self, h):
        return h + torch.tanh(self.inner(h))


def mask_gradient(it):
    it.inner.weight.register_hook(lambda grad: grad * (torch.arange(WIDTH) % 2))


def mask_after(it):
    def halve(p):
        p.grad[:, ::2] = 0

    it.inner.weight.register_post_accumulate_grad_hook(halve)


def double_output(it):
    it.inner.register_forward_hook(lambda module, inputs, output: output * 1.5)


def shift_input(it):
    it.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] - inputs[0].mean(0),))


def with_keywords(it):
    it.inner.register_forward_hook(lambda module, args, kwargs, output: output + args[0], with_kwargs=True)


def halve_backward(it):
    it.inner.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


def backward_before(it):
    it.inner.register_full_backward_pre_hook(lambda module, out: (out[0].clamp(-0.01, 0.01),))


def on_the_block(it):
    it.register_forward_hook(lambda module, inputs, output: output * 0.8)
    it.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,))


def backward_on_the_block(it):
    it.register_full_backward_hook(lambda module, into, out: (into[0] * 0.3,))


def renames_state(it):
    it.register_state_dict_post_hook(lambda module, state, prefix, _: None)


HOOKS = {
    "gradient_mask": mask_gradient, "mask_after_accumulation": mask_after, "forward_hook": double_output,
    "forward_pre_hook": shift_input, "hook_with_keywords": with_keywords, "backward_hook": halve_backward,
    "backward_pre_hook": backward_before, "hooks_of_the_block": on_the_block,
    "backward_hook_of_the_block": backward_on_the_block, "hook_of_the_state": renames_state,
}  # fmt: skip
for name, register in HOOKS.items():
    build = hooked(register)
    build.__name__ = name
    block(word="hook", item="W5")(build)


@block(word="hook|trac|register")
class HookOnActivation(Inner):
    """A gradient is clamped where it passes."""

    def forward(self, h):
        y = self.inner(h)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return torch.tanh(y) + h


@model(word="hook")
def hook_of_the_root():
    net = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    return net

"""Functions and backwards of one's own, checkpoints, hooks, and branches without a gradient."""

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, block, block_of, chain, linear, model, model_of, several


class OwnLinear(Function):
    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, grad.T @ x if ctx.needs_input_grad[1] else None


class InPlaceScale(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(1.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.5


@block()
def linear_of_own(self, h):
    return torch.tanh(OwnLinear.apply(h, self.inner.weight))


@block()
def dirty_function(self, h):
    return torch.tanh(InPlaceScale.apply(self.inner(h)))


@block(energy=chain(linear(WIDTH, 12), nn.Tanh, linear(12, 1)))
def energy_gradient(self, h):
    """The output is a gradient by the input; double backward trains the weights."""
    with torch.enable_grad():
        x = h if h.requires_grad else h.detach().requires_grad_()
        force = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
    return h - force


@block(inner=chain(linear(), nn.Tanh))
def tangent_of_inner(self, h):
    """torch.func inside of a forward: a product with the Jacobian."""
    return torch.func.jvp(self.inner, (h,), (torch.ones_like(h),))[1] + h


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, h):
        return self.table(h.argmax(dim=1))


@model_of()
def argmax_in_the_middle():
    """Nothing before the third unit gets a gradient: torch leaves it as it is, weight decay included."""
    return chain(linear(6), nn.Tanh, linear(), Codes, linear(), nn.Tanh, linear(WIDTH, 5))()


@model(enter=linear(6), side=linear(), middle=chain(nn.Tanh, linear(), nn.Tanh, linear()),
       probe=linear(WIDTH, NUM_CLASSES), head=linear(WIDTH, NUM_CLASSES))  # fmt: skip
def detached_branch(self, x):
    """A probe on features, detached; its own branch crosses the cuts without a gradient."""
    h = self.enter(x)
    side = torch.tanh(self.side(h))
    h = self.middle(h)
    return self.head(h) + self.probe(side.detach())


@model(enter=linear(6), a=linear(), b=linear(), middle=linear(), never=linear(),
       last=chain(nn.Tanh, lambda: nn.BatchNorm1d(WIDTH), linear(WIDTH, NUM_CLASSES)))  # fmt: skip
def unused_branch(self, x):
    """A branch over several layers whose result is not used, and a layer that is never called."""
    h = self.enter(x)
    unused = torch.tanh(self.a(h))
    h = torch.tanh(self.middle(h))
    unused = self.b(unused * h)
    return self.last(h)


class Features(Inner):
    @torch.no_grad()
    def forward(self, h):
        return torch.tanh(self.inner(h))


@model_of()
def no_grad_in_the_middle():
    """A frozen feature extractor under no_grad in a block, trained layers in front of it that learn nothing."""
    return chain(linear(6), nn.Tanh, Features, linear(), nn.Tanh, linear(WIDTH, NUM_CLASSES))()


@model(enter=linear(6), a=linear(), b=linear(), head=chain(nn.Tanh, linear(WIDTH, NUM_CLASSES)))
def autocasting(self, x):
    """A context of the model's own around a part of it."""
    h = self.enter(x).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = h @ torch.ones(WIDTH, WIDTH, dtype=torch.float32)
    h = torch.tanh(self.a(h.double()))
    return self.head(self.b(h))


@block(always=linear(), rarely=linear())
def sometimes_used(self, h):
    """A layer that only smaller micro-batches meet: in most groups it has no gradient."""
    return torch.tanh(self.always(h)) + (self.rarely(h) if len(h) < 3 else 0.0)


@block()
def sometimes_detached(self, h):
    """Whether a gradient comes differs between micro-batches."""
    h = h.detach() if h.sum() > 0 else h
    return torch.tanh(self.inner(h))


def mlp(norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(WIDTH, 12), norm(12), nn.Tanh(), nn.Linear(12, WIDTH))


def with_dropout():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))


class Checkpointed(nn.Module):
    def __init__(self, body=None, **how):
        super().__init__()
        self.body, self.how = mlp() if body is None else body, how

    def forward(self, h):
        return h + checkpoint(self.body, h, **self.how)


for name, build in {
    "checkpoint_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpoint_by_hooks": lambda: Checkpointed(use_reentrant=False),
    "checkpointed_norm": lambda: Checkpointed(mlp(nn.BatchNorm1d), use_reentrant=False),
    "checkpointed_dropout": lambda: Checkpointed(with_dropout(), use_reentrant=False),
}.items():
    block_of(name=name)(build)


@model(enter=linear(6), blocks=several(4, mlp), head=linear(WIDTH, NUM_CLASSES))
def checkpoints_of_root(self, x):
    """The model's own forward checkpoints each of its blocks while training, as timm's and Hugging Face's do."""
    h = self.enter(x)
    for one in self.blocks:
        h = h + (checkpoint(one, h, use_reentrant=False) if self.training else one(h))
    return self.head(h)


@model_of("big_images")
def densenet_saves_memory():
    from torchvision.models import DenseNet

    sizes = {"growth_rate": 3, "block_config": (2, 1), "num_init_features": 4, "bn_size": 2, "num_classes": NUM_CLASSES}
    net = DenseNet(**sizes, memory_efficient=True)
    net.features.pool0 = nn.Identity()
    return net


class Reversible(Function):
    """RevNet's: nothing is kept but the output; the backward runs the layers again."""

    @staticmethod
    def forward(ctx, h, f, g, *_):
        ctx.f, ctx.g = f, g
        a, b = h.chunk(2, dim=1)
        a = a + f(b)
        b = b + g(a)
        ctx.save_for_backward(a.detach(), b.detach())
        return torch.cat([a, b], dim=1)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a, grad_b = grad.chunk(2, dim=1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            of_a = ctx.g(a)
            grads = torch.autograd.grad(of_a, [a, *ctx.g.parameters()], grad_b)
            grad_a, g_grads = grad_a + grads[0], grads[1:]
            b = (b - of_a).detach().requires_grad_()
            of_b = ctx.f(b)
            grads = torch.autograd.grad(of_b, [b, *ctx.f.parameters()], grad_a)
        return torch.cat([grad_a, grad_b + grads[0]], dim=1), None, None, *grads[1:], *g_grads


half = chain(linear(WIDTH // 2, WIDTH // 2), nn.Tanh)


@block(f=half, g=half)
def reversible_block(self, h):
    return Reversible.apply(h, self.f, self.g, *self.f.parameters(), *self.g.parameters())


class HookedBlock(Inner):
    def forward(self, h):
        return h + torch.tanh(self.inner(h))


def mask_after(p):
    p.grad[:, ::2] = 0


# Each registers a hook on the layer inside a block, or on the block.
HOOKS = {
    "gradient_mask": lambda it: it.inner.weight.register_hook(lambda grad: grad * (torch.arange(WIDTH) % 2)),
    "mask_after_accumulation": lambda it: it.inner.weight.register_post_accumulate_grad_hook(mask_after),
    "forward_hook": lambda it: it.inner.register_forward_hook(lambda module, given, out: out * 1.5),
    "forward_pre_hook": lambda it: it.inner.register_forward_pre_hook(
        lambda module, given: (given[0] - given[0].mean(0),)
    ),
    "hook_with_keywords": lambda it: it.inner.register_forward_hook(
        lambda module, args, kwargs, out: out + args[0], with_kwargs=True
    ),
    "backward_hook": lambda it: it.inner.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,)),
    "pre_hook_of_the_block": lambda it: it.register_forward_pre_hook(lambda module, given: (given[0] * 1.1,)),
    "backward_hook_of_the_block": lambda it: it.register_full_backward_hook(lambda module, into, out: (into[0] * 0.3,)),
}


def hooked(register):
    def build():
        it = HookedBlock()
        register(it)
        return it

    return build


for name, register in HOOKS.items():
    block_of(name=name)(hooked(register))


@block()
def hook_on_activation(self, h):
    """A gradient is clamped where it passes."""
    y = self.inner(h)
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return torch.tanh(y) + h


COLLECTED = []  # by the hooks of the present forward


class CollectsByHooks(nn.Module):
    """The first forward registers the hooks, as that of transformers does for hidden states and routers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(6)(), *(linear()() for _ in range(4))])
        self.has_hooks = False

    def forward(self, x):
        if not self.has_hooks:
            self.has_hooks = True
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, out: COLLECTED.append(out))
        COLLECTED.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, *COLLECTED, torch.stack([out.to(x.device).mean() for out in COLLECTED])


model_of(name="hooks_of_the_first_forward")(CollectsByHooks)


@block()
def contiguous_already(self, h):
    """The call returns its input, which the forward has as another object."""
    return torch.tanh(self.inner(h).contiguous()).contiguous() * h


@model_of()
def hook_of_the_root():
    net = chain(linear(6), nn.Tanh, linear(), nn.Tanh, linear(WIDTH, 5))()
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    return net


class Rounded(Function):
    @staticmethod
    def forward(ctx, weight):
        return (8 * weight).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


@model(enter=linear(6), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def rounds_its_weights(self, x):
    """An autograd function takes only a weight, outside of the layer that has it."""
    h = self.enter(x)
    for layer in self.layers:
        h = torch.tanh(nn.functional.linear(h, Rounded.apply(layer.weight), layer.bias))
    return self.head(h)


@model(enter=linear(6), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def weights_like_a_value(self, x):
    """Weights in the type of a value, outside of their layer; other stages have neither or the value only."""
    h = self.enter(x)
    for layer in self.layers:
        h = torch.tanh(h @ (2 * layer.weight).to(h).T + layer.bias.clone().type_as(h))
    return self.head(h)

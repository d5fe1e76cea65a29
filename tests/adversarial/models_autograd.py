"""Functions and backwards of one's own, checkpoints, hooks, and branches without a gradient."""

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, block, forward_block, model


class Reversal(Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class SignThrough(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() < 1)


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


@forward_block
def gradient_reversal(self, h):
    return h + torch.tanh(self.inner(Reversal.apply(h, 0.3)))


@forward_block
def straight_through(self, h):
    return self.inner(SignThrough.apply(h))


@forward_block
def linear_of_own(self, h):
    return torch.tanh(OwnLinear.apply(h, self.inner.weight))


@forward_block
def dirty_function(self, h):
    return torch.tanh(InPlaceScale.apply(self.inner(h)))


@block
class EnergyGradient(nn.Module):
    """The output is a gradient by the input; double backward trains the weights."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, h):
        with torch.enable_grad():
            x = h if h.requires_grad else h.detach().requires_grad_()
            force = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return h - force


@block
class TangentOfInner(nn.Module):
    """torch.func inside of a forward: a product with the Jacobian."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h):
        return torch.func.jvp(self.inner, (h,), (torch.ones_like(h),))[1] + h


@model
class ArgmaxInTheMiddle(nn.Sequential):
    """Nothing before the third unit gets a gradient: torch leaves it as it is, weight decay included."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH)

        def forward(self, h):
            return self.table(h.argmax(dim=1))

    def __init__(self):
        first = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        super().__init__(*first, self.Codes(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))


class Detaches(nn.Module):
    """One way detached, one ways with a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return torch.tanh(self.a(h.detach())) + self.b(torch.tanh(h)).detach() + h


block(Detaches)


@model
class DetachedBranch(nn.Module):
    """A probe on features, detached; its own branch crosses the cuts without a gradient."""

    def __init__(self):
        super().__init__()
        self.enter, self.side = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.probe, self.head = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        side = torch.tanh(self.side(h))
        h = self.middle(h)
        return self.head(h) + self.probe(side.detach())


@model
class UnusedBranch(nn.Module):
    """A branch over several layers whose result is not used, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.enter, self.a, self.b = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x):
        h = self.enter(x)
        unused = torch.tanh(self.a(h))
        h = torch.tanh(self.middle(h))
        unused = self.b(unused * h)
        return self.last(h)


@model
class NoGradInTheMiddle(nn.Sequential):
    """A frozen feature extractor under no_grad in a block, trained layers in front of it that learn nothing."""

    class Features(Inner):
        @torch.no_grad()
        def forward(self, h):
            return torch.tanh(self.inner(h))

    def __init__(self):
        last = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)]
        super().__init__(nn.Linear(6, WIDTH), nn.Tanh(), self.Features(), *last)


@block
class NoGradWithinForward(Inner):
    """A context that tracing does not see."""

    def __init__(self):
        super().__init__()
        self.probe = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        with torch.no_grad():
            seen = torch.tanh(self.probe(h))
        return self.inner(h) * seen + h


@model
class Autocasting(nn.Module):
    """A context of the model's own around a part of it."""

    def __init__(self):
        super().__init__()
        self.enter, self.a, self.b = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x):
        h = self.enter(x).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = h @ torch.ones(WIDTH, WIDTH, dtype=torch.float32)
        h = torch.tanh(self.a(h.double()))
        return self.head(self.b(h))


@model
class SometimesUsed(nn.Module):
    """A layer that only smaller micro-batches meet: in most groups it has no gradient."""

    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.rarely = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, h):
            return torch.tanh(self.always(h)) + (self.rarely(h) if len(h) < 3 else 0.0)

    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(
            nn.Linear(6, WIDTH), self.Maybe(), nn.Tanh(), self.Maybe(), nn.Linear(WIDTH, NUM_CLASSES)
        )

    def forward(self, x):
        return self.chain(x)


@block
class SometimesDetached(nn.Module):
    """Whether a gradient comes is another thing for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h = h.detach() if h.sum() > 0 else h
        return torch.tanh(self.inner(h))


def mlp(norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(WIDTH, 12), norm(12), nn.Tanh(), nn.Linear(12, WIDTH))


class Checkpointed(nn.Module):
    def __init__(self, body=None, **how):
        super().__init__()
        self.body, self.how = mlp() if body is None else body, how

    def forward(self, h):
        return h + checkpoint(self.body, h, **self.how)


@block
def checkpoint_reentrant():
    return Checkpointed(use_reentrant=True)


@block
def checkpoint_by_hooks():
    return Checkpointed(use_reentrant=False)


# When a recompute moves the running statistics once more is not the product's to say, so they are not compared.
STATISTICS = "running_|num_batches"


@block(ignores=STATISTICS)
def checkpointed_norm():
    return Checkpointed(mlp(nn.BatchNorm1d), use_reentrant=False)


@block
class CheckpointedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h):
        return checkpoint_sequential(self.body, 2, h, use_reentrant=False)


@block(random="torch")
class CheckpointedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, h):
        return h + checkpoint(self.body, h, use_reentrant=False)


@model
class CheckpointsOfRoot(nn.Module):
    """The model's own forward checkpoints each of its blocks while training, as timm's and Hugging Face's do."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(mlp() for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        for one in self.blocks:
            h = h + (checkpoint(one, h, use_reentrant=False) if self.training else one(h))
        return self.head(h)


@model(data="big_images", ignores=STATISTICS)
def densenet_saves_memory():
    from torchvision.models import DenseNet

    sizes = {"growth_rate": 3, "block_config": (2, 2), "num_init_features": 4, "bn_size": 2, "num_classes": NUM_CLASSES}
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


@block
class ReversibleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh()) for _ in range(2))

    def forward(self, h):
        return Reversible.apply(h, self.f, self.g, *self.f.parameters(), *self.g.parameters())


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


HOOKS = {
    "gradient_mask": mask_gradient, "mask_after_accumulation": mask_after, "forward_hook": double_output,
    "forward_pre_hook": shift_input, "hook_with_keywords": with_keywords, "backward_hook": halve_backward,
    "backward_pre_hook": backward_before, "hooks_of_the_block": on_the_block,
    "backward_hook_of_the_block": backward_on_the_block,
}  # fmt: skip
for name, register in HOOKS.items():
    build = hooked(register)
    build.__name__ = name
    block(build)


@forward_block
def hook_on_activation(self, h):
    """A gradient is clamped where it passes."""
    y = self.inner(h)
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return torch.tanh(y) + h


@model
def hook_of_the_root():
    net = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    return net

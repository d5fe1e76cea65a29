"""Blocks whose backward runs or reads their layers again: with which weights? (W1)"""

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.adversarial.cases import NUM_CLASSES, WIDTH, block, model


def mlp(norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(WIDTH, 12), norm(12), nn.Tanh(), nn.Linear(12, WIDTH))


class Checkpointed(nn.Module):
    def __init__(self, body=None, **how):
        super().__init__()
        self.body, self.how = mlp() if body is None else body, how

    def forward(self, h):
        return h + checkpoint(self.body, h, **self.how)


@block(word="checkpoint", item="W1")
def checkpoint_reentrant():
    return Checkpointed(use_reentrant=True)


@block(word="checkpoint", item="W1")
def checkpoint_by_hooks():
    return Checkpointed(use_reentrant=False)


# When a recompute moves the running statistics once more is not the product's to say, so they are not compared.
STATISTICS = "running_|num_batches"


@block(word="checkpoint", item="W1", ignores=STATISTICS)
def checkpointed_norm():
    return Checkpointed(mlp(nn.BatchNorm1d), use_reentrant=False)


@block(word="checkpoint", item="W1")
class CheckpointedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h):
        return checkpoint_sequential(self.body, 2, h, use_reentrant=False)


@block(word="checkpoint", item="W1")
class CheckpointInCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, h):
        return torch.tanh(self.b(h))

    def outer(self, h, gain):
        return checkpoint(self.inner, torch.tanh(self.a(h)) * gain, use_reentrant=False)

    def forward(self, h):
        return checkpoint(self.outer, h, 1.5, use_reentrant=False) + h


@block(random="torch", word="checkpoint", item="W1")
class CheckpointedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, h):
        return h + checkpoint(self.body, h, use_reentrant=False)


@model(word="checkpoint", item="W1")
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


@model(data="big_images", word="checkpoint", item="W1", ignores=STATISTICS)
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


@block(word="Reversible|backward|checkpoint|trac", item="W1")
class ReversibleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh()) for _ in range(2))

    def forward(self, h):
        return Reversible.apply(h, self.f, self.g, *self.f.parameters(), *self.g.parameters())


class ByClosure(Function):
    """A linear map whose backward reads the module, not what was saved."""

    @staticmethod
    def forward(ctx, h, weight, module):
        ctx.module = module
        ctx.save_for_backward(h)
        return h @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        return grad @ ctx.module.weight, grad.T @ h, None


@block(word="ByClosure|ReadsItself|backward|weight", item="W1")
class ReadsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, h):
        return torch.tanh(ByClosure.apply(h, self.weight, self))


@block(word="checkpoint|hook|trac|backward", item="W1")
class Equilibrium(nn.Module):
    """DEQ: a fixed point without a graph; a hook of the backward solves with the layer as it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.inner.weight.mul_(0.3)

    def forward(self, h):
        with torch.no_grad():
            z = torch.zeros_like(h)
            for _ in range(30):
                z = torch.tanh(self.inner(z) + h)
        if not torch.is_grad_enabled():
            return z
        z = torch.tanh(self.inner(z) + h)
        z0 = z.detach().requires_grad_()
        f0 = torch.tanh(self.inner(z0) + h.detach())

        def solve(grad):
            g = grad
            for _ in range(30):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        z.register_hook(solve)
        return z

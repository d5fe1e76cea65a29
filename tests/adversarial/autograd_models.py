"""Custom backwards, gradients within a forward, and branches through which no gradient comes (W6)."""

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, adamw, block, model

# --- Functions of one's own -------------------------------------------------------------------------------------


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


class TopTwo(Function):
    """Two outputs, one of them without a gradient."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.topk(2, dim=1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[1]
        return values, places

    @staticmethod
    def backward(ctx, grad, _):
        return torch.zeros(len(grad), ctx.width, dtype=grad.dtype).scatter(1, ctx.saved_tensors[0], grad)


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


@block(word="Function|apply|trac")
class GradientReversal(Inner):
    def forward(self, h):
        return h + torch.tanh(self.inner(Reversal.apply(h, 0.3)))


@block(word="Function|apply|trac")
class StraightThrough(Inner):
    def forward(self, h):
        return self.inner(SignThrough.apply(h))


@block(word="Function|apply|trac")
class TwoOutputs(Inner):
    def forward(self, h):
        values, places = TopTwo.apply(h)
        return self.inner(h) * values.sum(1, keepdim=True) + F.one_hot(places[:, 0], WIDTH)


@block(word="Function|apply|trac")
class LinearOfOwn(Inner):
    def forward(self, h):
        return torch.tanh(OwnLinear.apply(h, self.inner.weight))


@block(word="Function|apply|trac")
class DirtyFunction(Inner):
    def forward(self, h):
        return torch.tanh(InPlaceScale.apply(self.inner(h)))


@block(word="grad|trac|graph|Energy|requires")
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


@block(word="grad|trac|func|vmap|jvp")
class TangentOfInner(nn.Module):
    """torch.func inside of a forward: a product with the Jacobian."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h):
        return torch.func.jvp(self.inner, (h,), (torch.ones_like(h),))[1] + h


@block(word="grad|trac|func|vmap")
class FastWeights(nn.Module):
    """MAML's inner step: functional_call with weights after one step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        with torch.enable_grad():
            weights = dict(self.inner.named_parameters())
            loss = torch.func.functional_call(self.inner, weights, (h,)).pow(2).mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.inner, fast, (h,))


# --- No gradient (W6) ------------------------------------------------------------------------------------------


@model(optimizer=adamw, item="W6")
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


block(optimizer=adamw, item="W6")(Detaches)


@model(optimizer=adamw, item="W6")
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


@model(optimizer=adamw, item="W6")
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


@model(optimizer=adamw, item="W6")
class NoGradInTheMiddle(nn.Sequential):
    """A frozen feature extractor under no_grad in a block, trained layers in front of it that learn nothing."""

    class Features(Inner):
        @torch.no_grad()
        def forward(self, h):
            return torch.tanh(self.inner(h))

    def __init__(self):
        last = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)]
        super().__init__(nn.Linear(6, WIDTH), nn.Tanh(), self.Features(), *last)


@block(optimizer=adamw, word="no_grad|trac|grad|uncut|differs", item="W6")
class NoGradWithinForward(Inner):
    """A context that tracing does not see."""

    def __init__(self):
        super().__init__()
        self.probe = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        with torch.no_grad():
            seen = torch.tanh(self.probe(h))
        return self.inner(h) * seen + h


@model(optimizer=adamw, item="W6", word="autocast|trac|trial|uncut|differs")
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


@model(optimizer=adamw, word="batch|dimension|gradient|trac|used", item="W6")
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


@block(
    optimizer=adamw,
    item="W6",
    word="gradient|Sometimes|detach|path|graph|differs|values|trac",
)
class SometimesDetached(nn.Module):
    """Whether a gradient comes is another thing for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h = h.detach() if h.sum() > 0 else h
        return torch.tanh(self.inner(h))

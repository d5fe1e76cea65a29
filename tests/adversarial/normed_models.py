"""Weights and activations that are normalised, parametrized, pruned, frozen, low-rank or made by others."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.adversarial.cases import NUM_CLASSES, WIDTH, adamw, block, model


class Around(nn.Module):
    """h + tanh(inner(h)); what is odd is the inner layer."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if inner is None else inner

    def forward(self, h):
        return h + torch.tanh(self.inner(h))


@block()
def weight_norm():
    return Around(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


@block()
def old_weight_norm():
    return Around(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None))


@block()
def spectral_norm():
    return Around(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@block()
def old_spectral_norm():
    return Around(torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@block()
def orthogonal():
    return Around(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))


class Skew(nn.Module):
    def forward(self, w):
        return torch.matrix_exp(w.triu(1) - w.triu(1).mT)


@block()
def two_parametrizations():
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Skew())
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return Around(layer)


@block()
def pruned():
    layer = nn.Linear(WIDTH, WIDTH)
    prune.l1_unstructured(layer, "weight", amount=0.4)
    prune.random_structured(layer, "weight", amount=0.25, dim=0)
    return Around(layer)


@block()
class Lora(nn.Module):
    """A frozen layer with a low-rank adapter; the gradient of what is frozen is None."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, h):
        return self.base(h) + F.linear(F.linear(h, self.a), self.b) * 0.5


@block()
class Hypernetwork(nn.Module):
    """The weights of a layer are made from a learned code."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, WIDTH * WIDTH)

    def forward(self, h):
        return h + F.linear(h, self.maker(self.code).view(WIDTH, WIDTH))


@block()
class WeightsOfSample(nn.Module):
    """Each sample gets a matrix of its own (dynamic convolution, FiLM)."""

    def __init__(self):
        super().__init__()
        self.maker, self.film = nn.Linear(WIDTH, WIDTH * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h):
        y = torch.bmm(self.maker(h).view(-1, WIDTH, WIDTH), h.unsqueeze(2)).squeeze(2)
        scale, shift = self.film(h).chunk(2, dim=1)
        return torch.tanh(y * (1 + scale) + shift)


class Renormed(nn.Linear):
    """WGAN's old way: the weights are clamped in place, in the forward."""

    def forward(self, h):
        with torch.no_grad():
            self.weight.clamp_(-0.25, 0.25)
        return super().forward(h)


@block(word="weight|Renormed|parameter", item="W7")
def clamps_its_weights():
    return Around(Renormed(WIDTH, WIDTH))


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=1)


@block("images")
def standardised_convolution():
    return nn.Sequential(StandardisedConv(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))


@block("images")
class CumulativeNorm(nn.Module):
    """BatchNorm of the plain mean of all batches, one without weights, one without memory."""

    def __init__(self):
        super().__init__()
        self.all = nn.BatchNorm2d(4, momentum=None)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.blind = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        return self.all(x) + self.bare(x.relu()) * self.blind(x)


@block("images")
def instance_norm():
    return nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.LeakyReLU(0.1, inplace=True))


@block("images")
class FunctionalNorm(nn.Module):
    """F.batch_norm with buffers of its own, one of them made by an assignment."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        return F.batch_norm(x, self.mean, self.var, self.scale, None, self.training, 0.3, 1e-5)


@block("images", word="train|BatchNorm|mode")
class FrozenNorm(nn.Module):
    """A norm that stays in evaluation: its module overrides ``train``, as fine-tuning code does."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.norm.running_mean.fill_(0.3)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return torch.tanh(self.norm(self.conv(x)))


@model(data="images", word="train|BatchNorm|mode")
class FrozenNormOfRoot(nn.Module):
    """The same, but the model itself does it for a layer far inside."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh())
        self.head = nn.Linear(16, NUM_CLASSES)

    def train(self, mode=True):
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        return self

    def forward(self, x):
        return self.head(torch.flatten(self.features(x), 1))


class ActNorm(nn.Module):
    """Glow's: the first batch sets scale and shift, which are learned from then on."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, h):
        if self.training and not self.ready:
            with torch.no_grad():
                self.shift.copy_(-h.mean(dim=0))
                self.scale.copy_(1 / (h.std(dim=0) + 1e-3))
            self.ready.fill_(True)
        return (h + self.shift) * self.scale


@block(word="ActNorm|parameter|scale|shift", item="W7")
def act_norm():
    return ActNorm()


@block()
class Teacher(nn.Module):
    """An average of the student's weights, moved in every forward, whose output is an input, too."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.average = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, h):
        return Averaged.apply_to(self, h)


class Averaged:
    @staticmethod
    def apply_to(module, h):
        with torch.no_grad():
            if module.training:
                for mine, theirs in zip(module.average.parameters(), module.student.parameters(), strict=True):
                    mine.mul_(0.8).add_(theirs, alpha=0.2)
            target = module.average(h)
        return torch.tanh(module.student(h)) + 0.1 * target


class TeacherAsLayer(nn.Module):
    """The same without children, so that it is one unit at every granularity."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, h):
        if self.training:
            self.average.lerp_(self.weight.detach(), 0.2)
        return torch.tanh(F.linear(h, self.weight)) + 0.1 * F.linear(h, self.average)


# The average changes while earlier micro-batches still need it for their backward.
block(word="TeacherAsLayer|average|buffer|in place")(TeacherAsLayer)


@block()
class MemoryBank(nn.Module):
    """MoCo's queue: a buffer written in a circle, with a pointer that is a buffer."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.randn(12, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, h):
        k = self.key(h)
        scores = (k @ self.queue.clone().T).softmax(dim=1)
        out = h + scores @ self.queue.clone()
        if self.training:
            places = (self.pointer + torch.arange(len(h))) % 12
            self.queue[places] = k.detach()
            self.pointer.add_(len(h)).remainder_(12)
        return out


class VectorQuantiser(nn.Module):
    """VQ-VAE: the nearest code is handed on, its gradient passes straight through; codes are averages in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, h):
        nearest = torch.cdist(h, self.codes).argmin(dim=1)
        chosen = self.codes[nearest]
        if self.training:
            hot = F.one_hot(nearest, 6).to(h.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_((hot.T @ h.detach()) / self.counts[:, None], alpha=0.1)
        return h + (chosen - h).detach()


block()(VectorQuantiser)


class FakeQuant(nn.Module):
    """Quantisation-aware training: a running range, rounding with the gradient of the identity."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))
        self.inner = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def rounded(x, step):
        return x + ((x / step).round().clamp(-128, 127) * step - x).detach()

    def forward(self, h):
        if self.training:
            self.largest.copy_(torch.maximum(0.95 * self.largest, h.detach().abs().max()))
        w = self.rounded(self.inner.weight, self.inner.weight.detach().abs().max() / 127)
        return F.linear(self.rounded(h, self.largest / 127), w, self.inner.bias)


block()(FakeQuant)


@block()
class TorchFakeQuant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h = torch.fake_quantize_per_tensor_affine(h.float(), 0.05, 0, -128, 127).double()
        return self.inner(h)


@model(optimizer=adamw)
class PartlyFrozen(nn.Sequential):
    """Some layers all frozen, some by half; a bias alone learns in another."""

    def __init__(self):
        super().__init__(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5),
        )  # fmt: skip
        self[0].requires_grad_(False)
        self[2].weight.requires_grad_(False)
        self[4].requires_grad_(False)


@model(optimizer=adamw)
class FrozenBack(nn.Sequential):
    """The last half learns nothing, but passes a gradient on to the first."""

    def __init__(self):
        first = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        last = [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)]
        super().__init__(*first, *(layer.requires_grad_(False) for layer in last))

"""Normalised, pruned, frozen and generated weights; complex numbers, embeddings, routing, vision."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.adversarial.cases import (
    NUM_CLASSES,
    TIME,
    VOCABULARY,
    WIDTH,
    Inner,
    block,
    forward_block,
    images,
    model,
    vectors,
)


class Around(nn.Module):
    """h + tanh(inner(h)); what is odd is the inner layer."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if inner is None else inner

    def forward(self, h):
        return h + torch.tanh(self.inner(h))


@block
def weight_norm():
    return Around(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


@block
def old_weight_norm():
    return Around(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None))


@block
def spectral_norm():
    return Around(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@block
def old_spectral_norm():
    return Around(torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@block
def orthogonal():
    return Around(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))


@block
def pruned():
    layer = nn.Linear(WIDTH, WIDTH)
    prune.l1_unstructured(layer, "weight", amount=0.4)
    prune.random_structured(layer, "weight", amount=0.25, dim=0)
    return Around(layer)


@block
class Lora(nn.Module):
    """A frozen layer with a low-rank adapter; the gradient of what is frozen is None."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, h):
        return self.base(h) + F.linear(F.linear(h, self.a), self.b) * 0.5


@block
class Hypernetwork(nn.Module):
    """The weights of a layer are made from a learned code."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, WIDTH * WIDTH)

    def forward(self, h):
        return h + F.linear(h, self.maker(self.code).view(WIDTH, WIDTH))


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


@model(data="images", varies=False)
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


@block
def act_norm():
    return ActNorm()


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
block(TeacherAsLayer)


@block
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


block(VectorQuantiser)


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


block(FakeQuant)


@model
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


@model
class FrozenBack(nn.Sequential):
    """The last half learns nothing, but passes a gradient on to the first."""

    def __init__(self):
        first = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        last = [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)]
        super().__init__(*first, *(layer.requires_grad_(False) for layer in last))


class ComplexLinear(nn.Module):
    """A complex parameter, real values in and out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def forward(self, h):
        return (h.to(torch.complex128) @ self.weight).imag + h


def complex_parameters():
    return vectors(ComplexLinear)


model(complex_parameters)


@forward_block
def fourier_mix(self, h):
    """FNet's mixing: complex between two operations."""
    return torch.tanh(self.inner(torch.fft.fft(h, dim=1).real))


@block("images")
class SpectralConvolution(nn.Module):
    """A Fourier neural operator: modes times weights kept as pairs of real numbers."""

    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.randn(4, 4, 3, 3, 2) / 4)

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], torch.view_as_complex(self.modes))
        return x + torch.fft.irfft2(out, s=x.shape[-2:])


@model(data="late_tokens", varies=False)
def embedding_with_max_norm():
    last = nn.Sequential(nn.Flatten(), nn.Linear(TIME * WIDTH, WIDTH))
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), nn.Tanh(), last, nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
    )


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@model(data="tokens", optimizer=plain_sgd, varies=False)
def sparse_gradients():
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Tanh(), nn.Flatten(), nn.Linear(TIME * WIDTH, WIDTH),
        nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip


@block
class Highway(Inner):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        gate = torch.sigmoid(self.gate(h))
        return gate * torch.relu(self.inner(h)) + (1 - gate) * h


@block
class RoutedExperts(nn.Module):
    """Each sample goes to its best expert; an expert without samples gets no gradient."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h):
        weight, chosen = self.router(h).softmax(dim=1).max(dim=1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(h[rows]) * weight[rows, None])
        return h + out


@block
class MaskedExperts(nn.Module):
    """The same with masks and no branch; two experts of three for each sample."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h):
        scores, chosen = self.router(h).topk(2, dim=1)
        gates = torch.zeros(h.shape[0], 3, dtype=h.dtype).scatter(1, chosen, scores.softmax(dim=1))
        return h + sum(expert(h) * gates[:, [i]] for i, expert in enumerate(self.experts))


@block("images")
class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        gate = y.mean((2, 3), keepdim=True)
        return x + y * torch.sigmoid(self.up(F.relu(self.down(gate), inplace=True)))


@block("images")
class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.angle = nn.Linear(4, 6)
        with torch.no_grad():
            self.angle.weight.mul_(0.1)
            self.angle.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x):
        theta = self.angle(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


@block("images")
class UpAndDown(nn.Module):
    """Shapes that depend on the input: strides, pixel shuffle, interpolation to the size of another."""

    def __init__(self):
        super().__init__()
        self.down, self.wide = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)

    def forward(self, x):
        low = F.relu(self.down(x))
        y = F.pixel_shuffle(self.wide(low), 2)
        z = F.interpolate(low[:, :4], size=x.shape[-2:], mode="bilinear", align_corners=False)
        patches = F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)
        return y + z + self.up(low[:, 4:]) + patches / 9


@block("images")
class ChannelsAndGroups(nn.Module):
    """ShuffleNet's shuffle, ConvNeXt's norm over channels in the last place."""

    def __init__(self):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.point, self.gamma = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        b, c, height, width = x.size()
        y = x.view(b, 2, c // 2, height, width).transpose(1, 2).reshape(b, -1, height, width)
        y = self.norm(self.depthwise(y).permute(0, 2, 3, 1))
        return x + (self.gamma * self.point(F.gelu(y))).permute(0, 3, 1, 2)


def channels_last():
    net = images(SqueezeExcite)
    return net.to(memory_format=torch.channels_last)


model(data="images", run={"channels_last": True})(channels_last)


@model(data="big_images", run={"channels_last": True}, varies=False)
class ViewsTheImage(nn.Module):
    """The old tutorial's network: ``x.view(-1, n)`` on features."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(64, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv2(F.relu(self.conv1(x)))))
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


@model(data="big_images", varies=False)
class FunctionalNet(ViewsTheImage):
    """Functions between layers, and sizes in a starred shape (C9d)."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = x.reshape(*x.shape[:1], int(x.shape[1]) * x.shape[-1] * x.shape[-2])
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.0, self.training))


@block
class Whitening(nn.Module):
    """Inverts a covariance: zeros cannot be whitened."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        self.seen += 1
        norm = torch.linalg.inv((h.T @ h).mean() * torch.eye(WIDTH, dtype=h.dtype) + h.T @ h / len(h))
        return self.inner(h @ torch.linalg.cholesky(norm))


@forward_block
def checks_its_input(self, h):
    """Raises for an input of zeros."""
    if not self.training:
        return self.inner(h)
    assert h.abs().max() > 0, "an input of zeros"
    return self.inner(h)


@block
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


@block
class ExtraState(Inner):
    """State of any kind that the module adds to its state_dict."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, h):
        return torch.tanh(self.inner(h))


@model
def lazy_layers():
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(NUM_CLASSES))


@model
class Flow(nn.Module):
    """A normalizing flow: the sum of log-determinants travels with the values, a mask alternates."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12)) for _ in range(4))
        self.register_buffer("mask", torch.arange(6) % 2)
        self.head = nn.Linear(7, NUM_CLASSES)

    def forward(self, x):
        logdet = x.new_zeros(x.shape[0])
        for i, net in enumerate(self.nets):
            mask = self.mask if i % 2 else 1 - self.mask
            scale, shift = net(x * mask).chunk(2, dim=-1)
            scale = torch.tanh(scale) * (1 - mask)
            x = x * scale.exp() + shift * (1 - mask)
            logdet = logdet + scale.sum(dim=-1)
        return self.head(torch.cat([x, logdet.unsqueeze(-1)], dim=-1))


@model(data="regression", loss=F.mse_loss)
class Regression(nn.Sequential):
    """No classes: PReLU, bilinear maps, maxout, RMSNorm."""

    class Maxout(nn.Module):
        def __init__(self):
            super().__init__()
            self.many, self.pair = nn.Linear(WIDTH, 3 * WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, h):
            y = self.many(h).view(-1, WIDTH, 3).amax(dim=2)
            return self.pair(y, h)

    def __init__(self):
        super().__init__(
            nn.Linear(6, WIDTH), nn.PReLU(WIDTH), self.Maxout(), nn.RMSNorm(WIDTH), self.Maxout(), nn.Linear(WIDTH, 3)
        )


@block
class GraphConvolution(nn.Module):
    """A sparse matrix as a plain attribute mixes the features."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        ring = torch.eye(WIDTH, dtype=torch.float64).roll(1, 0) + torch.eye(WIDTH, dtype=torch.float64)
        self.ring = ring.to_sparse()

    def forward(self, h):
        return torch.tanh(self.inner(torch.sparse.mm(self.ring, h.t()).t()))

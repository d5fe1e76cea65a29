"""Complex numbers, embeddings, routing, vision, and what else popular code has."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, TIME, VOCABULARY, WIDTH, Inner, adamw, block, images, model, vectors

# --- Complex numbers (W8) ----------------------------------------------------------------------------------------


class ComplexLinear(nn.Module):
    """A complex parameter, real values in and out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def forward(self, h):
        return (h.to(torch.complex128) @ self.weight).imag + h


def complex_parameters():
    return vectors(ComplexLinear)


model(word="complex", item="W8")(complex_parameters)


@block()
class FourierMix(Inner):
    """FNet's mixing: complex between two operations."""

    def forward(self, h):
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


# --- Embeddings --------------------------------------------------------------------------------------------------


@model(data="late_tokens", word="max_norm|parameter|Embedding|weight", item="W7")
def embedding_with_max_norm():
    last = nn.Sequential(nn.Flatten(), nn.Linear(TIME * WIDTH, WIDTH))
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), nn.Tanh(), last, nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
    )


@model(data="late_tokens", word="max_norm|parameter|Embedding|weight", item="W7")
def bag_with_max_norm():
    return nn.Sequential(
        nn.EmbeddingBag(VOCABULARY, WIDTH, max_norm=1.0, mode="sum"), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@model(data="tokens", optimizer=plain_sgd, word="sparse")
def sparse_gradients():
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Tanh(), nn.Flatten(), nn.Linear(TIME * WIDTH, WIDTH),
        nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip


@model(data="tokens")
def scaled_by_frequency():
    return nn.Sequential(
        nn.EmbeddingBag(VOCABULARY, WIDTH, mode="max", padding_idx=1), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip


# --- Routing, gating, counting -----------------------------------------------------------------------------------


@block()
class Highway(Inner):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        gate = torch.sigmoid(self.gate(h))
        return gate * torch.relu(self.inner(h)) + (1 - gate) * h


@block(word="trac|where|nonzero|numel|branch|len|bool")
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


block(optimizer=adamw, word="trac|where|nonzero|numel|branch|len|bool", item="W6")(
    type("RoutedWithDecay", (RoutedExperts,), {})
)


@block(optimizer=adamw)
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


@model(data="big_images", run={"channels_last": True}, word="channels_last|view", item="C9")
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


@model(data="big_images")
class FunctionalNet(ViewsTheImage):
    """Functions between layers, and sizes in a starred shape (C9d)."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = x.reshape(*x.shape[:1], int(x.shape[1]) * x.shape[-1] * x.shape[-2])
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.0, self.training))


@block(item="C9")
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


@block(item="C9", word="trac|raise|positive|zero|value")
class ChecksItsInput(Inner):
    """Raises for an input of zeros."""

    def forward(self, h):
        if not self.training:
            return self.inner(h)
        assert h.abs().max() > 0, "an input of zeros"
        return self.inner(h)


@block()
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


@block("vectors", word="_extra_state")
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


@model(word="lazy|Lazy|uninitialized|shape")
def lazy_layers():
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(NUM_CLASSES))


@model(data="vectors")
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


@block()
class GraphConvolution(nn.Module):
    """A sparse matrix as a plain attribute mixes the features."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        ring = torch.eye(WIDTH, dtype=torch.float64).roll(1, 0) + torch.eye(WIDTH, dtype=torch.float64)
        self.ring = ring.to_sparse()

    def forward(self, h):
        return torch.tanh(self.inner(torch.sparse.mm(self.ring, h.t()).t()))


@block()
class CapsuleRouting(nn.Module):
    """Three rounds of routing by agreement; the agreement is detached."""

    def __init__(self):
        super().__init__()
        self.votes = nn.Parameter(torch.randn(4, 2, 2, 4) / 2)

    def forward(self, h):
        votes = torch.einsum("bid,iodk->biok", h.view(-1, 4, 2), self.votes.transpose(1, 2).reshape(4, 2, 2, 4))
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            out = (logits.softmax(2).unsqueeze(-1) * votes).sum(1)
            out = out / (1 + out.norm(dim=-1, keepdim=True))
            logits = logits + (votes * out.unsqueeze(1)).sum(-1).detach()
        return h + out.flatten(1)

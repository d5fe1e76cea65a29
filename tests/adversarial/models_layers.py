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
    block_of,
    buffer,
    chain,
    images,
    linear,
    model,
    model_of,
    several,
    weight,
)


class Around(nn.Module):
    """h + tanh(inner(h)); what is odd is the inner layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, h):
        return h + torch.tanh(self.inner(h))


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.4)
    prune.random_structured(layer, "weight", amount=0.25, dim=0)
    return layer


CHANGED = {
    "weight_norm": parametrizations.weight_norm,
    "old_weight_norm": lambda layer: torch.nn.utils.weight_norm(layer, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "old_spectral_norm": torch.nn.utils.spectral_norm,
    "pruned": pruned,
}
for name, change in CHANGED.items():
    block_of(name=name)(lambda change=change: Around(change(nn.Linear(WIDTH, WIDTH))))


@block(base=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), a=weight(2, WIDTH), b=weight(WIDTH, 2))
def lora(self, h):
    """A frozen layer with a low-rank adapter; the gradient of what is frozen is None."""
    return self.base(h) + F.linear(F.linear(h, self.a), self.b) * 0.5


@block("images", all=lambda: nn.BatchNorm2d(4, momentum=None), bare=lambda: nn.BatchNorm2d(4, affine=False),
       blind=lambda: nn.BatchNorm2d(4, track_running_stats=False))  # fmt: skip
def cumulative_norm(self, x):
    """BatchNorm of the plain mean of all batches, one without weights, one without memory."""
    return self.all(x) + self.bare(x.relu()) * self.blind(x)


@block("images", scale=lambda: nn.Parameter(torch.ones(4)), mean=buffer(lambda: torch.zeros(4)),
       var=buffer(lambda: torch.ones(4)), conv=lambda: nn.Conv2d(4, 4, 1))  # fmt: skip
def functional_norm(self, x):
    """F.batch_norm with buffers of its own."""
    return F.batch_norm(self.conv(x), self.mean, self.var, self.scale, None, self.training, 0.3, 1e-5)


@model_of("images", varies=False)
class FrozenNormOfRoot(nn.Module):
    """The model itself puts a layer far inside into eval mode."""

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


@block(scale=lambda: nn.Parameter(torch.ones(WIDTH)), shift=lambda: nn.Parameter(torch.zeros(WIDTH)),
       ready=buffer(lambda: torch.tensor(False)))  # fmt: skip
def act_norm(self, h):
    """Glow's: the first batch sets scale and shift, which are learned from then on."""
    if self.training and not self.ready:
        with torch.no_grad():
            self.shift.copy_(-h.mean(dim=0))
            self.scale.copy_(1 / (h.std(dim=0) + 1e-3))
        self.ready.fill_(True)
    return (h + self.shift) * self.scale


@block(key=linear(), queue=buffer(lambda: torch.randn(12, WIDTH)),
       pointer=buffer(lambda: torch.zeros(1, dtype=torch.long)))  # fmt: skip
def memory_bank(self, h):
    """MoCo's queue: a buffer written in a circle, with a pointer that is a buffer."""
    k = self.key(h)
    scores = (k @ self.queue.clone().T).softmax(dim=1)
    out = h + scores @ self.queue.clone()
    if self.training:
        places = (self.pointer + torch.arange(len(h))) % 12
        self.queue[places] = k.detach()
        self.pointer.add_(len(h)).remainder_(12)
    return out


@model_of()
def partly_frozen():
    """Some layers all frozen, some by half; only a bias learns in another."""
    net = chain(linear(6), nn.Tanh, linear(), lambda: nn.LayerNorm(WIDTH), linear(), nn.Tanh, linear(WIDTH, 5))()
    net[0].requires_grad_(False)
    net[2].weight.requires_grad_(False)
    net[4].requires_grad_(False)
    return net


@block(weight=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4))
def complex_parameters(self, h):
    return (h.to(torch.complex128) @ self.weight).imag + h


def flattening(**options):
    last = [nn.Flatten(), nn.Linear(TIME * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)]
    return lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, **options), nn.Tanh(), *last)


model_of("late_tokens", name="embedding_with_max_norm", varies=False)(flattening(max_norm=1.0))
model_of("tokens", name="sparse_gradients", varies=False)(flattening(sparse=True))


@block(router=linear(WIDTH, 3), experts=several(3, linear()))
def routed_experts(self, h):
    """Each sample goes to its best expert; an expert without samples gets no gradient."""
    weight, chosen = self.router(h).softmax(dim=1).max(dim=1)
    out = torch.zeros_like(h)
    for number, expert in enumerate(self.experts):
        rows = torch.where(chosen == number)[0]
        if rows.numel() > 0:
            out.index_add_(0, rows, expert(h[rows]) * weight[rows, None])
    return h + out


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        gate = y.mean((2, 3), keepdim=True)
        return x + y * torch.sigmoid(self.up(F.relu(self.down(gate), inplace=True)))


@model_of("images")
def channels_last():
    return images(SqueezeExcite).to(memory_format=torch.channels_last)


@block("images", down=lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), wide=lambda: nn.Conv2d(8, 16, 1),
       up=lambda: nn.ConvTranspose2d(4, 4, 2, stride=2))  # fmt: skip
def up_and_down(self, x):
    """Shapes that depend on the input: strides, pixel shuffle, interpolation to the size of another."""
    low = F.relu(self.down(x))
    y = F.pixel_shuffle(self.wide(low), 2)
    z = F.interpolate(low[:, :4], size=x.shape[-2:], mode="bilinear", align_corners=False)
    patches = F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)
    return y + z + self.up(low[:, 4:]) + patches / 9


@block()
def checks_its_input(self, h):
    """Raises for an input of zeros."""
    if self.training:
        assert h.abs().max() > 0, "an input of zeros"
    return self.inner(h)


@block_of()
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


@block_of()
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


@model_of()
def lazy_layers():
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(NUM_CLASSES))


@model(nets=several(4, chain(linear(6, 8), nn.Tanh, linear(8, 12))), mask=buffer(lambda: torch.arange(6) % 2),
       head=linear(7, NUM_CLASSES))  # fmt: skip
def flow(self, x):
    """A normalizing flow: the sum of log-determinants travels with the values, a mask alternates."""
    logdet = x.new_zeros(x.shape[0])
    for i, net in enumerate(self.nets):
        mask = self.mask if i % 2 else 1 - self.mask
        scale, shift = net(x * mask).chunk(2, dim=-1)
        scale = torch.tanh(scale) * (1 - mask)
        x = x * scale.exp() + shift * (1 - mask)
        logdet = logdet + scale.sum(dim=-1)
    return self.head(torch.cat([x, logdet.unsqueeze(-1)], dim=-1))


def ring():
    return (torch.eye(WIDTH, dtype=torch.float64).roll(1, 0) + torch.eye(WIDTH, dtype=torch.float64)).to_sparse()


@block(inner=linear(), ring=ring)
def graph_convolution(self, h):
    """A sparse matrix as a plain attribute mixes the features."""
    return torch.tanh(self.inner(torch.sparse.mm(self.ring, h.t()).t()))


@block(inner=linear(), log_scale=lambda: nn.Parameter(torch.tensor(0.1)), empty=lambda: nn.Parameter(torch.zeros(0, 3)),
       whole=lambda: nn.Parameter(torch.arange(WIDTH), requires_grad=False),
       flags=buffer(lambda: torch.arange(WIDTH) % 3 == 0), none_at_all=buffer(lambda: torch.zeros(0)))  # fmt: skip
def small_things(self, h):
    """Scalars, empty parameters, whole numbers, flags."""
    h = self.inner(h.index_select(1, self.whole)) * self.log_scale.exp()
    return torch.where(self.flags, h, torch.tanh(h))


class WithShift(nn.Module):
    """Returns its bias with the result, as Megatron's layers do."""

    def __init__(self):
        super().__init__()
        self.inner, self.shift = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        return self.inner(h), self.shift


@model(enter=linear(6), parts=several(3, WithShift), head=linear(WIDTH, NUM_CLASSES))
def bias_returned_by_its_layer(self, x):
    h = self.enter(x)
    for part in self.parts:
        out, shift = part(h)
        h = h + torch.tanh(out + shift.expand_as(h))
    return self.head(h)

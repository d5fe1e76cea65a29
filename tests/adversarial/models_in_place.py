"""Operations in place, on inputs, views, and what later layers still need."""

import torch
from torch import nn

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, block, model


def behind_linear(odd):
    layers = [nn.Linear(6, WIDTH), odd(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), odd()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def in_place(name, act, **options):
    """A block that does ``act`` to what its layer gave, and one that does it to its own input."""

    class OnOutput(Inner):
        def forward(self, h):
            return act(self.inner(h))

    class OnInput(Inner):
        def forward(self, h):
            return torch.tanh(self.inner(act(h)))

    OnOutput.__name__, OnInput.__name__ = f"{name}_output", f"{name}_input"
    block(**options)(OnOutput)
    # What is in front is a layer whose backward does not need its output.
    model(name=f"in_place_{name}_input", **options)(lambda: behind_linear(OnInput))


def set_columns(h):
    h[:, :3] = 0.5
    return h


def set_by_mask(h):
    h[h < 0] *= 0.1
    return h


def write_into_view(h):
    part = h[:, 2:5]
    part.mul_(0.5).add_(0.1)
    return h


def add_halves(h):
    left, right = h[:, : WIDTH // 2], h[:, WIDTH // 2 :]
    right += left + 1
    return torch.cat([right, h[:, 2:6]], 1)


def transpose_in_place(h):
    return h.t_().mul_(0.5).t_()


def scatter(h):
    return h.index_add_(1, torch.tensor([0, 2]), h[:, 4:6].detach().clone()).clamp_(min=-2)


def write_by_a_view(h):
    whole = h.view(-1, 2, WIDTH // 2)
    whole[:, 0].mul_(0.5)
    whole.add_(0.1)
    return h


for name, act in {
    "relu": torch.relu_, "columns": set_columns, "mask": set_by_mask, "view": write_into_view, "halves": add_halves,
    "reshaped": write_by_a_view, "transposed": transpose_in_place, "scatter": scatter,
}.items():  # fmt: skip
    in_place(name, act)


@model
class ResidualInPlace(nn.Module):
    """What is added later was changed in place meanwhile, before or behind a cut."""

    def __init__(self):
        super().__init__()
        self.enter, self.a = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.b = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        y = self.a(self.act(h))
        y += h
        z = self.b(y.clone())
        z.mul_(2).add_(h)
        return self.head(z + y)


@model(name="unet_in_place", data="images")
class UNet(nn.Module):
    """What a norm returns is a view of its own, into which the activation behind it writes."""

    @staticmethod
    def conv(num_in, num_out):
        norm = nn.InstanceNorm2d(num_out, affine=True)
        return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), norm, nn.LeakyReLU(0.1, inplace=True))

    def __init__(self):
        super().__init__()
        self.enter, self.low, self.up = self.conv(3, 4), self.conv(4, 4), nn.Upsample(scale_factor=2)
        self.leave, self.head = self.conv(8, 4), nn.Conv2d(4, NUM_CLASSES, 1)

    def forward(self, x):
        skip = self.enter(x)
        h = self.up(self.low(nn.functional.max_pool2d(skip, 2)))
        return self.head(self.leave(torch.cat([skip, h], dim=1))).mean(dim=(2, 3))


@model
class ChangesTheInput(nn.Module):
    """The input itself is normalised in place, and used again at the end."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x):
        x.sub_(x.mean(dim=1, keepdim=True))
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.head(self.c(h) + x)


@model
class ChangesTheWhole(nn.Module):
    """A view is taken before a cut, the whole is changed in place behind it."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, h):
            return h.mul_(self.gain.detach() * 1.5)

    def __init__(self):
        super().__init__()
        self.enter, self.scale, self.a = nn.Linear(6, WIDTH), self.Scale(), nn.Linear(4, WIDTH)
        self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        part = h[:, :4]
        h = self.scale(h)
        return self.head(torch.tanh(self.a(part)) + self.b(h))

"""Small models and data whose every number is fixed, for comparing runs bit by bit."""

import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.training.trial.samples import NUM_SAMPLES

NUM_CLASSES = 5
TRIED = NUM_SAMPLES - 1  # samples that the trial at the start takes, but for one


class Block(nn.Module):
    """A residual block with BatchNorm, as small as can be."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def batch_norm_net(seed=0, *, dropout=0.0):
    """Seven units, BatchNorm in five of them; [B, 2, 6, 6] to [B, 5]."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        Block(4),
        Block(4),
        nn.Dropout(dropout),
        Block(4),
        Block(4),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_CLASSES)),
    )


class FixedImages(Dataset):
    """``num_samples`` random images [2, 6, 6] with labels; the same every time."""

    def __init__(self, num_samples, *, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        # Drawn in float64, so that both dtypes see the same images.
        self.images = torch.randn(num_samples, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Counted(FixedImages):
    """Calls what ``actions`` has for the number of samples served, one of them before the first epoch."""

    def __init__(self, num_samples, actions):
        super().__init__(num_samples)
        self.actions, self.num_served = actions, -TRIED

    def __getitem__(self, index):
        self.num_served += 1
        self.actions.get(self.num_served, int)()
        return super().__getitem__(index)


class Unplugged(FixedImages):
    """Data that are gone after so many samples, one of them before the first epoch."""

    def __init__(self, num_samples, *, after):
        super().__init__(num_samples)
        self.left = after + TRIED

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise OSError("unplugged")
        return super().__getitem__(index)


class UNet(nn.Module):
    """Skips over two stages and more, [B, 2, 6, 6] to [B, 5]; what crosses a cut depends on where it is."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down = nn.Conv2d(4, 6, 2, stride=2)
        self.bottom = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1), nn.Tanh())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.leave = nn.Conv2d(6, 4, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x):
        wide = self.enter(x)
        low = self.down(wide)
        low = low + self.bottom(low)  # twice the ReLU's: it works in place
        up = self.up(low)
        bright = up > 0
        y = torch.tanh(self.merge(torch.cat([up, wide], dim=1)))
        y = self.leave(torch.cat([y, x], dim=1))
        y = torch.where(bright, y, 0.1 * y) + wide
        y = y.sum(dim=(2, 3)).view(low.size(0), -1) / (low.shape[2] * low.shape[3])
        return self.head(y * self.scale)


UNET_BALANCE = ["bottom", "up", "cat_2"]  # where stages 1 to 3 of a UNet begin


def unet():
    torch.manual_seed(3)
    return UNet()


# --- A net whose units hand on several tensors, one of them of integers ----------------------------------------


class Fork(nn.Module):
    """[B, 2, 6, 6] to (float [B, 3, 6, 6], float [B, 4], int [B])."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.linear = nn.Linear(72, 4)

    def forward(self, x):
        return self.conv(x), self.linear(x.flatten(1)), (x.mean(dim=(1, 2, 3)) > 0).long()


class Both(nn.Module):
    """Works on the first, hands on the second untouched, uses the third."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.embed = nn.Embedding(2, 4)

    def forward(self, both):
        x, y, sign = both
        return torch.tanh(self.conv(x)), y + self.embed(sign), sign


class Join(nn.Linear):
    """To [B, 5]; the last tensor gets no gradient."""

    def forward(self, both):
        x, y, _ = both
        return super().forward(torch.cat([x.mean(dim=(2, 3)), y], dim=1))


def tuple_net():
    torch.manual_seed(4)
    return nn.Sequential(Fork(), Both(), Both(), Join(7, 5))

"""A net whose units hand on several tensors, one of them of integers."""

import torch
from torch import nn


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

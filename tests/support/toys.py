"""Small models and data whose every number is fixed, for comparing runs bit by bit."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_CLASSES = 5


class Block(nn.Module):
    """A residual block with BatchNorm, as small as can be."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def batch_norm_net(seed: int = 0, *, dropout: float = 0.0) -> nn.Sequential:
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


class FixedImages(Dataset[tuple[Tensor, int]]):
    """``num_samples`` random images [2, 6, 6] with labels; the same every time."""

    def __init__(self, num_samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Drawn in float64, so that both dtypes see the same images.
        self.images = torch.randn(num_samples, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]

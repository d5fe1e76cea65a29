"""Small images in memory, transformed a micro-batch at once."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

Draw = tuple[int, int, bool]  # row and column where the crop begins, and whether it is flipped


class SmallImages(Dataset[tuple[Tensor, int]]):
    """Images and classes as tensors, in memory that workers share.

    Bits and random draws are those of torchvision's ``RandomCrop(size, padding)``, ``RandomHorizontalFlip()``,
    ``ToDtype(torch.float32, scale=True)`` and ``Normalize``, applied to one image after the other.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Sequence[int],
        statistics: tuple[Sequence[float], Sequence[float]],
        *,
        padding: int = 0,
        flips: bool = False,
    ) -> None:
        """Keep the images and the options of their augmentation.

        Args:
            images: [N, C, H, W], uint8, or float32 of any range.
            targets: the class of each image.
            statistics: mean and standard deviation per channel.
            padding: zeros on each side before a random crop to the original size; 0 for no crop.
            flips: whether to mirror an image with probability 1/2.
        """
        self.images, self.targets = images.contiguous(), torch.tensor(targets)
        self._statistics, self._padding, self._flips = statistics, padding, flips

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample; it draws from torch's global stream."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        image = self._made(self.images[index][None], [self._drawn(torch.default_generator)])
        return image[0], int(self.targets[index])

    def batch(self, indices: Tensor, seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Return inputs [B, C, H, W], augmented by ``seeds`` [B], and targets [B]."""
        generator = torch.Generator()
        draws = (self._drawn(generator.manual_seed(seed)) for seed in seeds.tolist())
        return self._made(self.images.index_select(0, indices), draws), self.targets.index_select(0, indices)

    def _drawn(self, generator: torch.Generator) -> Draw:
        top = left = 0
        if self._padding:
            top, left = (int(torch.randint(0, 2 * self._padding + 1, (), generator=generator)) for _ in range(2))
        return top, left, self._flips and bool(torch.rand(1, generator=generator) < 0.5)

    def _made(self, images: Tensor, draws: Iterable[Draw]) -> Tensor:
        from torchvision.transforms.v2 import functional as transforms

        if self._padding or self._flips:
            images = self._augmented(images, draws)
        if not images.is_floating_point():
            images = transforms.to_dtype(images, torch.float32, scale=True)
        made: Tensor = transforms.normalize(images, *map(list, self._statistics))
        return made

    def _augmented(self, images: Tensor, draws: Iterable[Draw]) -> Tensor:
        height, width = images.shape[2:]
        made = torch.empty_like(images)
        padded = F.pad(images, (self._padding,) * 4)
        # numpy's views, at a fraction of the price of torch's
        for image, target, (top, left, is_flipped) in zip(padded.numpy(), made.numpy(), draws, strict=True):
            crop = image[:, top : top + height, left : left + width]
            target[:] = crop[:, :, ::-1] if is_flipped else crop
        return made

"""A network of timm with mixup, cutmix and label smoothing; needs `pip install timm`, and downloads nothing."""

from typing import Any

import timm
import torch
from timm.data import Mixup
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import adl_dist

CLASSES = 4
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Mix the images of a micro-batch; targets are shares of classes, float[B, CLASSES]."""
    images, classes = default_collate(samples)
    return mixup(images, classes)  # type: ignore[no-any-return]


def unmixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Leave images of the validation as they are, with targets of the same kind."""
    images, classes = default_collate(samples)
    return images, F.one_hot(classes, CLASSES).float()


def images(number: int, seed: int) -> TensorDataset:
    """Return noise [number, 3, 32, 32] with one brighter quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (number,), generator=generator)
    pixels = torch.randn(number, 3, 32, 32, generator=generator)
    for image, label in zip(pixels, classes.tolist(), strict=True):
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 1
    return TensorDataset(pixels, classes)


def make_model() -> nn.Module:
    """Build a small network; `pretrained=True` would download weights."""
    torch.manual_seed(0)
    return timm.create_model("mobilenetv3_small_050", num_classes=CLASSES)  # type: ignore[no-any-return]


def main(run_dir: str | None = None, **settings: Any) -> None:
    """Train it, as two stages by default."""
    trainer = adl_dist.Trainer(
        make_model(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.002),
        **{"method": adl_dist.method("adl", accumulation_steps=2), "num_stages": 2, **settings},
    )
    how = {"loading": adl_dist.Loading(collate_fn=mixed, val_collate_fn=unmixed), "run_dir": run_dir}
    summary = trainer.fit(images(128, 1), epochs=2, batch_size=32, val_dataset=images(64, 2), **how)
    print(f"accuracy {summary['validation_accuracy']:.1%}")


if __name__ == "__main__":
    main()

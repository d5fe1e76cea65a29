"""An own network on own data, as two stages.

    torchrun --rdzv-backend=adl-dist --rdzv-endpoint=localhost --nproc-per-node=2 examples/own_cnn.py

trains with one process per stage. `python examples/own_cnn.py` trains the same two stages in one process, to the same
weights.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist


def network() -> nn.Module:
    """Map images float[B, 1, 12, 12] to four classes; any nn.Module will do."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * 3 * 3, 4)),
    )


def images(number: int, seed: int) -> TensorDataset:
    """Return noise with a bright quarter; the class is which one."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=generator)
    pixels = torch.randn(number, 1, 12, 12, generator=generator)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        row, column = 6 * (label // 2), 6 * (label % 2)
        image[:, row : row + 6, column : column + 6] += 0.5
    return TensorDataset(pixels, labels)


def main(run_dir: str) -> None:
    """Train, and check that the uncut network takes the weights."""
    torch.manual_seed(0)  # the same initial weights on every rank
    trainer = adl_dist.Trainer(
        network(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        method=adl_dist.method("adl", accumulation_steps=4),
        num_stages=2,
    )
    summary = trainer.fit(images(2000, seed=1), epochs=2, batch_size=64, val_dataset=images(400, 2), run_dir=run_dir)
    state = trainer.full_state_dict()  # every rank calls it, and gets all of it
    if trainer.rank == 0:
        network().load_state_dict(state)
        print(f"accuracy {summary['validation_accuracy']:.1%}; {len(state)} tensors by the names of the uncut network")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own_cnn")

"""Train a plain network on digits by DNI, next to BP, DGL and stages that stand still: what are predictions worth?

python benchmarks/synthetic_gradients.py [SEEDS]
"""

import functools
import statistics
import sys

import torch
from torch import nn

import adl_dist
from adl_dist.data import digits

WIDTH, EPOCHS = 64, 20
BALANCE = {2: [3, 3], 4: [2, 1, 1, 2]}
ROWS = {
    "bp M=1": ("bp", {"accumulation_steps": 1}),
    "dgl, linear heads": ("dgl", {"head": "linear"}),
    "dni": ("dni", {"head_layers": 0}),
    "dni, head_lr_factor=0.1": ("dni", {"head_layers": 0, "head_lr_factor": 0.1}),
    "dni, classes": ("dni", {"head_layers": 0, "head_lr_factor": 0.1, "head_sees_target": True}),
    "dni, 2 hidden layers": ("dni", {"head_layers": 2, "head_lr_factor": 0.1}),
    "only the last stage learns": ("dni", {"head_layers": 0, "head_lr_factor": 1e-12}),
}


def block(before: int, after: int) -> nn.Module:
    """Return a layer with BatchNorm and ReLU."""
    return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())


def accuracy(name: str, options: dict[str, object], num_stages: int, seed: int) -> float:
    """Return the validation accuracy in percent, from 0 to 100, after the last epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), block(64, WIDTH), *(block(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 10)
    )
    trainer = adl_dist.Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        method=adl_dist.method(name, **options),
        num_stages=num_stages,
        partition=adl_dist.PartitionSpec(balance=BALANCE[num_stages]),
        processes=adl_dist.ProcessOptions(threads=1),
        seed=seed,
    )
    train, validation = digits(augment=False)
    quiet = adl_dist.Monitoring(quiet=True, tensorboard=False)
    summary = trainer.fit(train, epochs=EPOCHS, batch_size=64, val_dataset=validation, monitoring=quiet)
    return 100 * float(summary["validation_accuracy"])


def main(num_seeds: int) -> None:
    """Print median, least and most of each row."""
    print(f"{'':<28}{'K = 2':<26}K = 4")
    for row, (name, options) in ROWS.items():
        cells = []
        for num_stages in BALANCE:
            found = sorted(accuracy(name, options, num_stages, seed) for seed in range(num_seeds))
            cells.append(f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})")
        print(f"{row:<28}" + "".join(f"{cell:<26}" for cell in cells), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)

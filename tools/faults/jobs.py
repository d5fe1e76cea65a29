"""What the simulation trains: tiny networks in float64 by any method, a few milliseconds per epoch."""

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

import adl_dist
from adl_dist.schedule import METHODS, Method, Pipeline
from tests.support.values import values

WIDTH, NUM_CLASSES = 4, 3
MICRO_BATCH = 2
MOST_STAGES = 4  # one unit of the network each
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


class Points(Dataset):
    """Points with classes, and fresh noise each time, from the stream that the loader seeds."""

    def __init__(self, num_samples, *, noise):
        generator = torch.Generator().manual_seed(num_samples)
        self._points = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
        self._classes = torch.randint(NUM_CLASSES, (num_samples,), generator=generator).tolist()
        self._noise = noise

    def __len__(self):
        return len(self._classes)

    def __getitem__(self, index):
        return self._points[index] + self._noise * torch.randn(WIDTH, dtype=torch.float64), self._classes[index]


def network():
    """Dropout and running statistics: a resumed run has more to get right than weights. Few tensors: saves are dear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False)),
        nn.Sequential(nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.2), nn.Tanh()),
        nn.Linear(WIDTH, NUM_CLASSES, bias=False),
    )


def falling(optimizer):
    """A learning rate that is another one at every update."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, without its folder; ``options`` is what else ``Trainer.fit`` is given."""

    method: Method
    num_stages: int
    num_samples: int
    optimizer: str
    options: dict

    def __str__(self):
        size = f"K={self.num_stages}, M={self.method.micro_batches_per_update}, {self.num_samples} samples"
        return f"{self.method.name}, {size}, {self.optimizer}, {self.options}"

    @property
    def stops_as_planned(self):
        """Whether it stops only where it saves anyway, so that in the end nothing tells of it."""
        is_stale = not Pipeline(self.method, self.num_stages).drain_is_exact
        saves_where_epochs_end = self.options.get("every_epochs", 1) == 1
        return is_stale and "every_updates" in self.options and saves_where_epochs_end

    def trainer(self):
        """Make what trains it."""
        return adl_dist.Trainer(
            network(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=OPTIMIZERS[self.optimizer],
            method=self.method,
            num_stages=self.num_stages,
            lr_schedule=falling,
            **values(dtype=torch.float64, threads=1, verify=False),
        )

    def fit(self, trainer, run_dir):
        """Train, or resume, in ``run_dir``; return the summary."""
        return trainer.fit(
            Points(self.num_samples, noise=0.1),
            batch_size=MICRO_BATCH * self.method.micro_batches_per_update,
            val_dataset=Points(5, noise=0.0),
            run_dir=run_dir,
            **values(tensorboard=False, quiet=True, **self.options),
        )


def draw_job(number):
    """The job of that number: its method in turn, all else at random."""
    rng = random.Random(f"job {number}")
    name = list(METHODS)[number % len(METHODS)]
    options = {"head": "linear"} if name == "dgl" else {}
    updates, steps = rng.randint(2, 3), _one_of(rng, {1: 3, 2: 3, 3: 1})
    num_stages = rng.randint(1, MOST_STAGES)
    if name == "2bw":
        steps = max(steps, num_stages - 1)  # fewer it refuses
    method = adl_dist.method(name, accumulation_steps=steps, **options)
    # The last group of an epoch may be smaller; a micro-batch of one sample has no statistics.
    num_micro_batches = updates * method.micro_batches_per_update - rng.randrange(steps)
    epochs = _one_of(rng, {2: 4, 3: 1})
    fit = {
        "epochs": epochs,
        "every_epochs": _one_of(rng, {1: 4, 2: 1, 0: 1}),
        "keep": rng.randint(1, 3),
        "keep_best": rng.random() < 0.3,
        "background": rng.random() < 0.5,
        "shuffle": rng.random() < 0.8,
    }
    if rng.random() < 0.2:
        fit["max_updates"] = epochs * updates - 1  # ends in the middle of an epoch
    if rng.random() < 0.3:
        fit["every_updates"] = rng.randint(1, updates - 1)
    return Job(
        method=method,
        num_stages=num_stages,
        num_samples=num_micro_batches * MICRO_BATCH,
        optimizer=rng.choice(list(OPTIMIZERS)),
        options=fit,
    )


def _one_of(rng, weights):
    return rng.choices(list(weights), weights=list(weights.values()))[0]

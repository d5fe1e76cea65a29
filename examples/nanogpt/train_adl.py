"""train.py by adl_dist, as NUM_STAGES stages: python train_adl.py FILE."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from model import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset

import adl_dist

CONTEXT, BATCH_SIZE, ACCUMULATION = 32, 4, 4  # BATCH_SIZE sequences in a micro-batch
MAX_ITERS, WARMUP, EVAL_INTERVAL, EVAL_BATCHES = 20, 5, 10, 2
LR, MIN_LR, WEIGHT_DECAY, BETAS, GRAD_CLIP = 1e-3, 1e-4, 0.1, (0.9, 0.95), 1.0
DTYPE = torch.float32
NUM_STAGES, METHOD = 2, "1f1b"


def get_lr(it: int) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine."""
    if it < WARMUP:
        return LR * (it + 1) / (WARMUP + 1)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * (it - WARMUP) / (MAX_ITERS - WARMUP))) * (LR - MIN_LR)


def configure_optimizers(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS)


def draws(data: Tensor, split: str, number: int) -> Tensor:
    """Return the beginnings of the windows that a run sees, int[number]."""
    generator = torch.Generator().manual_seed(1337 if split == "train" else 1338)
    return torch.randint(len(data) - CONTEXT, (number,), generator=generator)


class Windows(Dataset[Any]):
    """The windows that a run sees: ((idx, targets), targets), int[CONTEXT] each."""

    def __init__(self, data: Tensor, starts: Tensor) -> None:
        self.data, self.starts = data, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Any:
        window = self.data[self.starts[index] :][: CONTEXT + 1]
        return (window[:-1], window[1:]), window[1:]


def main(path: str) -> list[tuple[str, int, float]]:
    """Train, and return each loss that is printed: its split, the iteration and the value."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    train_data, val_data = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(1337)
    model = GPT(256, CONTEXT, layers=4, heads=2, width=32).to(DTYPE)
    logged: list[tuple[str, int, float]] = []

    def log(split: str, it: int, loss: float) -> None:
        print(f"iter {it}: {split} loss {loss:.6f}")
        logged.append((split, it, loss))

    train_set = Windows(train_data, draws(train_data, "train", MAX_ITERS * ACCUMULATION * BATCH_SIZE))
    val_set = Windows(val_data, draws(val_data, "val", EVAL_BATCHES * BATCH_SIZE))

    class Log(adl_dist.Callback):
        def on_update(self, now: adl_dist.TrainerState) -> None:
            log("train", now.update, now.metrics["train_loss"])

        def on_epoch(self, now: adl_dist.TrainerState) -> None:
            log("val", now.update, now.metrics["validation_loss"])

    trainer = adl_dist.Trainer(
        model,
        loss_fn="model",
        optimizer=configure_optimizers,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / LR),
        method=adl_dist.method(METHOD, accumulation_steps=ACCUMULATION),
        num_stages=NUM_STAGES,
        precision=adl_dist.Precision(dtype=DTYPE),
        gradients=adl_dist.GradientPolicy(clip_norm=GRAD_CLIP or None),
    )
    trainer.fit(
        train_set,
        epochs=1,
        batch_size=ACCUMULATION * BATCH_SIZE,
        val_dataset=val_set,
        eval_every_updates=EVAL_INTERVAL,
        shuffle=False,
        callbacks=[Log()],
    )
    return logged


if __name__ == "__main__":
    main(sys.argv[1])

"""A training loop in the style of nanoGPT, on the bytes of a text: python train.py FILE."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from model import GPT
from torch import Tensor, nn

CONTEXT, BATCH_SIZE, ACCUMULATION = 32, 4, 4  # BATCH_SIZE sequences in a micro-batch
MAX_ITERS, WARMUP, EVAL_INTERVAL, EVAL_BATCHES = 20, 5, 10, 2
LR, MIN_LR, WEIGHT_DECAY, BETAS, GRAD_CLIP = 1e-3, 1e-4, 0.1, (0.9, 0.95), 1.0
DTYPE = torch.float32


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


def get_batch(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return windows and the same windows one byte later, int[B, CONTEXT] each."""
    x = torch.stack([data[i : i + CONTEXT] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in starts])
    return x, y


@torch.no_grad()
def estimate_loss(model: GPT, data: Tensor) -> float:
    """Return the mean loss of EVAL_BATCHES micro-batches."""
    model.eval()
    starts = draws(data, "val", EVAL_BATCHES * BATCH_SIZE).split(BATCH_SIZE)
    losses = [model(*get_batch(data, some))[1].item() for some in starts]
    model.train()
    return sum(losses) / len(losses)


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

    optimizer = configure_optimizers(model.parameters())
    starts = draws(train_data, "train", MAX_ITERS * ACCUMULATION * BATCH_SIZE).split(BATCH_SIZE)
    for it in range(MAX_ITERS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        total = 0.0
        for some in starts[it * ACCUMULATION : (it + 1) * ACCUMULATION]:
            _, loss = model(*get_batch(train_data, some))
            (loss / ACCUMULATION).backward()
            total += loss.item() / ACCUMULATION
        if GRAD_CLIP:
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log("train", it + 1, total)
        if (it + 1) % EVAL_INTERVAL == 0:
            log("val", it + 1, estimate_loss(model, val_data))
    return logged


if __name__ == "__main__":
    main(sys.argv[1])

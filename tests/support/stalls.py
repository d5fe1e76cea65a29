"""A job in which every kind of stall is planted, each once, and each ends by itself. Names say which stage."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import adl_dist
from adl_dist.checkpoint import layout
from adl_dist.checkpoint.async_save import PartWriter
from adl_dist.checkpoint.run_dir import RunFolder
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

STALL_SECONDS, ASLEEP_SECONDS = 0.8, 2.0
NUM_SAMPLES = 48  # 12 updates of 2 micro-batches of 2 samples
PLANTED = "planted.txt"  # in the run folder: name and time of each


def note(run_dir: Path, name: str) -> None:
    """Write down that ``name`` begins now; each name once."""
    with (run_dir / PLANTED).open("a") as file:
        file.write(f"{time.time()} {name}\n")


class At(nn.Module):
    """Passes its input on; calls ``act`` in the n-th forward of training."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._act = n, act

    def forward(self, x: Tensor) -> Tensor:
        """Pass ``x`` on."""
        self._left -= self.training
        if self._left == 0:
            self._act()
        return x


class AtBackward(At):
    """Passes its input on; calls ``act`` in the backward of the n-th forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Pass ``x`` on."""
        self._left -= self.training
        if self._left == 0 and x.requires_grad:
            x.register_hook(lambda grad: self._act())
        return x


def trainer_of(
    extra: list[tuple[int, nn.Module]],
    *,
    num_stages: int,
    optimizer: type[torch.optim.SGD] = torch.optim.SGD,
    abort_seconds: float | None = None,
    method: str = "adl",
    stall_seconds: float = STALL_SECONDS,
) -> adl_dist.Trainer:
    """Of seven units and ``extra`` ones before the places of them that are given."""
    units: list[nn.Module] = list(batch_norm_net())
    for place, module in extra:
        units[place] = nn.Sequential(module, units[place])
    return adl_dist.Trainer(
        nn.Sequential(*units),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: optimizer(p, lr=0.1),
        method=adl_dist.method(method, accumulation_steps=2),
        num_stages=num_stages,
        processes=adl_dist.ProcessOptions(threads=1, timeout_seconds=30),
        timeouts=adl_dist.WatchdogTimeouts(stall_seconds=stall_seconds, abort_seconds=abort_seconds),
    )


def fit(trainer: adl_dist.Trainer, run_dir: Path, data: Any = None, **options: Any) -> Any:
    """Train for an epoch."""
    return trainer.fit(
        data or FixedImages(NUM_SAMPLES),
        epochs=1,
        batch_size=4,
        run_dir=run_dir,
        **values(quiet=True, tensorboard=False, **options),
    )


def all_stalls(run_dir: Path) -> None:
    """One rank of three: asleep in forward, backward, update, load, save and summary, one after the other."""

    def asleep(name: str) -> Callable[[], None]:
        def sleep() -> None:
            note(run_dir, name)
            time.sleep(ASLEEP_SECONDS)

        return sleep

    class SlowOnce(torch.optim.SGD):
        steps = 0

        def step(self, *args: Any, **more: Any) -> Any:
            SlowOnce.steps += 1
            if SlowOnce.steps == 9 and os.environ["RANK"] == "1":
                asleep("update of stage 1")()
            return super().step(*args, **more)

    class SlowData(FixedImages):
        served = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            SlowData.served += 1
            if SlowData.served == 20:
                asleep("load of stage 0")()
            return super().__getitem__(index)

    if os.environ["RANK"] == "2":
        _before(PartWriter, "write", asleep("save of stage 2"))
    _before(RunFolder, "write_summary", asleep("summary of the coordinator"))
    run_dir.mkdir(exist_ok=True)
    stage_1 = At(3, asleep("forward of stage 1"))
    stage_2 = AtBackward(15, asleep("backward of stage 2"))
    trainer = trainer_of([(3, stage_1), (6, stage_2)], num_stages=3, optimizer=SlowOnce)
    fit(trainer, run_dir, SlowData(NUM_SAMPLES))


def asleep_then_slow() -> list[tuple[int, nn.Module]]:
    """For a stage 1 that sleeps; a pause of stage 0 after it lets the watchdog see that something moves again."""
    return [(5, At(5, lambda: time.sleep(ASLEEP_SECONDS))), (2, At(9, lambda: time.sleep(STALL_SECONDS / 2)))]


def gpipe_asleep(run_dir: Path) -> None:
    """One rank of two: stage 1 is asleep in backward 2, whose gradient follows that of micro-batch 3."""
    run_dir.mkdir(exist_ok=True)
    stage_1 = AtBackward(4, lambda: time.sleep(ASLEEP_SECONDS))  # the first one is where shapes are agreed
    fit(trainer_of([(5, stage_1)], num_stages=2, method="gpipe"), run_dir)


def save_asleep(run_dir: Path) -> None:
    """One rank of three: what stage 1 writes of the last checkpoint, beside training, takes long."""
    run_dir.mkdir(exist_ok=True)
    _slow_write("1", ASLEEP_SECONDS)
    fit(trainer_of([], num_stages=3), run_dir)


def killed_in_save(run_dir: Path) -> None:
    """One rank of three: stage 2 is killed while stage 1 still writes its part of a checkpoint."""
    run_dir.mkdir(exist_ok=True)
    _slow_write("1", 5 * ASLEEP_SECONDS)

    def act() -> None:
        note(run_dir, "signal")
        os.kill(os.getpid(), signal.SIGKILL)

    # The first forward is where shapes are agreed on; a checkpoint follows update 4.
    # With limits as usual the watchdog looks but once in a second.
    fit(trainer_of([(5, At(12, act))], num_stages=3, stall_seconds=60), run_dir, every_updates=4)


def _before(owner: type, method: str, act: Callable[[], None]) -> None:
    """Have ``act`` called before each call of a method."""
    original = getattr(owner, method)

    def changed(*args: Any, **more: Any) -> Any:
        act()
        return original(*args, **more)

    setattr(owner, method, changed)


def _slow_write(rank: str, seconds: float) -> None:
    write = layout.write_piece

    def slowly(file: Any, data: Any) -> None:
        layout.write_piece = write
        time.sleep(seconds)
        write(file, data)

    if os.environ["RANK"] == rank:
        layout.write_piece = slowly


def signalled(run_dir: Path, number: int) -> None:
    """One rank of two: stage 1 gets a signal in its ninth forward."""
    run_dir.mkdir(exist_ok=True)

    def act() -> None:
        note(run_dir, "signal")
        os.kill(os.getpid(), number)

    abort = 5 * STALL_SECONDS if number == signal.SIGSTOP else None
    fit(trainer_of([(5, At(9, act))], num_stages=2, abort_seconds=abort), run_dir)

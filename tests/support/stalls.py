"""A job in which every kind of stall is planted, each once, and each ends by itself. Names say which stage."""

import os
import signal
import time

import torch
from torch import nn

from adl_dist.checkpoint import storage
from adl_dist.checkpoint.async_save import PartWriter
from adl_dist.checkpoint.run_dir import RunFolder
from tests.support.runs import toy_trainer
from tests.support.toys import Counted, FixedImages, batch_norm_net
from tests.support.user_code import At
from tests.support.values import values

STALL_SECONDS, ASLEEP_SECONDS = 0.8, 1.5
NUM_SAMPLES = 48  # 12 updates of 2 micro-batches of 2 samples
PLANTED = "planted.txt"  # in the run folder: name and time of each


def note(run_dir, name):
    """Write down that ``name`` begins now; each name once."""
    with (run_dir / PLANTED).open("a") as file:
        file.write(f"{time.time()} {name}\n")


def train(
    run_dir, extra=(), *, K, optimizer=torch.optim.SGD, data=None, stall_seconds=STALL_SECONDS, abort_seconds=None,
    **options
):  # fmt: skip
    """Train seven units, with ``extra`` modules before the places of them that are given, for an epoch."""
    units = list(batch_norm_net())
    for place, module in extra:
        units[place] = nn.Sequential(module, units[place])
    timeouts = {"timeout_seconds": 30, "stall_seconds": stall_seconds, "abort_seconds": abort_seconds}
    trainer = toy_trainer(K, 2, model=nn.Sequential(*units), optimizer=lambda p: optimizer(p, lr=0.1), **timeouts)
    run_dir.mkdir(exist_ok=True)
    trainer.fit(
        data or FixedImages(NUM_SAMPLES), epochs=1, batch_size=4, run_dir=run_dir,
        **values(quiet=True, tensorboard=False, **options),
    )  # fmt: skip


def all_stalls(run_dir):
    """One rank of three: asleep in forward, backward, update, load, save and summary, one after the other."""

    def asleep(name):
        def sleep():
            note(run_dir, name)
            time.sleep(ASLEEP_SECONDS)

        return sleep

    class SlowOnce(torch.optim.SGD):
        steps = 0

        def step(self, *args, **more):
            SlowOnce.steps += 1
            if SlowOnce.steps == 9 and os.environ["RANK"] == "1":
                asleep("update of stage 1")()
            return super().step(*args, **more)

    if os.environ["RANK"] == "2":
        _before(PartWriter, "write", asleep("save of stage 2"))
    _before(RunFolder, "write_summary", asleep("summary of the coordinator"))
    stage_1 = At(3, asleep("forward of stage 1"))
    stage_2 = At(15, asleep("backward of stage 2"), backward=True)
    data = Counted(NUM_SAMPLES, {20: asleep("load of stage 0")})
    train(run_dir, [(3, stage_1), (6, stage_2)], K=3, optimizer=SlowOnce, data=data)


def save_asleep(run_dir):
    """One rank of three: what stage 1 writes of the last checkpoint takes long, while training continues."""
    _slow_write("1", ASLEEP_SECONDS)
    train(run_dir, K=3)


def killed_in_save(run_dir):
    """One rank of three: stage 2 is killed while stage 1 still writes its part of a checkpoint."""
    _slow_write("1", 5 * ASLEEP_SECONDS)
    # The first forward is where shapes are agreed on; a checkpoint follows update 4.
    # With limits as usual the watchdog looks but once in a second.
    killed = [(5, At(12, lambda: _signalled(run_dir, signal.SIGKILL)))]
    train(run_dir, killed, K=3, stall_seconds=60, every_updates=4)


def signalled(run_dir, number):
    """One rank of two: stage 1 gets a signal in its ninth forward."""
    abort_seconds = 5 * STALL_SECONDS if number == signal.SIGSTOP else None
    train(run_dir, [(5, At(9, lambda: _signalled(run_dir, number)))], K=2, abort_seconds=abort_seconds)


def _signalled(run_dir, number):
    note(run_dir, "signal")
    os.kill(os.getpid(), number)


def _before(owner, method, act):
    """Have ``act`` called before each call of a method."""
    original = getattr(owner, method)

    def changed(*args, **more):
        act()
        return original(*args, **more)

    setattr(owner, method, changed)


def _slow_write(rank, seconds):
    write = storage.write_piece

    def slowly(file, data):
        storage.write_piece = write
        time.sleep(seconds)
        write(file, data)

    if os.environ["RANK"] == rank:
        storage.write_piece = slowly

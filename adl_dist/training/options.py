"""The user's options: cut, processes and monitoring of a run. No torch."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, parse_links, text_of_links
from adl_dist.report.recorder import check_loggers
from adl_dist.settings import check_settings, documented, setting

LONGEST_TIMEOUT = 1_000_000  # seconds; torch counts milliseconds in 32 bits
MOST_THREADS = 1024  # per process; torch ends without a message if there are very many


@documented("partition")
@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """The cut of a model into stages.

    Raises:
        ConfigError: If a value is out of range, or contradicts another one.
    """

    balance: Literal["flops", "even", "auto"] | Sequence[int] | Sequence[str] = setting(
        "flops",
        "flops: least work of the slowest stage | auto: the same, measured | even: as many units each | blocks of each "
        "stage, like [3,2] | names of units where stages 1.. begin",
        expected="one of 'flops', 'even', 'auto', a list of blocks per stage, like [3,2], or a list of the units where "
        "stages 1.. begin, like [layer2.0]",
    )
    granularity: Literal["layer", "block"] = setting(
        "layer", "finest place of a cut: layer, also inside blocks | block"
    )
    speeds: Sequence[float] | None = setting(
        None, "relative speeds of the stages' devices, by which balance=auto cuts", key="device_speeds", above=0
    )
    links: Any = setting(
        None,
        "of each process, [100mbit,50ms], or of each pair of neighbors, [[..],[..]], for balance=auto and delay=auto; "
        "auto: measured; null: free",
    )
    verify: bool = setting(True, "compare the stages with the uncut model on real samples before the first update")
    tied: Literal["share", "untie"] = setting(
        "share", "weights with several names: share: copies on stages stay equal | untie: each name has its own"
    )

    def __post_init__(self) -> None:
        check_settings(self, "partition")
        object.__setattr__(self, "links", text_of_links(self.links))
        for name, value in (("device_speeds", self.speeds), ("links", self.links)):
            if value is not None and self.balance != "auto":
                raise ConfigError(f"partition.{name} weighs a measured cut; it needs partition.balance=auto")
        if self.links is not None and self.links != "auto":
            parse_links(self.links, LINKS)


@documented("runtime")
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes and devices of the stages.

    With ``handle_signals`` a SIGTERM, SIGINT or SIGUSR1 empties the pipeline, saves, and lets ``fit`` return. A second
    SIGTERM or SIGINT ends the process. It works only in the main thread.

    Raises:
        ConfigError: If a value is out of range.
    """

    one_per_stage: bool | None = setting(
        None,
        "one process per stage, or per v stages of interleaved; false: one for all; null: if torchrun started it",
        key="processes",
    )
    device: Any = setting("cpu", "cpu | cuda, the GPU of the local rank")
    threads: int | None = setting(
        None, "threads of each process; null: OMP_NUM_THREADS, or cores / K", least=1, most=MOST_THREADS
    )
    bind_cores: bool = setting(True, "on CPUs, bind each process to its own share of the node's cores")
    timeout_seconds: float = setting(
        300.0, "longest wait at the start, for an answer, and for a message of NCCL", above=0, most=LONGEST_TIMEOUT
    )
    handle_signals: bool = False

    def __post_init__(self) -> None:
        name = str(self.device)  # that of a torch.device, too
        if re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", name) is None:
            raise ConfigError(f"device={self.device!r}: expected 'cpu' or 'cuda'")
        own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        if name.startswith("cuda:") and name != own:
            raise ConfigError(
                f"device={name}: a process takes the GPU of its local rank, here {own}; use device='cuda', and "
                "CUDA_VISIBLE_DEVICES to choose among GPUs"
            )
        object.__setattr__(self, "device", name.partition(":")[0])
        check_settings(self, "runtime")


@documented("runtime")
@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """Records and displays of a run besides ``metrics.jsonl``.

    ``quiet`` omits the live line, the lines of epochs, and notes.

    Raises:
        ConfigError: If a value is out of range.
    """

    tensorboard: bool = setting(True, "write the curves of metrics.jsonl also to run_dir/tensorboard")
    loggers: Sequence[Any] = setting(
        (),
        "more loggers: mlflow, wandb, or your own: my.module.make, in a script the object; docs/own.md",
        expected="a list, like [mlflow]",
    )
    trace: bool = setting(False, "write run_dir/trace.json: what each stage did and when; docs/runs.md")
    report: bool = setting(True, "write the page run_dir/report.html at the end; docs/runs.md")
    memory: bool = setting(
        False, "measure each stage's peak of tensor bytes; slows the first updates", key="profile_memory"
    )
    stage_records_every: int = setting(
        10, "record staleness and gradient norm of each stage after so many updates", least=1
    )
    peak_tflops: float | None = setting(
        None, "peak of a device in 1e12 operations per second, for train/mfu; null: known of a few GPUs", above=0
    )
    quiet: bool = False

    def __post_init__(self) -> None:
        check_settings(self, "runtime")
        check_loggers(self.loggers)

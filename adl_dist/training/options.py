"""The cut, the processes and the monitoring of a run, as the user asks for them. No torch."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, parse_links
from adl_dist.report.loggers import check_loggers
from adl_dist.schedule import downstream_first

LONGEST_TIMEOUT = 1_000_000  # seconds; torch counts milliseconds in 32 bits


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """The cut of a model into stages.

    Attributes:
        balance: ``flops``: the slowest stage has as few floating-point operations and bytes as can be, between blocks
            where that is even enough, else inside them; ``even``: as many units; ``auto``: measured before the first
            step, once; the number of blocks of each stage; or the names of the units or blocks where stages 1..K-1
            begin.
        granularity: the finest place of a cut: ``layer``, also inside blocks, or ``block``.
        speeds: speeds of the stages' devices relative to the one that measures; None: all equal.
        links: what the link of each process to all others carries, like ``100mbit,50ms``, or with ``/`` between them
            what each link between neighbours does, by which ``balance="auto"`` and ``method.delay=auto`` choose;
            ``auto``: measured between processes at the start of the run; None: links take no time.
        verify: whether the cut model is compared with the uncut one before the first update, if there are several
            stages, or several micro-batches under way in one.
        tied: what becomes of a parameter with several names if a cut lies between its uses: ``share``: stages hold
            copies of it that stay equal; ``untie``: each name has a parameter of its own from the start, for any K.

    Raises:
        ConfigError: none of these.
    """

    balance: str | Sequence[int] | Sequence[str] = "flops"
    granularity: str = "layer"
    speeds: Sequence[float] | None = None
    links: str | None = None
    verify: bool = True
    tied: str = "share"

    def __post_init__(self) -> None:
        kinds = {type(entry) for entry in self.balance} if isinstance(self.balance, list | tuple) else set()
        if self.balance not in ("flops", "even", "auto") and kinds not in ({int}, {str}):
            raise ConfigError(
                f"partition.balance={self.balance!r} is not one of 'flops', 'even', 'auto', a list of blocks per "
                "stage, like [3,2], or a list of the units where stages 1.. begin, like [layer2.0]"
            )
        if self.tied not in ("share", "untie"):
            raise ConfigError(f"partition.tied: there is no '{self.tied}'; choose one of share, untie")
        if self.granularity not in ("layer", "block"):
            raise ConfigError(f"partition.granularity: there is no {self.granularity!r}; choose one of layer, block")
        for name in ("speeds", "links"):
            if getattr(self, name) is not None and self.balance != "auto":
                raise ConfigError(f"partition.{name} weighs a measured cut; it needs partition.balance=auto")
        if self.links is not None and self.links != "auto":
            parse_links(self.links, LINKS)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Where and how the stages run.

    Attributes:
        one_per_stage: one process per stage, of ``interleaved`` one for each v stages; None: if torchrun started this
            script.
        device: ``cpu`` or ``cuda`` (the GPU of the local rank; which that is, CUDA_VISIBLE_DEVICES says), or the
            torch.device of that name.
        threads: threads of each process; None: cores / K, whether the stages share a process or not, because sums over
            several threads round differently.
        bind_cores: with one process per stage on CPUs, each computes on its own share of the node's cores, if there is
            at least one for each.
        timeout_seconds: how long to wait for one message of a peer.
        handle_signals: at SIGTERM, SIGINT or SIGUSR1 empty the pipeline, save and return; at a second, but for
            SIGUSR1, end the process. For the calling thread only if it is the main one.
        pick_next: with all stages in one process, picks the stage that continues; any choice gives the same values.

    Raises:
        ConfigError: a value is out of range.
    """

    one_per_stage: bool | None = None
    device: Any = "cpu"
    threads: int | None = None
    bind_cores: bool = True
    timeout_seconds: float = 300.0
    handle_signals: bool = False
    pick_next: Callable[[Sequence[int]], int] = downstream_first

    def __post_init__(self) -> None:
        name = str(self.device)  # of a torch.device, too
        if re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", name) is None:
            raise ConfigError(f"device={self.device!r}: expected 'cpu' or 'cuda'")
        own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        if name.startswith("cuda:") and name != own:
            raise ConfigError(
                f"device={name}: a process takes the GPU of its local rank, here {own}; use device='cuda', and "
                "CUDA_VISIBLE_DEVICES to choose among GPUs"
            )
        object.__setattr__(self, "device", name.partition(":")[0])
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ConfigError(f"runtime.threads must be a whole number of at least 1, or null, got {self.threads}")
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT:
            raise ConfigError(
                f"runtime.timeout_seconds must be above 0 and at most {LONGEST_TIMEOUT}, got {self.timeout_seconds}"
            )


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """Records and displays of a run besides ``metrics.jsonl``.

    Attributes:
        tensorboard: write ``run_dir/tensorboard``.
        loggers: what else gets the records: ``mlflow``, ``wandb``, or objects of your own (docs/own.md).
        trace: write ``run_dir/trace.json``, what each stage did and when, and the shares of its time.
        report: write the page ``run_dir/report.html`` at the end, for which a few updates are recorded in full.
        memory: measure the most bytes of tensors that each stage's process held; slows the first updates.
        quiet: no live line, no lines of epochs, and no notes.
        stage_records_every: of every so many updates the records of each stage are written; those of the run always.
        peak_tflops: what a device does at its peak, in 1e12 floating-point operations per second, for the share of it
            that training reaches (``train/mfu``); None: what is known of a few GPUs, for bfloat16.

    Raises:
        ConfigError: a value is out of range.
    """

    tensorboard: bool = True
    loggers: Sequence[Any] = ()
    trace: bool = False
    report: bool = True
    memory: bool = False
    quiet: bool = False
    stage_records_every: int = 10
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        check_loggers(self.loggers)
        if self.stage_records_every < 1:
            raise ConfigError(f"runtime.stage_records_every must be at least 1, got {self.stage_records_every}")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(f"runtime.peak_tflops must be above 0, got {self.peak_tflops}")

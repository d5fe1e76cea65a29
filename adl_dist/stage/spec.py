"""The specification of a training: values made and checked once."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.errors import ConfigError
from adl_dist.schedule import Method, Pipeline
from adl_dist.settings import check_settings, documented
from adl_dist.stage_options import GradientPolicy, PrecisionSettings

LossFn = Callable[[Any, Any], Tensor]  # (output, target), which may be a tuple or a dictionary
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@documented("runtime")
@dataclass(frozen=True, kw_only=True)
class Precision(PrecisionSettings):
    """The number formats and kernels of a run.

    ``dtype`` is that of parameters and floating-point inputs: ``torch.float32`` or ``torch.float64``.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("dtype", "autocast"):  # a name, like "bfloat16", is as good
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, getattr(torch, value, value))

    def check(self, method: Method) -> None:
        """Raise ConfigError for settings that exclude each other or ``method``."""
        if self.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"dtype={_named(self.dtype)} is not supported; expected torch.float32 or torch.float64: narrower "
                "weights lose small updates. To compute in bfloat16, use runtime.autocast "
                "(Precision(autocast=torch.bfloat16))"
            )
        # float16 needs a loss scale, which would have to travel with every gradient until its update.
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(f"runtime.autocast={_named(self.autocast)} is not supported; use bfloat16, or null")
        check_settings(self, "runtime")
        if self.autocast is not None and self.dtype is not torch.float32:
            raise ConfigError(
                f"runtime.autocast={_named(self.autocast)} lowers float32 only, but dtype={_named(self.dtype)}; use "
                "dtype=float32, or runtime.autocast=null"
            )
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                "runtime.deterministic asks for the same bits in each run, but with runtime.cudnn_benchmark each run "
                "chooses its kernels by how fast they just were; use one of them"
            )
        if self.compile and method.splits:
            divider = "method.split_backward" if method.split_backward else f"method={method.name}"
            raise ConfigError(
                f"runtime.compile makes one piece of a stage's backward, which {divider} would divide; use one of them"
            )
        keeps_copies = "autocast" if self.autocast is not None else "compile" if self.compile else None
        if keeps_copies is not None and method.weights == "latest":
            raise ConfigError(
                f"method={method.name} back-propagates through the present weights (method.weights=latest), but with "
                f"runtime.{keeps_copies} a graph may keep what was computed from those of its forward; use "
                f"method.weights=stash, or no runtime.{keeps_copies}"
            )

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Move ``module`` to ``device``, in the formats of the run."""
        in_dtype(module, self.dtype, device)
        if self.channels_last:
            in_memory_format(module, channels_last=True)
        return module

    def autocasting(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Return a factory of autocast contexts for forwards and losses."""
        # Around each call alone: what autocast remembers of lowered weights must not outlive an update.
        return nullcontext if self.autocast is None else partial(torch.autocast, device.type, dtype=self.autocast)

    @contextmanager
    def apply(self, *, threads: int) -> Iterator[None]:
        """Set torch's process-wide settings, and restore them afterwards.

        Raises:
            ConfigError: If the caller is inside torch.autocast, which keeps lowered weights past their update.
        """
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ConfigError(
                "the trainer is used inside torch.autocast, which remembers lowered weights that an update then makes "
                "stale; use it outside, with Precision(autocast=torch.bfloat16) (runtime.autocast)"
            )
        # The flags of CUDA are set on a CPU, too, so that nothing depends on when a user's script touches the GPU.
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        # Read by the newer names, which answer whatever a script has set; written by the older ones, which keep both
        # kinds in step. Inductor still reads an older one (torch 2.15, kernel/bmm.py), which raises if they differ.
        before = [precision == "tf32" for precision in (matmul.fp32_precision, cudnn.conv.fp32_precision)]  # type: ignore[attr-defined]
        benchmark, num_threads = cudnn.benchmark, torch.get_num_threads()
        matmul.allow_tf32 = cudnn.allow_tf32 = self.tf32
        cudnn.benchmark = self.cudnn_benchmark
        torch.set_num_threads(threads)
        # In evaluation nn.TransformerEncoder would take a path by nested tensors, if all its layers are on one stage.
        has_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with _deterministic() if self.deterministic else nullcontext():
                yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
            cudnn.benchmark = benchmark
            torch.set_num_threads(num_threads)
            torch.backends.mha.set_fastpath_enabled(has_fast_path)

    @property
    def settings(self) -> dict[str, Any]:
        """The plain values that must be equal on all ranks and on resume."""
        return {
            "dtype": _named(self.dtype),
            "autocast": _named(self.autocast),
            "codec": self.codec,
            "gradient_codec": self.codecs.gradients,
            "tf32": self.tf32,
            "deterministic": self.deterministic,
            "channels_last": self.channels_last,
        }


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use only kernels of torch that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS wants for it, and torch asks for
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # it finds errors, and takes time
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The settings of a training that all stages and ranks share.

    ``loss_fn`` maps (output, target) to the mean loss over the samples, or over terms that it counts; with
    ``loss_reduction`` "batch", to a loss of the micro-batch that is weighted by its samples. ``optimizer`` makes one
    stage's optimizer from its parameters, ``lr_schedule`` its learning rate schedule. ``metrics`` are further metrics,
    by name or as callables (metrics.py). ``ema`` is the decay of the moving average of the weights, or None without
    one. ``seed`` seeds data order, augmentation and dropout.

    Raises:
        ConfigError: If a value is out of range, or does not fit the method.
    """

    pipeline: Pipeline
    loss_fn: LossFn
    optimizer: OptimizerFactory
    loss_reduction: str = "mean"
    lr_schedule: Callable[..., LRScheduler] | None = None
    precision: Precision = field(default_factory=Precision)
    gradients: GradientPolicy = field(default_factory=GradientPolicy)
    metrics: Sequence[str | Callable[[Any, Any], Any]] = ()
    ema: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "batch"):
            raise ConfigError(f"loss_reduction must be mean or batch, got {self.loss_reduction!r}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(
                f"train.ema must be above 0 and below 1, like 0.999, got {self.ema}; null averages nothing"
            )
        self.precision.check(self.pipeline.method)
        self.gradients.check(self.pipeline)
        shares_norms = self.pipeline.num_stages > 1 and self.gradients.clips_model(self.pipeline)
        object.__setattr__(self, "pipeline", replace(self.pipeline, shares_norms=shares_norms))

    @property
    def settings(self) -> dict[str, Any]:
        """The plain values that must be equal on all ranks and on resume."""
        return {
            "method": self.pipeline.method.settings,
            "num_stages": self.pipeline.num_stages,
            "seed": self.seed,
            **self.precision.settings,
            **asdict(self.gradients),
            **({} if self.ema is None else {"ema": self.ema}),
            **({} if self.loss_reduction == "mean" else {"loss_reduction": self.loss_reduction}),
        }


def _named(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def in_dtype(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Convert floating-point and complex tensors of ``module`` in place.

    ``module.to(dtype)`` would drop the imaginary parts. If ``device`` is None, tensors stay where they are.
    """
    to_complex = torch.complex128 if dtype is torch.float64 else torch.complex64  # none has parts of 16 bits

    def convert(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else to_complex if tensor.is_complex() else tensor.dtype
        return tensor.to(device, wanted)

    module._apply(convert)  # as ``module.to`` itself does
    return module


def in_memory_format(module: nn.Module, *, channels_last: bool) -> None:
    """Store 4-dimensional parameters in channels_last or contiguous format."""
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in module.parameters():
        if parameter.ndim == 4 and not parameter.is_contiguous(memory_format=wanted):
            parameter.data = parameter.data.contiguous(memory_format=wanted)

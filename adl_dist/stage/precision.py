"""In which precision, and by what means, the stages of a process compute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.schedule import Method


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats and kernels of a run.

    Attributes:
        dtype: dtype of parameters and floating-point inputs.
        autocast: dtype of the operations that torch.autocast lowers, in forward and loss; only ``torch.bfloat16``;
            None: all compute in ``dtype``.
        wire_dtype: dtype in which wider activations and gradients travel between stages; only ``torch.bfloat16``;
            None: as they are.
        compile: whether torch.compile compiles each stage.
        tf32: whether a GPU may round float32 to 10 bits of mantissa in matrix products and convolutions.
        cudnn_benchmark: whether cuDNN times its kernels for each new shape and takes the fastest; no seed repeats
            that.
        channels_last: whether images [B, C, H, W] are computed and sent in memory as [B, H, W, C].
    """

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    compile: bool = False
    tf32: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False

    def check(self, method: Method) -> None:
        """Refuse what cannot be computed, or would not be what it says.

        Raises:
            ConfigError: see the message.
        """
        for key, narrow in (("autocast", self.autocast), ("wire_dtype", self.wire_dtype)):
            # float16 needs a loss scale, which would have to travel with every gradient until its update.
            if narrow not in (None, torch.bfloat16):
                raise ConfigError(f"runtime.{key}={_named(narrow)} is not supported; use bfloat16, or null")
        if self.autocast is not None and self.dtype is not torch.float32:
            raise ConfigError(
                f"runtime.autocast={_named(self.autocast)} lowers float32 only, but dtype={_named(self.dtype)}; use "
                "dtype=float32, or runtime.autocast=null"
            )
        keeps_copies = "autocast" if self.autocast is not None else "compile" if self.compile else None
        if keeps_copies is not None and method.weights == "latest":
            raise ConfigError(
                f"method={method.name} back-propagates through the present weights (method.weights=latest), but with "
                f"runtime.{keeps_copies} a graph may keep what was computed from those of its forward; use "
                f"method.weights=stash, or no runtime.{keeps_copies}"
            )

    def autocasting(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Return what makes the context of a forward or a loss on ``device``."""
        # Around each call alone: what autocast remembers of lowered weights must not outlive an update.
        return nullcontext if self.autocast is None else partial(torch.autocast, device.type, dtype=self.autocast)

    @contextmanager
    def apply(self, *, threads: int) -> Iterator[None]:
        """Set what torch keeps for a whole process, and ``threads``; leave it as it was.

        On a CPU the flags of CUDA do nothing. They are set all the same, so that nothing depends on the order in which
        a user's script touches the GPU.
        """
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        # Read by the newer names, which answer whatever a script has set; written by the older ones, which keep both
        # kinds in step. Inductor still reads an older one (torch 2.15, kernel/bmm.py), which raises if they differ.
        before = [precision == "tf32" for precision in (matmul.fp32_precision, cudnn.conv.fp32_precision)]  # type: ignore[attr-defined]
        benchmark, num_threads = cudnn.benchmark, torch.get_num_threads()
        matmul.allow_tf32 = cudnn.allow_tf32 = self.tf32
        cudnn.benchmark = self.cudnn_benchmark
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
            cudnn.benchmark = benchmark
            torch.set_num_threads(num_threads)

    @property
    def settings(self) -> dict[str, Any]:
        """The plain values that two ranks, or a run and its continuation, must have in common."""
        return {
            "dtype": _named(self.dtype),
            "autocast": _named(self.autocast),
            "wire_dtype": _named(self.wire_dtype),
            "tf32": self.tf32,
            "channels_last": self.channels_last,
        }


def _named(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def to_channels_last(module: nn.Module) -> None:
    """Store the weights of convolutions as [out, H, W, in], in place."""
    for parameter in module.parameters():
        if parameter.ndim == 4:  # the others have no such format
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

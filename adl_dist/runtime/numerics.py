"""In which precision, and by what means, the stages of a process compute."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from adl_dist.errors import ConfigError
from adl_dist.schedule import Method


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a run decides about its arithmetic.

    Attributes:
        dtype: of parameters and floating-point inputs.
        autocast: of the operations that torch.autocast lowers, in forward and loss; None: all compute in ``dtype``.
        wire_dtype: that wider activations and gradients are sent in between stages; None: as they are.
        compile: whether torch.compile compiles each stage.
    """

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    compile: bool = False

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
        """What forward and loss run in on ``device``, a fresh one each time."""
        # Around each call alone: what autocast remembers of lowered weights must not outlive an update.
        return nullcontext if self.autocast is None else partial(torch.autocast, device.type, dtype=self.autocast)

    @property
    def settings(self) -> dict[str, Any]:
        """What two ranks, or a run and its continuation, must have in common."""
        return {"dtype": _named(self.dtype), "autocast": _named(self.autocast), "wire_dtype": _named(self.wire_dtype)}


def _named(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")

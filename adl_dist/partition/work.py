"""A counter of FLOPs and of bytes read and written by torch's operators."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from adl_dist.partition.containers import tensors_in

ATTENTION = torch.nn.functional.scaled_dot_product_attention
FLOPS_PER_BYTE = 8.0  # in the time that a device takes for one byte; it has more for matrices, and fewer on a CPU


class Work(TorchDispatchMode):
    """A mode that counts the work of the operators inside.

    Attributes:
        flops: floating-point operations, by the table of torch's FlopCounterMode.
        nbytes: bytes of arguments and results, except those of views.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.nbytes = 0.0

    def attention(self, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a call of ATTENTION, count it by its shapes, and return its result.

        The operators inside it, and the bytes that they read and write, depend on the device.
        """
        flops, nbytes = self.flops, self.nbytes
        out = run()
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        scores = math.prod(given["query"].shape[:-1]) * given["key"].shape[-2]
        self.flops = flops + 2 * scores * (given["query"].shape[-1] + given["value"].shape[-1])
        self.nbytes = nbytes + sum(tensor.nbytes for tensor in tensors_in((args, kwargs, out)))
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, to save a second and 100 MB for torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        if not func.is_view:
            tensors = tensors_in((args, kwargs, out))
            self.nbytes += sum(t.nbytes for t in tensors if t.layout is torch.strided)
        return out

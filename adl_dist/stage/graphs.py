"""What records the work of a GPU as a graph, and finds out beforehand whether it may.

A graph launches the same kernels on the same memory again, without the Python code around them: so no number may
reach the host on the way, and all that lives on between two graphs must be referred to from here, because the memory
of anything else is given to later recordings of the same pool.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adl_dist.errors import ConfigError
from adl_dist.schedule import Pipeline
from adl_dist.stage.traits import StageTraits

Replay = Callable[[], None]
WAY_OUT = "use runtime.cuda_graphs=false"
COPIES = "_to_copy", "copy_"
OF_SIZES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Recorder(Protocol):
    """Records work on one device."""

    def rehearse(self, work: Callable[[], None], *, branch: int | None = None) -> None:
        """Do ``work`` as it will be recorded, so that what is only needed once is made outside of graphs.

        ``branch`` is its place among works that are recorded together; None: it is recorded by itself.
        """

    def record(self, works: Sequence[Callable[[], None]], *, is_kept: bool) -> Replay:
        """Record ``works``, of which none needs another, and return what does all of them again, side by side.

        ``is_kept``: what it leaves is still read after others were replayed. Else it is read for the last time before
        another one that is not kept is replayed.
        """


class CudaRecorder:
    """Records CUDA graphs, one after the other.

    torch's allocator frees what is of no more use within a recording, and gives it to later recordings of the same pool
    of memory. When an earlier one is replayed, it writes there again. So recordings of which something is kept have a
    pool each, and all others share one.
    """

    def __init__(self, device: torch.device) -> None:
        """Record on ``device``, on a stream of its own, as recording demands."""
        gc.collect()  # an earlier trainer's graphs: to free them while others are recorded is not allowed
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._branches: list[torch.cuda.Stream] = []  # of works that are recorded together
        self._shared_pool = torch.cuda.graph_pool_handle()
        # The graphs of autograd that were recorded stay, and with them its nodes that add gradients up, on that stream.
        # A backward that is not replayed meets them from another one: autograd waits as it must, and says so.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def rehearse(self, work: Callable[[], None], *, branch: int | None = None) -> None:
        """Do ``work`` on the stream on which it will be recorded: libraries keep a workspace for each stream."""
        stream, present = self._stream, torch.cuda.current_stream(self._device)
        if branch is not None:
            stream = self._branches_for(branch + 1)[branch]
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            work()
        present.wait_stream(stream)

    def record(self, works: Sequence[Callable[[], None]], *, is_kept: bool) -> Replay:
        """Record ``works`` without doing them; see :meth:`Recorder.record`.

        Replays are done in the current stream, one after the other. Several works have a stream each, for which torch's
        allocator keeps memory apart.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle() if is_kept else self._shared_pool
        # Other threads, which load data or watch over NCCL, may do what this one must not do meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            self._do(works)
        return graph.replay

    def _do(self, works: Sequence[Callable[[], None]]) -> None:
        if len(works) == 1:
            works[0]()
            return
        branches = self._branches_for(len(works))
        for branch in branches:  # all of them leave the stream of the recording before the first one comes back
            branch.wait_stream(self._stream)
        for branch, work in zip(branches, works, strict=True):
            with torch.cuda.stream(branch):
                work()
        for branch in branches:
            self._stream.wait_stream(branch)

    def _branches_for(self, number: int) -> list[torch.cuda.Stream]:
        self._branches += [torch.cuda.Stream(self._device) for _ in range(len(self._branches), number)]
        return self._branches[:number]


def recorder_for(device: torch.device) -> Recorder:
    """Return what records on ``device``.

    Raises:
        ConfigError: it is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"runtime.cuda_graphs needs runtime.device=cuda, but stages are on {device.type}; {WAY_OUT}")
    return CudaRecorder(device)


class _Watch(TorchDispatchMode):
    """Notes the first operation that a graph could not hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.fault: str | None = None
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if self.fault is None:
            self.fault = self._fault(func, args, kwargs or {})
        out = func(*args, **kwargs or {})
        if self.fault is None and isinstance(out, Tensor) and _name(func) in COPIES and self._is_elsewhere(out):
            self.fault = f"{_name(func)} takes a tensor from {self._device.type} to {out.device.type}"
        return out

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._device.type

    def _fault(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
        name = _name(func)
        if any(tag in func.tags for tag in OF_SIZES):
            return f"{name} hands a number, or a size, from the device to the host"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A number in a tensor of the host is read when it is recorded, and never again.
        if any(self._is_elsewhere(t) and (t.ndim > 0 or name in COPIES) for t in tensors):
            return f"{name} takes a tensor that is not on {self._device.type}"
        return None


def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


@contextmanager
def recordable(where: str, device: torch.device, *, may_draw: bool = True) -> Iterator[None]:
    """Check that a graph could hold what is done inside, on ``device``.

    Raises:
        ConfigError: it could not, or draws random numbers and may not; the text begins with ``where``.
    """
    with _Watch(device) as watch:
        yield
    if watch.fault is not None:
        raise ConfigError(
            f"{where}: runtime.cuda_graphs=true needs forwards and backwards that launch the same kernels each time, "
            f"but {watch.fault}; {WAY_OUT}"
        )
    if watch.draws and not may_draw:
        raise ConfigError(
            f"{where}: it draws random numbers, as dropout does, but with runtime.cuda_graphs=tick all stages would "
            "draw from one generator at the same time; use runtime.cuda_graphs=true"
        )


def check_method(pipeline: Pipeline) -> None:
    """Raise ConfigError if the method has stages that cannot be recorded."""
    method = pipeline.method
    if method.replays:
        what = "replays forwards with other weights"
    elif method.splits:
        what = "divides a backward"
    elif pipeline.spec.has_heads:
        what = "has heads of its own in each stage"
    elif {"predict", "nesterov"}.intersection(method.mitigation or ()):
        what = "forwards with weights made for it (method.mitigation=predict, nesterov)"
    elif pipeline.tied:
        what = "exchanges the gradients of tied weights"
    else:
        return
    raise ConfigError(
        f"runtime.cuda_graphs=true does not go with method={method.name} as it is set, which {what}; use another "
        f"method, or {WAY_OUT}"
    )


def check_recordable(module: nn.Module, where: str, traits: StageTraits) -> None:
    """Raise ConfigError for what a graph would do once and for all; the text begins with ``where``."""
    on = hooked(module)
    faults = {
        "draws from Python's or numpy's random stream": traits.draws,
        "changes more than buffers": traits.moves_more,
        "writes to its parameters": [*traits.writes, *traits.replaces],
        "computes again in its backward, as activation checkpointing does": traits.recomputes,
        "gets inputs of varying lengths": traits.loss.varies,
        "keeps something in the loss function": traits.loss.moves,
        f"has a hook at module '{on[0]}'" if on else "": on,
    }
    for what, is_so in faults.items():
        if is_so:
            raise ConfigError(
                f"{where}: it {what}, which a graph would not do again (runtime.cuda_graphs=true); {WAY_OUT}"
            )


def hooked(module: nn.Module) -> list[str]:
    """Return the names of modules that have a hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_some = [(name, any(getattr(one, kind) for kind in kinds)) for name, one in module.named_modules()]
    return [name or "the stage" for name, has in has_some if has]

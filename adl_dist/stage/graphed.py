"""A stage whose forwards and backwards are CUDA graphs: for a small network the host is what takes the time.

A graph computes with addresses. So weights lie in V slots (:mod:`adl_dist.stage.static_weights`), and what a
micro-batch leaves for its backward in one of A slots, each of which has a forward and a backward of its own. In steady
state micro-batch b takes slot b mod A, and that says which weights it meets (:mod:`adl_dist.schedule.slots`). While the
pipeline fills it may meet others, and the last micro-batch of an epoch may be smaller: these, and evaluation, are done
without graphs, with the same weights. Updates are, too.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from adl_dist.batch import Batch, Tensors, tensors_of
from adl_dist.errors import ConfigError
from adl_dist.schedule import Pipeline
from adl_dist.schedule.slots import Slots, slots_of
from adl_dist.stage.graphs import WAY_OUT, Recorder, Replay, check_method, check_recordable, hooked, recordable
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stage import InFlight, Stage
from adl_dist.stage.static_weights import StaticWeights
from adl_dist.stage.traits import StageTraits
from adl_dist.stage.weights import NEWEST

Made = tuple[Any, Tensors, Tensors]  # what comes out: as the module returns it, its tensors, and what goes backward


class Slot:
    """What one of A micro-batches leaves for its backward, and how it goes forward and backward.

    What a forward leaves is read until the backward. Nothing of it may be freed: its memory would be given to others.
    What a backward leaves is copied, or has arrived in the place of another slot, before the next backward.

    Attributes:
        version: the slot of its weights.
        acts: what comes in, as leaves of the graph of autograd.
        made: what comes out.
        forward, backward: what does again what :meth:`compute_forward` and :meth:`compute_backward` did.
    """

    made: Made
    forward: Replay
    backward: Replay

    def __init__(
        self, stage: "GraphedStage", version: int, acts: Tensors, target: Batch | None, grads: Tensors
    ) -> None:
        """Make room for copies of ``acts``, ``target`` and ``grads``; the slot has the weights of slot ``version``."""
        self._stage, self.version = stage, version
        self.acts, self._target, self._grads = stage.copied(acts), _copy(target), grads
        # Written to behind the back of autograd, whose graph stays and would not be used again.
        self._arriving = [tensor.data for tensor in (*self.acts, *_tensors(self._target))]
        self._ends: list[GradientEdge] = []
        self._returning: Tensors = ()

    def compute_forward(self) -> None:
        """Go forward, to be recorded."""
        with self._stage.weights_in(self.version):
            self.made = self._stage.made_of(self.acts, self._target)

    def compute_backward(self) -> None:
        """Go backward, to be recorded, after :meth:`expect`.

        The graph of autograd stays: with it all that the backward reads.
        """
        with self._stage.weights_in(self.version):
            if self._ends:
                torch.autograd.backward(self._ends, self._returning, retain_graph=True)

    def expect(self) -> None:
        """Make room for what comes back, now that a forward is recorded."""
        self._ends, self._returning = self._stage.ends_of(self.made[2], self._grads)

    @property
    def size(self) -> int:
        """How many samples it is for."""
        return len(self._arriving[0])

    def fits(self, acts: Tensors, target: Batch | None) -> bool:
        """Whether a micro-batch is as large, and of the same types."""
        return [(t.shape, t.dtype) for t in self._arriving] == [(t.shape, t.dtype) for t in (*acts, *_tensors(target))]

    @torch.no_grad()
    def go_forward(self, acts: Tensors, target: Batch | None) -> None:
        """Replay a forward of ``acts`` and ``target``."""
        torch._foreach_copy_(self._arriving, [*acts, *_tensors(target)])
        self.forward()

    @torch.no_grad()
    def go_backward(self, grads: Tensors) -> None:
        """Replay the backward, given what comes back for that of what went forward that leads to a gradient."""
        torch._foreach_copy_(self._returning, grads)
        self.backward()

    def go_backward_alone(self, grads: Tensors) -> None:
        """Go backward on what the forward has left, by autograd itself; what goes upstream is where it always is."""
        places = [act.grad for act in self.acts]
        for act in self.acts:
            act.grad = None
        torch.autograd.backward(self._ends, grads, retain_graph=True)
        for act, place in zip(self.acts, places, strict=True):
            if place is not None and act.grad is not None:
                act.grad = place.copy_(act.grad)


class GraphedStage(Stage):
    """A stage that replays what its slots have recorded, wherever a micro-batch fits them.

    Attributes:
        slots: by number; none before :meth:`prepare`.
    """

    _may_draw = True  # whether its forward may draw random numbers

    def __init__(
        self,
        module: nn.Module,
        index: int,
        spec: TrainSpec,
        *,
        device: torch.device,
        traits: StageTraits,
    ) -> None:
        """Take over ``module``; see :class:`~adl_dist.stage.stage.Stage`.

        Raises:
            ConfigError: it does more than a graph could hold.
        """
        check_method(spec.pipeline)
        super().__init__(module, index, spec, device=device, traits=traits)
        check_recordable(module, self.where, traits)
        self.slots: list[Slot] = []
        self._plan = self._planned(spec.pipeline)
        self._static: StaticWeights | None = None
        if self._policy is not None:
            latest = spec.pipeline.method.weights == "latest"
            self._policy = self._static = StaticWeights(
                module,
                self.optimizer,
                self.mitigation,
                num_slots=self._plan.num_versions,
                hidden=latest or spec.precision.cuda_graphs == "tick",
            )
        # Where what the graphs compute with lies; None: nothing is recorded yet.
        self._memory: dict[str, tuple[int, bool]] | None = None

    @property
    def _branch(self) -> int | None:
        """Its place among stages that are recorded together; None: it is recorded by itself."""
        return None

    def _planned(self, pipeline: Pipeline) -> Slots:
        return slots_of(pipeline, self.index)

    def prepare(self, recorder: Recorder, acts: Tensors, wanted: tuple[Tensor | None, ...], grads: Tensors) -> None:
        """Rehearse a forward and a backward, and make the slots, to be recorded; nothing that moves is put back.

        ``acts``, ``wanted`` and ``grads`` are those of a common micro-batch, as :meth:`forward` and :meth:`backward`
        get them.

        Raises:
            ConfigError: a graph cannot hold them.
        """
        target = None if self.loss is None else self.loss.wanted(wanted)[0]
        if target is not None:
            target = target.to(self._device)  # targets come on the CPU, and only :meth:`forward` moves them
        self.begin(0, training=True)
        before, rehearsed = self._addresses(), Slot(self, 0, acts, target, grads)
        with recordable(self.where, self._device, may_draw=self._may_draw):
            recorder.rehearse(rehearsed.compute_forward, branch=self._branch)
            rehearsed.expect()
            recorder.rehearse(rehearsed.compute_backward, branch=self._branch)
        if moved := _unlike(before, self._addresses()):
            raise ConfigError(
                f"{self.where}: its forward puts another tensor in the place of '{moved}', which a graph would not "
                f"do; write to it in place, or {WAY_OUT}"
            )
        if self._static is not None:
            gradients = [parameter.grad for parameter in self._static.parameters]
            if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
                raise ConfigError(
                    f"{self.where}: a gradient is sparse, which runtime.cuda_graphs=true cannot hold; use sparse=False "
                    f"in the embedding, or {WAY_OUT}"
                )
            self._static.prepare([gradient is not None for gradient in gradients])
        del rehearsed  # with it go autograd's places where gradients are added up, which belong to another stream
        self.begin(0, training=True)
        self.slots = [Slot(self, version, acts, target, grads) for version in self._plan.versions]
        for version in range(self._plan.num_versions):
            if self._static is not None:
                self._static.collect_in(version)

    def record(self, recorder: Recorder) -> None:
        """Record a forward and a backward for each slot."""
        for slot in self.slots:
            slot.forward = recorder.record([slot.compute_forward], is_kept=True)
            slot.expect()
            slot.backward = recorder.record([slot.compute_backward], is_kept=False)

    def is_recorded(self) -> None:
        """Take note that all slots are recorded."""
        self.begin(0, training=True)
        self._memory = self._addresses()

    def weights_in(self, version: int) -> AbstractContextManager[None]:
        """Have the module compute with the weights in that slot inside, and its gradients end there."""
        return NEWEST if self._static is None else self._static.weights_in(version)

    def copied(self, acts: Tensors) -> Tensors:
        """Return copies of what comes in, as it enters the graph of autograd."""
        copies = tuple(act.clone() for act in acts)
        return self._leaves_of(copies) if self.index > 0 else copies

    def made_of(self, acts: Tensors, target: Batch | None) -> Made:
        """Go forward."""
        with torch.enable_grad():
            out = self._call(acts)
            outs = self._taken_apart(out)
            return out, outs, outs if self.loss is None else (self.loss(out, target),)

    def ends_of(self, last: Tensors, grads: Tensors) -> tuple[list[GradientEdge], Tensors]:
        """Return where a backward begins, and copies of what comes back there."""
        if self.loss is not None:
            grads = (torch.ones_like(last[0]),)
        edges = self._grad_edges_of(last, 0)
        pairs = [(edge, grad.clone()) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        return [edge for edge, _ in pairs], tuple(grad for _, grad in pairs)

    def begin(self, epoch: int, *, training: bool, first_micro_batch: int = 0) -> None:
        """Get ready for a segment; see :meth:`Stage.begin`.

        Raises:
            ConfigError: something is no more as it was recorded.
        """
        super().begin(epoch, training=training, first_micro_batch=first_micro_batch)
        if not training:
            return
        if self._rereads_weights:
            raise ConfigError(
                f"{self.where}: a parameter has a hook, which a graph would not call (runtime.cuda_graphs=true); "
                f"remove it, or {WAY_OUT}"
            )
        if on := hooked(self.module):
            raise ConfigError(
                f"{self.where}: a hook was put on module '{on[0]}' after the start, which a graph would not call "
                f"(runtime.cuda_graphs=true); remove it, or {WAY_OUT}"
            )
        if self._memory is not None and (moved := _unlike(self._memory, self._addresses())):
            raise ConfigError(
                f"{self.where}: '{moved}' was replaced after the start, but graphs compute with the memory that it had "
                f"(runtime.cuda_graphs=true); write to it in place, as with copy_(), or {WAY_OUT}"
            )

    def forward(self, micro_batch: int, acts: Tensors, *wanted: Tensor | None, keep_graph: bool = True) -> Tensors:
        """Forward one micro-batch; see :meth:`Stage.forward`."""
        outs = super().forward(micro_batch, acts, *wanted, keep_graph=keep_graph)
        if self.in_flight[micro_batch].replay is None:
            return outs
        return tuple(out.clone() for out in outs)  # copied: the receiver may read it after the slot is used again

    def backward(self, micro_batch: int, grads: Tensors) -> Tensors:
        """Back-propagate one micro-batch; see :meth:`Stage.backward`."""
        kept = self.in_flight[micro_batch]
        leaving = self._backward(micro_batch, kept, grads)
        if kept.replay is not None:
            return tuple(grad.clone() for grad in leaving)
        if self._memory is not None and self._static is not None:
            place = self._static.with_strange_gradient(kept.version)
            if place is not None:
                raise ConfigError(
                    f"{self.where}: parameter {place} got a gradient in micro-batch {micro_batch}, and none when "
                    f"graphs were recorded (runtime.cuda_graphs=true); use it in every micro-batch, or {WAY_OUT}"
                )
        return leaving

    def _backward(self, micro_batch: int, kept: InFlight, grads: Tensors) -> Tensors:
        """Go backward; what is returned lies in the slot, if there is one."""
        if self._static is not None:
            self._static.collect_in(self._static.slot_of(kept.version))
        if kept.replay is not None and kept.output_and_loss is not None:
            out, loss = kept.output_and_loss
            kept.output_and_loss = out, loss.clone()  # which is read later on
        return super().backward(micro_batch, grads)

    def _compute(self, micro_batch: int, kept: InFlight, given: Tensors, *, with_graph: bool) -> Made:
        slot = self._slot_for(micro_batch, kept, given)
        if slot is None:
            return super()._compute(micro_batch, kept, given, with_graph=with_graph)
        kept.acts, kept.replay = slot.acts, slot.go_backward
        self._random.seed(micro_batch, given[0].device)
        with self._watching_buffers(self.module):
            slot.go_forward(given, kept.target)
        return slot.made

    def _slot_for(self, micro_batch: int, kept: InFlight, given: Tensors) -> Slot | None:
        """Return the slot of a micro-batch, if what was recorded there is what it needs."""
        if self._memory is None or kept.num_terms == 0:
            return None
        slot = self.slots[micro_batch % len(self.slots)]
        has_weights = self._static is None or self._static.slot_of(kept.version) == slot.version
        return slot if has_weights and slot.fits(given, kept.target) else None

    def _addresses(self) -> dict[str, tuple[int, bool]]:
        """Return where what it computes with lies, and what of it is trained."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in named}


def _unlike(before: dict[str, tuple[int, bool]], after: dict[str, tuple[int, bool]]) -> str | None:
    """Return the name of something that is not where it was."""
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)


def _tensors(batch: Batch | None) -> Tensors:
    return () if batch is None else tensors_of(batch)


def _copy(batch: Batch | None) -> Batch | None:
    return None if batch is None else batch.clone()

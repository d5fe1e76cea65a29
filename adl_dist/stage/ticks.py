"""All stages of one process as parallel branches of one graph: they work on different micro-batches at the same time.

In a tick of the steady state each stage goes forward with one micro-batch and backward with an earlier one, and needs
only what others have sent in earlier ticks (:mod:`adl_dist.schedule.ticks`). So all forwards of a tick are one graph,
each a branch of it, and all backwards another one. A stage only puts its input into its place; the last one to do so
has the graph replayed. Ticks in which not all stages can take part, while the pipeline fills and empties, are done
without graphs: the backward of what a graph has left by autograd itself, on the same memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.errors import ConfigError, DataError
from adl_dist.schedule import Action, Pipeline
from adl_dist.schedule.slots import Slots, slots_of
from adl_dist.schedule.ticks import Tick, steady_ticks, ticks_of
from adl_dist.stage.graphed import GraphedStage, Slot
from adl_dist.stage.graphs import Recorder, Replay
from adl_dist.stage.loss_terms import LossTerms
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stage import InFlight, Stage

WAY_OUT = "use runtime.cuda_graphs=true, with graphs of each stage by itself"


class TickedStage(GraphedStage):
    """A stage whose graphs are branches of those of all stages; actions come in the order of :meth:`Ticks.order`.

    Attributes:
        replays: whether the forwards, and the backwards, of the tick that is done are replayed.
    """

    _may_draw = False  # one generator serves a whole graph
    replays = (False, False)
    _versions: tuple[int, ...] = ()  # autograd's counts of writes to what graphs refer to, when they were recorded
    _unfinished: tuple[Tensors, Tensors] | None = None  # a group that is complete when all stages have gone backward

    @property
    def _branch(self) -> int | None:
        return self.index

    def _planned(self, pipeline: Pipeline) -> Slots:
        return slots_of(pipeline, self.index, least_versions=slots_of(pipeline, 0).num_versions)

    def can_replay(self, micro_batch: int, size: int) -> bool:
        """Whether a forward of ``size`` samples is one that its slot has recorded, with the weights of now."""
        slot = self.slots[micro_batch % len(self.slots)]
        return size == slot.size and (self._static is None or self._static.slot_of(self.version) == slot.version)

    def forward(self, micro_batch: int, acts: Tensors, *wanted: Tensor | None, keep_graph: bool = True) -> Tensors:
        """Forward one micro-batch; what is returned is there when all stages have been asked to."""
        if not self.replays[0]:  # what came in may lie in a slot, and is kept until the backward
            acts = tuple(act.clone() for act in acts)
        return Stage.forward(self, micro_batch, acts, *wanted, keep_graph=keep_graph)

    def backward(self, micro_batch: int, grads: Tensors) -> Tensors:
        """Back-propagate one micro-batch; what is returned is there when all stages have been asked to."""
        kept = self.in_flight[micro_batch]
        if kept.replay is None:
            return super().backward(micro_batch, grads)
        slot = self.slots[micro_batch % len(self.slots)]
        if not self.replays[1]:
            kept.replay = slot.go_backward_alone
        super()._look_at(kept, slot.made[0])
        return self._backward(micro_batch, kept, grads)

    def _slot_for(self, micro_batch: int, kept: InFlight, given: Tensors) -> Slot | None:
        if not self.replays[0]:
            return None
        slot = self.slots[micro_batch % len(self.slots)]
        if not slot.fits(given, kept.target):
            raise DataError(
                f"{self.where}: micro-batch {micro_batch} has tensors {[[*t.shape] for t in given]}, but "
                f"{[[*t.shape] for t in slot.acts]} were recorded (runtime.cuda_graphs=tick), or another type or "
                f"target; give samples of one form, or {WAY_OUT}"
            )
        return slot

    def is_recorded(self) -> None:
        """Take note that all slots are recorded; see :meth:`GraphedStage.is_recorded`."""
        super().is_recorded()
        self._versions = tuple(tensor._version for tensor in self._referred())

    def _referred(self) -> tuple[Tensor, ...]:
        """Return what the graphs of autograd refer to that others may write to, with the newest weights in slot 0."""
        older = () if self._static is None else self._static.in_other_slots()
        return (*self.module.parameters(), *self.module.buffers(), *older)

    def _look_at(self, kept: InFlight, out: Any) -> None:
        if kept.replay is None:  # else there is nothing to be seen yet
            super()._look_at(kept, out)

    def finish_group(self, arrived: Tensors, leaving: Tensors) -> Tensors:
        """Look at a group's gradients, if they are complete by now; else right before the update."""
        if not self.replays[1]:
            return super().finish_group(arrived, leaving)
        self._unfinished = arrived, leaving
        return leaving

    def update(self) -> None:
        """Apply the gradients of the group; see :meth:`Stage.update`."""
        if self._unfinished is not None:
            arrived, leaving = self._unfinished
            self._unfinished = None
            super().finish_group(arrived, leaving)
        super().update()

    def begin(self, epoch: int, *, training: bool, first_micro_batch: int = 0) -> None:
        """Get ready for a segment; see :meth:`GraphedStage.begin`."""
        self.replays, self._unfinished = (False, False), None
        super().begin(epoch, training=training, first_micro_batch=first_micro_batch)
        if training and self._versions:
            # What the user, or an average in the place of the weights, has written in between is meant to be computed
            # with, also by the graphs of autograd, which stay.
            torch._C._autograd._unsafe_set_version_counter(self._referred(), self._versions)


class Ticks:
    """The ticks of all stages, and their graphs."""

    def __init__(self, stages: Mapping[int, TickedStage], pipeline: Pipeline, terms: LossTerms | None) -> None:
        """Take all stages, prepared to be recorded.

        Raises:
            ConfigError: the loss counts its ``terms``.
        """
        if terms is not None:
            raise ConfigError(
                "runtime.cuda_graphs=tick needs to know before a tick what is forwarded in it, but this loss counts "
                f"what it averages over, which may be nothing; {WAY_OUT}"
            )
        self._stages, self._num_slots = stages, len(stages[0].slots)
        self._steady = steady_ticks(pipeline, self._num_slots)
        self._together: list[_Together] = []

    def record(self, recorder: Recorder) -> None:
        """Record two graphs for each tick of a period: all forwards, and all backwards."""
        for numbers, _ in self._steady:
            slots = [stage.slots[number] for stage, number in zip(self._stages.values(), numbers, strict=True)]
            together = self._recorded(recorder.record([slot.compute_forward for slot in slots], is_kept=True))
            for slot in slots:
                slot.forward = together
                slot.expect()
        for _, numbers in self._steady:
            slots = [stage.slots[number] for stage, number in zip(self._stages.values(), numbers, strict=True)]
            together = self._recorded(recorder.record([slot.compute_backward for slot in slots], is_kept=False))
            for slot in slots:
                slot.backward = together

    def order(self, lists: Mapping[int, Sequence[Action]], sizes: Sequence[int]) -> Iterator[tuple[int, Action]]:
        """Yield (stage, action) of a segment of micro-batches of ``sizes``, tick by tick.

        ``lists`` are the actions of all stages, which may be shortened meanwhile.
        """
        for together in self._together:  # an interrupted segment may have left a tick half done
            together.num_asked = 0
        for tick in ticks_of(lists):
            replays = self._replays(tick, sizes)
            for stage in self._stages.values():
                stage.replays = replays
            yield from tick.actions

    def _recorded(self, replay: Replay) -> "_Together":
        self._together.append(_Together(replay, len(self._stages)))
        return self._together[-1]

    def _replays(self, tick: Tick, sizes: Sequence[int]) -> tuple[bool, bool]:
        """Return whether the forwards, and the backwards, of a tick can be replayed: all of them or none."""
        every = range(len(self._stages))
        forwards = len(tick.forwards) == len(every) and all(
            self._stages[k].can_replay(tick.forwards[k], sizes[tick.forwards[k]]) for k in every
        )
        if len(tick.backwards) < len(every):
            return forwards, False
        # Of what is forwarded in this very tick nothing is in flight yet.
        left = [(self._stages[k].in_flight.get(b), b == tick.forwards.get(k)) for k, b in tick.backwards.items()]
        return forwards, all(
            forwards if is_now else kept is not None and kept.replay is not None for kept, is_now in left
        )


class _Together:
    """Has a graph replayed as soon as all stages have asked for it."""

    def __init__(self, replay: Replay, num_stages: int) -> None:
        self._replay, self._num_stages = replay, num_stages
        self.num_asked = 0

    def __call__(self) -> None:
        self.num_asked += 1
        if self.num_asked == self._num_stages:
            self.num_asked = 0
            self._replay()


def check_ticks(spec: TrainSpec, *, in_one_process: bool) -> None:
    """Raise ConfigError if the stages cannot work in ticks."""
    pipeline, what = spec.pipeline, None
    if not in_one_process or pipeline.num_stages == 1:
        what = "needs several stages, all in one process (runtime.processes=false)"
    elif spec.gradients.skips:
        what = "cannot have train.non_finite=skip, where stages wait for a number"
    else:
        try:
            steady_ticks(pipeline, slots_of(pipeline, 0).num_micro_batches)
        except ValueError as error:
            what = (
                f"needs a method whose stages all work at the same time, but with method={pipeline.method.name} {error}"
            )
    if what is not None:
        raise ConfigError(f"runtime.cuda_graphs=tick {what}; {WAY_OUT}")

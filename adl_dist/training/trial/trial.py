"""The model is tried out, and its cut compared with the uncut model, where it will be trained; nothing stays moved."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from adl_dist.batch import Batch, tensors_of
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.memory import memory_of
from adl_dist.partition.state_walk import Key
from adl_dist.stage import TrainSpec, in_memory_format
from adl_dist.training.trial.findings import Agreed, CutImpossible
from adl_dist.training.trial.hidden_ties import noting_reads
from adl_dist.training.trial.replayed_state import asking_for_graph, check_weights
from adl_dist.training.trial.samples import OTHER_SIZES, Samples
from adl_dist.training.trial.snapshot import Snapshot, restored_after
from adl_dist.training.trial.stage_chain import StageChain
from adl_dist.training.trial.verify import Verification


class SampledTrial:
    """What a trial has, whatever device its model is on.

    Attributes:
        spec: how the model will be trained.
        device: where it is tried.
        verify_seconds: how long the last comparison with the uncut model took; None: there was none.
        constants: the names of what the model holds next to its state, of which it is found out what matters.
    """

    spec: TrainSpec
    device: torch.device

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.verify_seconds: float | None = None
        self.constants: frozenset[str] = frozenset()

    @property
    def readings(self) -> list[tuple[Batch, Batch]]:
        """Inputs of two micro-batches of one length, for each length that is tried."""
        return self._samples.readings

    @property
    def one(self) -> tuple[Batch, Batch]:
        """Input [1, ...] and target [1, ...]."""
        return self._samples.one

    def _fault(self, chain: StageChain, found: Snapshot, size: int) -> str | None:
        """Return why a micro-batch of ``size`` samples cannot be trained on; None: it can.

        Raises:
            CutImpossible: it is the fault of the cut, and training has such a micro-batch.
        """
        found.begin()
        try:
            with warnings.catch_warnings(action="ignore"):  # of sizes that may never come
                chain.forward(self._samples.of_size(size))
        except (ConfigError, PartitionError) as error:
            if isinstance(error, CutImpossible) and size in self._samples.other_sizes:
                raise
            return str(error)
        return None


class Trial(SampledTrial):
    """A model and the samples to try it out with, on a device."""

    def __init__(self, model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> None:
        """Move ``model`` to ``device``, or to the CPU if that has no room for all of it."""
        super().__init__(samples)
        self.spec, self._model = spec, model
        self._bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        has_room = device.type != "cuda" or 2 * self._bytes < torch.cuda.mem_get_info(device)[0]
        self._use(device if has_room else torch.device("cpu"))

    def run(self, stages: Sequence[nn.Module], *, verify: bool = False, is_final: bool = True) -> Agreed:
        """Return what is known of ``stages``, which together are the model, after trying them out.

        ``verify``: they are compared with the uncut model. ``is_final``: they will be trained as they are; else it is
        not found out which of them recompute.

        Raises:
            ConfigError: a stage or the loss does not take what it gets, or there is nothing to train.
            CutImpossible: what a stage returns cannot cross a cut.
            PartitionError: the stages are another model than the uncut one.
        """
        try:
            return self._run(stages, verify=verify, is_final=is_final)
        except torch.OutOfMemoryError:
            if self.device.type == "cpu":
                raise
            torch.cuda.empty_cache()
            self._use(torch.device("cpu"))
            return self._run(stages, verify=verify, is_final=is_final)

    def _run(self, stages: Sequence[nn.Module], *, verify: bool, is_final: bool) -> Agreed:
        start = time.perf_counter()
        with restored_after(self._model, stages, self.spec, self.device) as found:
            # One stage is the model, but where several micro-batches are in flight a forward may disturb a backward.
            if verify and (len(stages) > 1 or self.spec.pipeline.overlaps):
                comparison = Verification(self._model, stages, self.spec, self._samples, self.device, found)
                agreed, chain = comparison.agreed(), comparison.chain
                self.verify_seconds = time.perf_counter() - start
            else:
                found.begin()
                chain = StageChain(stages, self.spec, self.device)
                chain.run(self._samples, backward=len(stages) > 1 or self._samples.trains, look=found.of_stages)
                agreed = chain.agreed(self._samples, self.spec)
                if is_final:  # no check, but what training has to know
                    comparison = Verification(self._model, stages, self.spec, self._samples, self.device, found)
                    agreed = comparison.with_recomputing(agreed)
            # Also those that no micro-batch has: a later call may, when the model is in pieces.
            faults = {size: fault for size in OTHER_SIZES if (fault := self._fault(chain, found, size)) is not None}
            agreed = agreed._replace(size_faults=faults, constants=self._constants_of(agreed, stages, found))
            if self.spec.pipeline.method.replays:  # also in front of an evaluation: training may come after it
                agreed = self._replayed(agreed, stages, found)
            if self._samples.trains:
                check_trains(agreed, self._samples)
        return agreed

    def _constants_of(self, agreed: Agreed, stages: Sequence[nn.Module], found: Snapshot) -> frozenset[str]:
        """Return those of the constants that forwards compute with and do not move: others may hold anything."""
        tensors = {name: memory_of(tensor) for name, tensor in found.tensors if name in self.constants}
        if not tensors:
            return self.constants
        read: set[Key] = set()
        found.begin()
        with noting_reads(dict.fromkeys(tensors.values()), read):
            chain = StageChain(stages, self.spec, self.device)
            for training in (True, False):
                chain.forward(self._samples.pair[0], training=training)
        moved = {name for known in agreed.traits.values() for name in known.moves}
        return frozenset(n for n in self.constants if n not in tensors or (tensors[n] in read and n not in moved))

    def _replayed(self, agreed: Agreed, stages: Sequence[nn.Module], found: Snapshot) -> Agreed:
        """Return what is known of the ``stages`` with what counts if they run forwards twice."""
        chain, batch = StageChain(stages, self.spec, self.device), self._samples.pair[0]
        asking = asking_for_graph(chain, found, batch)
        try:
            check_weights(chain, found, batch)
        except ConfigError as error:
            agreed = agreed._replace(replay_fault=str(error))
        traits = {k: replace(known, asks_for_graph=k in asking) for k, known in agreed.traits.items()}
        return agreed._replace(traits=traits)

    def _use(self, device: torch.device) -> None:
        self.device = device
        self.spec.precision.place(self._model, device)
        if isinstance(self.spec.loss_fn, nn.Module):
            self.spec.loss_fn.to(device)
        self._samples = self._samples.to(device, channels_last=bool(self.spec.precision.channels_last))


Result = TypeVar("Result")


def in_a_memory_format(
    model: nn.Module, spec: TrainSpec, samples: Samples, attempt: Callable[[TrainSpec], Result]
) -> tuple[Result, bool]:
    """Return what ``attempt`` does with the ``spec`` in the memory format that it asks for, or that the model allows.

    And whether the model does not allow channels_last, where it is left to it.

    Raises:
        ConfigError: channels_last is asked for, and only the plain format runs.
        ConfigError, PartitionError: neither runs.
    """

    def attempted(channels_last: bool) -> Result:
        return attempt(replace(spec, precision=replace(spec.precision, channels_last=channels_last)))

    wanted = spec.precision.channels_last
    try:
        return attempted(wanted is not False), False
    except (ConfigError, PartitionError) as error:
        formats_differ = any(t.ndim == 4 for t in tensors_of(samples.one[0])) or any(
            p.ndim == 4 for p in model.parameters()
        )
        if wanted is False or not formats_differ:
            raise
        in_memory_format(model, channels_last=False)
        result = attempted(False)
        if wanted:
            raise ConfigError(
                f"runtime.channels_last=true: {error}; in the plain memory format it runs: use "
                "runtime.channels_last=false, or null, which takes the one that runs"
            ) from error
        return result, True


def check_trains(agreed: Agreed, samples: Samples) -> None:
    """Raise a ConfigError if no gradient of the loss reaches the model, or not that of a group.

    Or if it cannot be trained on micro-batches of the sizes that ``samples`` tell, mostly the last of an epoch.
    """
    if agreed.loss_fault is not None:
        raise ConfigError(agreed.loss_fault)
    if not agreed.learns:
        raise ConfigError(
            "there is nothing to train: the loss depends on no parameter that takes a gradient; expected one with "
            "requires_grad=True, and an output that is not detached from it; to evaluate only, use Trainer.evaluate "
            "(adl-dist evaluate)"
        )
    if agreed.replay_fault is not None:
        raise ConfigError(agreed.replay_fault)
    for size in samples.other_sizes:
        if size in agreed.size_faults:
            holds = "1 sample" if size == 1 else "an odd number of samples"
            raise ConfigError(
                f"a micro-batch of the training data holds {holds}, and {agreed.size_faults[size]}; choose another "
                "train.batch_size, so that none does, also not the last of an epoch"
            )

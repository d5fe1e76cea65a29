"""The trial at the start of a model on meta: what travels between the stages is found out without a single weight.

No process holds the whole model, so none can compare values with it. What it does is compared instead, operation by
operation (:mod:`adl_dist.training.trial.operations`). The loss, which has no weights, is tried on made-up outputs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from adl_dist.batch import Batch
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.partition.trimmed import LayeredStage
from adl_dist.stage import TrainSpec
from adl_dist.stage.loss_terms import is_known_mean, is_sum
from adl_dist.training.trial.findings import Agreed
from adl_dist.training.trial.hidden_ties import SharedState
from adl_dist.training.trial.homes import Homes
from adl_dist.training.trial.operations import Recorder, first_difference, record
from adl_dist.training.trial.samples import OTHER_SIZES, Samples
from adl_dist.training.trial.snapshot import Snapshot, restored_after
from adl_dist.training.trial.stage_chain import StageChain
from adl_dist.training.trial.trial import SampledTrial, check_trains
from adl_dist.training.trial.verify import WAYS_OUT

META = torch.device("meta")


class MetaTrial(SampledTrial):
    """A model on meta and the samples to try it out with."""

    def __init__(self, model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> None:
        """Take ``model``; ``device`` is where the loss is tried.

        Raises:
            ConfigError: autocast is asked for, which does nothing on meta.
        """
        if spec.precision.autocast is not None:
            raise ConfigError(
                "runtime.autocast changes what travels between stages, and that is not known of a model on meta; build "
                "the model with its weights (runtime.lazy=false), or use no autocast"
            )
        super().__init__(samples.to(META, channels_last=bool(spec.precision.channels_last)))
        self.spec, self.device, self._model = spec, device, model
        spec.precision.place(model, META)

    def run(self, stages: Sequence[nn.Module], *, verify: bool = False, is_final: bool = True) -> Agreed:
        """Return what is known of ``stages``, which together are the model; as :meth:`.trial.Trial.run`.

        Raises:
            ConfigError: a stage or the loss does not take what it gets, or does what takes values to find out.
            CutImpossible: what a stage returns cannot cross a cut.
            PartitionError: the stages do something else than the uncut model.
        """
        with restored_after(self._model, stages, self.spec, self.device) as found:
            found.begin()
            chain = _Chain(stages, self.spec, self.device)
            chain.run(self._samples, look=found.of_stages)
            agreed = chain.agreed(self._samples, self.spec)
            start = time.perf_counter()
            agreed = self._compared(agreed, stages, found, verify=verify)
            self.verify_seconds = time.perf_counter() - start if verify else None
            faults = {size: fault for size in OTHER_SIZES if (fault := self._fault(chain, found, size)) is not None}
            agreed = agreed._replace(size_faults=faults, constants=self.constants)
            if self._samples.trains:
                check_trains(agreed, self._samples)
        return agreed

    def _compared(self, agreed: Agreed, stages: Sequence[nn.Module], found: Snapshot, *, verify: bool) -> Agreed:
        """Return what is known with what the operations tell, which are compared if ``verify``."""
        homes = Homes(stages)
        shared = SharedState(homes, stages, found.of_stages, self.spec)
        recomputed = set[str]()
        for is_training in (True, False):
            for module in (self._model, *stages):
                module.train(is_training)
            found_cut = self._recorded(stages, found, homes=homes, around=shared.watched, graph=is_training)
            shared.refuse_moved()
            _refuse_writes(found_cut)
            recomputed |= found_cut.recomputed
            if verify:
                uncut = self._recorded([self._model], found, graph=is_training)
                # A stage that runs the model's own forward makes masks and positions again.
                all_of_it = not any(isinstance(stage, LayeredStage) for stage in stages)
                _check_same(uncut, found_cut, is_training=is_training, all_of_it=all_of_it)
        recomputes = {
            k: any(name in recomputed for name, _ in stage.named_parameters()) for k, stage in enumerate(stages)
        }
        traits = {k: replace(known, recomputes=recomputes[k]) for k, known in agreed.traits.items()}
        if any(recomputes.values()) and self.spec.pipeline.method.weights == "latest":
            k = min(k for k, does in recomputes.items() if does)
            raise PartitionError(
                f"{homes.places[k]} computes with its weights again in its backward, as activation checkpointing does, "
                "but method.weights=latest has no weights of the forward; use method.weights=stash, or no checkpointing"
            )
        if self.spec.pipeline.method.replays:
            # A replay has to meet what the first forward met, and what that is takes values to find out.
            traits = {k: replace(known, asks_for_graph=True) for k, known in traits.items()}
        return agreed._replace(traits=traits)

    def _recorded(self, stages: Sequence[nn.Module], found: Snapshot, **how: Any) -> Recorder:
        found.begin()
        try:
            return record(stages, self._model, self._samples.pair[0].input_, **how)
        except AdlError:
            raise
        except Exception as error:  # an operation that asks for values, of the user's own
            raise ConfigError(
                f"the model cannot be tried out on torch.device('meta'): {type(error).__name__}: {error}; build it "
                "with its weights (runtime.lazy=false)"
            ) from error


class _Chain(StageChain):
    """Stages on meta, and a loss that gets made-up outputs of the shapes that they return."""

    def __init__(self, stages: Sequence[nn.Module], spec: TrainSpec, device: torch.device) -> None:
        super().__init__(stages, spec, device)
        # What a loss of torch averages over is known: to ask it takes many times the memory of the outputs.
        self._accumulates = self._accumulates and (not is_known_mean(spec.loss_fn) or is_sum(spec.loss_fn))

    def forward(self, *args: Any, **how: Any) -> Any:
        with META:  # where the tensors belong that a forward makes
            return super().forward(*args, **how)

    def _loss(self, k: int, out: Any, target: Batch) -> Tensor:
        with torch.device(self._device):
            generator = torch.Generator(self._device).manual_seed(0)
            made_up = tree_map(lambda leaf: _MadeUp.apply(leaf, generator) if isinstance(leaf, Tensor) else leaf, out)
            return super()._loss(k, made_up, target)


class _MadeUp(torch.autograd.Function):
    """Values in the place of a tensor on meta, whose gradient is on meta again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, generator: torch.Generator) -> Tensor:
        ctx.like = torch.empty_like(tensor)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
        return made.normal_(generator=generator) if tensor.is_floating_point() else made.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.like), None


def _refuse_writes(found: Recorder) -> None:
    if found.written:
        raise ConfigError(
            f"a forward writes to '{min(found.written)}', and on torch.device('meta') it cannot be found out what "
            "a cut makes of that; build the model with its weights (runtime.lazy=false)"
        )


def _check_same(uncut: Recorder, cut: Recorder, *, is_training: bool, all_of_it: bool) -> None:
    difference = first_difference(uncut, cut, all_of_it=all_of_it)
    if difference is not None:
        expected, found = (text if len(text) < 200 else f"{text[:200]}..." for text in difference)
        where = "training" if is_training else "evaluation"
        raise PartitionError(
            f"the cut model is not the uncut one: in {where} it does {found} where the uncut one does {expected}; "
            f"{WAYS_OUT}"
        )

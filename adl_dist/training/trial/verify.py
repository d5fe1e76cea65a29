"""The cut model is compared with the uncut one, on real samples, before the first update.

Both go forward and backward over one micro-batch, change their weights, and do the same with a second one, then they
evaluate. The cut one changes its weights as the method does: with delayed gradients between forward and backward, where
others take their place. Outputs, losses, gradients and what the forwards move must be the same: to the bit, or but for
the rounding of a sum in another order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition.module_state import ModuleState
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import takes_gradient
from adl_dist.stage.versions import check_versions
from adl_dist.training.trial.differences import STATE, Compared, Comparison, Difference, first_of, largest_difference
from adl_dist.training.trial.findings import Agreed, CutImpossible
from adl_dist.training.trial.hidden_ties import SharedState, check_reads
from adl_dist.training.trial.homes import Around, Homes, units_of
from adl_dist.training.trial.outcome import EVALUATION, FIRST, SECOND, Outcome, Replacement
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.snapshot import Snapshot
from adl_dist.training.trial.stage_chain import StageChain

WAYS_OUT = (
    "use partition.granularity=block, which leaves blocks as they are, cut elsewhere (partition.balance), or hand over "
    "an nn.Sequential of units; partition.verify=false would train this other model"
)
CAUSES = {
    (FIRST, "output"): "the forward asks for a type or a value, counts, or draws from a generator of its own, which "
    "was done once and for all while it was read",
    (FIRST, "loss"): "the loss draws random numbers or keeps something of its own",
    (FIRST, "gradient"): "it passes a detached value, a hook, or a tie that is not registered",
    (SECOND, "output"): "the forward counts, draws from a generator or keeps something of its own, which was read once",
    (EVALUATION, "output"): "the forward does something else in evaluation, which was read once",
    (STATE, "state"): "the forward writes to it in a way that was read once",
}
AFTERWARDS = EVALUATION, STATE
OVERTAKES = "a forward writes to what the backward of an earlier micro-batch needs, or reads what that backward leaves"
STALE = (
    "the model keeps a view or a detached copy of a weight from when it was built, which no new version reaches; or "
    f"{OVERTAKES}"
)
NO_VIEWS = "make it where it is used, in the forward, or choose method=bp, which has one micro-batch in flight"
ONE_AT_A_TIME = "write to a copy, or choose method=bp, which has one micro-batch in flight"


@dataclass
class Verification:
    """The comparison of a cut model with the uncut one."""

    model: nn.Module
    stages: Sequence[nn.Module]
    spec: TrainSpec
    samples: Samples
    device: torch.device
    start: Snapshot

    def __post_init__(self) -> None:
        named = self.model.named_parameters()
        self._parameters = {name: p for name, p in named if p.requires_grad and takes_gradient(p)}
        self._homes = Homes(self.stages)
        self._shared = SharedState(self._homes, self.stages, self.start.of_stages, self.spec)
        self.chain = StageChain(self.stages, self.spec, self.device, around=self._shared.watched)
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters() if p.layout is torch.strided}
        self._plain = {  # what a forward may move besides buffers, which it may replace
            name: tensor
            for name, tensor in self.start.tensors
            if not isinstance(tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage().data_ptr() not in weights
        }

    def agreed(self) -> Agreed:
        """Compare, and return what is known of the stages.

        Raises:
            ConfigError, CutImpossible: a stage does not run, or not there.
            PartitionError: the cut model is another one; names where it differs and the likely cause.
        """
        between, pipeline = self._replaced(), self.spec.pipeline
        # Whether two micro-batches are in flight with the same weights.
        several = pipeline.micro_batches_per_update > 1 or pipeline.method.weights == "2bw"
        third = pipeline.overlaps and (several or not (between or pipeline.spec.flush))
        uncut = Replacement(self._parameters, between or None, third=third)
        cut = replace(uncut, between=between, delayed=True)
        try:
            found = self._outcome(self.chain, cut, look=self.start.of_stages)
        except CutImpossible:
            raise
        except ConfigError as error:
            raise self._failure(error, uncut) from error
        except PartitionError:  # a gradient that reaches another stage
            self._shared.check(self._forward)  # because that left something for this one
            raise
        agreed = self.chain.agreed(self.samples, self.spec)
        self._shared.check(self._forward)
        check_reads(self._homes, self.start.of_stages, self._forward)
        compared = Compared(self.spec, found)
        self._outcome(self._uncut(), uncut, into=compared)
        difference, recomputes = first_of(compared.unlike), frozenset[int]()
        if difference is not None and (between or third):
            compare = Comparison(self.spec, self._outcome(self._uncut(), uncut))
            in_place = compare.first_difference(self._outcome(self._cut(), uncut))
            # What a backward moves, like BatchNorm that is computed again, it moves in another order if it is delayed.
            if in_place is None and difference.when not in AFTERWARDS:
                recomputes, other = self._recomputing(compare, difference, cut)
                if other is not None:
                    cause, way_out = (STALE, NO_VIEWS) if between else (OVERTAKES, ONE_AT_A_TIME)
                    raise self._error(other, cause, way_out, cut)
            difference = in_place
        if difference is not None:
            raise self._error(difference, CAUSES.get((difference.when, difference.what), ""))
        return _with_recomputing(agreed, recomputes)

    def with_recomputing(self, agreed: Agreed) -> Agreed:
        """Return what is known of the stages, and which of them recompute, without a look at the uncut model.

        Raises:
            ConfigError: no older version can be kept of a parameter.
            PartitionError: one recomputes, and the method has no weights of the forward.
        """
        between = self._replaced()
        if not between:
            return agreed
        in_place = Replacement(self._parameters, between)
        change = replace(in_place, between=between, delayed=True)
        compare = Comparison(self.spec, self._outcome(self._cut(), in_place))
        difference = compare.first_difference(self._outcome(self._cut(), change))
        if difference is None or difference.when in AFTERWARDS:
            return agreed
        return _with_recomputing(agreed, self._recomputing(compare, difference, change)[0])

    def _failure(self, error: ConfigError, change: Replacement) -> ConfigError | PartitionError:
        """Return what to say of an ``error`` of the cut model: it is the cut's if the uncut model runs."""
        try:
            self._outcome(self._uncut(), change)
        except ConfigError:
            return error
        try:
            self._outcome(self._cut(), change)
        except ConfigError:
            return PartitionError(f"the cut model is not the uncut one, which runs: {error}; {WAYS_OUT}")
        return ConfigError(
            f"{error}; with several micro-batches in flight a forward must not write in place to a weight or buffer "
            "that the backward of an earlier one needs: work on a copy there, or choose method=bp"
        )

    def _cut(self) -> StageChain:
        return StageChain(self.stages, self.spec, self.device)

    def _forward(self, around: Around) -> Outcome:
        """Run the stages forward only, from the state at the start."""
        self.start.begin()
        return StageChain(self.stages, self.spec, self.device, around=around).run(self.samples, backward=False)

    def _uncut(self) -> StageChain:
        return StageChain([self.model], self.spec, self.device, name="the uncut model")

    def _replaced(self) -> frozenset[str]:
        """Return the parameters that the method replaces between a forward and its backward.

        Raises:
            ConfigError: no older version can be kept of one.
        """
        pipeline, replaced = self.spec.pipeline, set[int]()
        weights, flush = pipeline.method.weights, pipeline.spec.flush
        for k, stage in enumerate(self.stages):
            if weights == "2bw" or (weights != "recompute" and pipeline.delays[k] and not flush):
                check_versions(stage, f"stage {k} ({units_of(stage)})")
                replaced |= {id(p) for p in stage.parameters()}
        return frozenset(name for name, p in self._parameters.items() if id(p) in replaced)

    def _outcome(
        self, chain: StageChain, change: Replacement, *, look: Sequence[ModuleState] = (), into: Outcome | None = None
    ) -> Outcome:
        self.start.begin()
        outcome = chain.run(self.samples, change, look=look, into=into)
        moved = {**self._plain, **dict(self.model.named_buffers())}
        outcome.add(STATE, "state", {name: tensor.detach().clone() for name, tensor in moved.items()})
        return outcome

    def _recomputing(
        self, compare: Comparison, difference: Difference, change: Replacement
    ) -> tuple[frozenset[int], Difference | None]:
        """Return the stages whose backward computes with their weights again, or the difference that is not theirs.

        Such a backward sends another gradient to the stages before it, too, so a difference does not tell its stage.

        Raises:
            PartitionError: the method has no weights of the forward.
        """

        def unlike(recomputes: frozenset[int]) -> Difference | None:
            found = compare.first_difference(self._outcome(self._cut(), replace(change, recomputes=recomputes)))
            return found if found is not None and found.when not in AFTERWARDS else None

        recomputes = frozenset(k for k, stage in enumerate(self.stages) if change.between & {*self._names(stage)})
        if (difference.when, difference.what) != (FIRST, "gradient") or unlike(recomputes) is not None:
            return frozenset(), difference
        for k in sorted(recomputes):
            if unlike(recomputes - {k}) is None:
                recomputes -= {k}
        if self.spec.pipeline.method.weights == "latest":
            k = min(recomputes)
            raise PartitionError(
                f"stage {k} ({units_of(self.stages[k])}) computes with its weights again in its backward, as "
                "activation checkpointing does, but method.weights=latest has no weights of the forward; use "
                "method.weights=stash, or no checkpointing"
            )
        return recomputes, None

    def _names(self, stage: nn.Module) -> Iterator[str]:
        """Yield the names of the trained parameters that ``stage`` holds."""
        held = {id(p) for p in stage.parameters()}
        return (name for name, p in self._parameters.items() if id(p) in held)

    def _error(
        self, difference: Difference, cause: str, way_out: str = WAYS_OUT, change: Replacement | None = None
    ) -> PartitionError:
        where = ""
        if difference.what in ("output", "loss"):
            with suppress(ConfigError, PartitionError):
                where = self._first_unlike(difference.when, change or Replacement(self._parameters))
        likely = f"; likely cause: {cause}" if cause else ""
        return PartitionError(f"the cut model is not the uncut one: {difference}{where}{likely}; {way_out}")

    def _first_unlike(self, time: str, change: Replacement) -> str:
        """Return which module's output is the first that differs, with this ``change`` of the cut model's weights."""
        calls = []
        for stages, how in (([self.model], replace(change, between=frozenset(), delayed=False)), (self.stages, change)):
            self.start.begin()
            with _watched(self.model) as made:
                chain = StageChain(stages, self.spec, self.device, on_turn=partial(made.__setitem__, "now"))
                chain.run(self.samples, how)
            calls.append(made["calls"])
        expected, found = calls
        before = ""
        for key, outs in expected.items():
            if key[0] != time or key not in found or not outs:
                continue
            if not all(
                a.shape == b.shape and largest_difference(a, b) == 0 for a, b in zip(outs, found[key], strict=False)
            ):
                return f"; the first that differs is '{key[1]}'" + (f", right after '{before}'" if before else "")
            before = key[1]
        return "; what its modules return is the same, so it is what the model computes itself" if before else ""


def _with_recomputing(agreed: Agreed, recomputes: frozenset[int]) -> Agreed:
    traits = {k: replace(of_stage, recomputes=k in recomputes) for k, of_stage in agreed.traits.items()}
    return agreed._replace(traits=traits)


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect what the modules of ``model`` return: by (when, name, how often called at that time)."""
    made: dict[str, Any] = {"now": FIRST, "calls": {}}
    counts: dict[tuple[str, str], int] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            count = counts[made["now"], name] = counts.get((made["now"], name), 0) + 1
            leaves = [leaf.detach().clone() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            made["calls"][made["now"], name, count] = leaves

        return hook

    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_hook(look(name)))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()

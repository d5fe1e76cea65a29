"""A recorded model as a chain of units with possible cuts between them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_structure

from adl_dist.batch import Batch
from adl_dist.errors import PartitionError
from adl_dist.partition.recorder import record_forward
from adl_dist.partition.recording import Call, Key, copied
from adl_dist.partition.stage_module import StageModule, extra_states
from adl_dist.partition.stage_plan import CutImpossibleError, StagePlan, Unit, plan_stages, units_of
from adl_dist.partition.work import FLOPS_PER_BYTE
from adl_dist.streams import seed_streams, streams_kept


class Chain:
    """The units of a model, and the stages made by cuts between them.

    Attributes:
        granularity: whether cuts may lie inside blocks, ``layer``, or not, ``block``.
        units: names of the units, in the order in which they run.
        blocks: of each unit, the number of its block.
        block_names: names of the blocks.
        places: of each recorded call, by key, the number of its unit; calls between two units belong to the first.
        work: of each unit, its share of the forward's operations and bytes; the same on every machine.
        forbidden: cuts that cannot be made, by the unit before them, each with the reason.
        shared: for each trained parameter that several units compute with, by name, the numbers of these units.
        notes: modules that stay whole, each with the reason.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], *, granularity: str = "layer", keeps_ties: str | None = None
    ) -> None:
        """Record ``model`` without changing it.

        Args:
            model: the uncut model, on its device or on meta.
            batches: two or more inputs of different sizes.
            granularity: ``block`` forbids cuts inside blocks.
            keeps_ties: the reason why all uses of a parameter must be on one stage; None if they need not be.

        Raises:
            PartitionError: If the model's forward cannot be run in stages.
        """
        self._layout, self.granularity = tree_structure(batches[0]), granularity
        self._names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())] + [*extra_states(model)]
        twin = copied_model(model)
        with streams_kept():
            seed_streams(0)  # the same calls in every process
            self.recording = record_forward(twin, batches)
        self._units = units_of(self.recording)
        if not self._units:
            raise PartitionError("the model computes nothing that could be cut; use num_stages=1")
        self.units = [unit.name for unit in self._units]
        self.blocks = list(accumulate(int(unit.begins_block) for unit in self._units))
        self.blocks = [number - self.blocks[0] for number in self.blocks]
        self.block_names = [unit.block for unit in self._units if unit.begins_block]
        self.places = self._places()
        self.work = self._work()
        self.notes = [f"'{name}' stays whole: {why}" for name, why in self.recording.whole.items()]
        self.shared = self._shared({n for n, p in model.named_parameters() if p.requires_grad})
        self.forbidden: dict[int, str] = {}
        if granularity == "block":
            for unit, (one, other) in enumerate(pairwise(self.blocks)):
                if one == other:
                    self.forbidden[unit] = "it lies inside a block (partition.granularity=block)"
        for unit, pair in enumerate(pairwise(self._units)):
            if (name := self._decider_around(*pair)) is not None:
                self.forbidden[unit] = f"{name} draws random numbers that may decide what it calls"
        if keeps_ties is not None:
            for name, users in self.shared.items():
                why = f"'{name}' is used on both sides of it, and must be on one stage, {keeps_ties}"
                self.forbidden |= dict.fromkeys(range(users[0], users[-1]), why)

    def _decider_around(self, one: Unit, other: Unit) -> str | None:
        """Return the module around both units that may skip one of them, or None.

        Between blocks a cut is possible even then, because a skipped block hands on its input.
        """
        found, around_other = None, {*_forwards_around(other.call)}
        for forward in _forwards_around(one.call):
            if forward not in around_other:
                continue
            has_blocks = forward is None or forward.is_block
            if self._decides("" if forward is None else forward.path) and not (has_blocks and other.begins_block):
                found = "the model" if forward is None else f"'{forward.name}'"
        return found

    def _decides(self, path: str) -> bool:
        return any(path in mode.deciders for mode in self.recording.modes.values())

    def _places(self) -> dict[Key, int]:
        places = {unit.call.key: n for n, unit in enumerate(self._units)}
        for mode in self.recording.modes.values():
            place = 0
            for key in mode.calls:
                place = places.setdefault(key, place)
        return places

    def _work(self) -> list[float]:
        work = [0.0] * len(self._units)
        mode = next(m for m in self.recording.modes.values() if self._units[0].call.key in m.calls)
        for call in mode.calls.values():
            if not call.is_open:
                work[self.places[call.key]] += call.flops + FLOPS_PER_BYTE * call.nbytes
        total = sum(work)
        return [one / total for one in work] if total else [1.0 / len(work)] * len(work)

    def _shared(self, trained: set[str]) -> dict[str, list[int]]:
        users: dict[str, list[int]] = {}
        for place, unit in enumerate(self._units):
            for name in unit.call.uses & trained:
                users.setdefault(name, []).append(place)
        return {name: places for name, places in sorted(users.items()) if len(places) > 1}

    def plan(self, sizes: Sequence[int]) -> StagePlan:
        """Plan stages of ``sizes`` units each, or raise a CutImpossibleError."""
        for stage, stop in enumerate(accumulate(sizes[:-1])):
            if stop - 1 in self.forbidden:
                raise CutImpossibleError(stage, self.forbidden[stop - 1])
        return plan_stages(self.recording, self._units, sizes, self._names)

    def stages(self, model: nn.Module, plan: StagePlan, sizes: Sequence[int], own: Sequence[int]) -> list[StageModule]:
        """Return the stages numbered ``own``; they share the tensors of ``model``."""
        bounds = [*pairwise(accumulate(sizes, initial=0))]
        return [StageModule(model, plan, k, self.units[slice(*bounds[k])], self._layout, own) for k in own]

    def sizes_of(self, blocks: Sequence[int]) -> list[int]:
        """Convert each stage's number of blocks to its number of units."""
        borders = [0, *accumulate(blocks)]
        of_block = [self.blocks.index(number) for number in range(len(self.block_names))] + [len(self.units)]
        return [of_block[stop] - of_block[start] for start, stop in pairwise(borders)]


def _forwards_around(call: Call) -> Iterator[Call | None]:
    """Yield the calls around ``call``, innermost first; None is the model."""
    inside: Call | None = call
    while inside is not None:
        inside = inside.parent
        yield inside


def copied_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model``, or raise a PartitionError."""
    memo = {id(t): t.detach().clone() for t in _unregistered(model) if not t.is_leaf}
    twin = copied(model, memo)
    for module in twin.modules():
        if isinstance(module, torch.jit.ScriptModule):  # of which torch copies parameters with their graph
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach(), parameter.requires_grad))
    return twin


def _unregistered(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))

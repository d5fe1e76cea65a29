"""All stages of a model, called one after the other as in training, on two real micro-batches of different sizes.

Every rank runs the whole model, on copies. So each finds by itself which tensors cross the cuts, and the same mistakes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.batch import Batch, Tensors, as_classes, detached, layout_of, tensors_of
from adl_dist.errors import AdlError, ConfigError
from adl_dist.memory import shared_memory, storage_of
from adl_dist.partition.containers import map_tensors, tensors_in
from adl_dist.partition.stage_plan import CutImpossibleError, ModePlan
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import arguments_of, is_part, refuse_unknown_ids, takes_gradient, unpacked
from adl_dist.stage.heads import check_outs
from adl_dist.stage.loss import check_broadcast, check_is_mean, class_loss, is_known_mean, loss_terms, try_loss
from adl_dist.stage.traits import LossTraits, StageTraits, joined
from adl_dist.stage.versions import Exchange
from adl_dist.streams import Streams, seed_streams
from adl_dist.training.trial.comparison import EVALUATION, EVALUATION_AGAIN, FIRST, SECOND, STATE, Take
from adl_dist.training.trial.findings import Agreed, units_of
from adl_dist.training.trial.samples import MicroBatch, Samples
from adl_dist.transport.spec import Specs, TensorSpec, merge_specs

META = torch.device("meta")


@dataclass
class Seen:
    """Observations of one stage in one mode, one entry for each micro-batch."""

    acts: list[tuple[int, Tensors]] = field(default_factory=list)  # with the number of samples; without elements
    needs_grad: list[list[bool]] = field(default_factory=list)
    gets_grad: list[list[bool]] = field(default_factory=list)
    lies_in_stage: list[list[bool]] = field(default_factory=list)  # of each tensor that it returns

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the acts: sizes that differ are open, unless they are those of the batch."""
        num_samples = [size for size, _ in self.acts]
        found = []
        for tensors in zip(*(acts for _, acts in self.acts), strict=True):
            batched = all(t.ndim and len(t) == size for t, size in zip(tensors, num_samples, strict=True))
            found.append([TensorSpec.of(tensor, batched=batched) for tensor in tensors])
        return merge_specs([*zip(*found, strict=True)])


def crossing_acts(mode: ModePlan, edge: int) -> Seen:
    """Return what crosses after stage ``edge``, as it was recorded."""
    recorded, seen = mode.recorded, Seen()
    labels = [slot[0] for slot in mode.crossing[edge]]
    tail = [len(labels)] if mode.decides else []
    tail += [sum(map(len, recorded.inputs[0]))] if mode.sizes[edge] is None else []
    for run, inputs in enumerate(recorded.inputs):
        made = [
            torch.empty(recorded.shapes[label][run], dtype=recorded.tensors[label][0], device=META) for label in labels
        ]
        numbers = [torch.empty(size, dtype=torch.int64, device=META) for size in tail]
        seen.acts.append((inputs[0][0], (*made, *numbers)))
        seen.needs_grad.append([recorded.tensors[label][1] for label in labels] + [False] * len(tail))
    return seen


@dataclass
class _Passage:
    """A micro-batch between its forward and its backward."""

    acts: list[Tensors] = field(default_factory=list)  # of each stage, leaves of its graph
    ends: list[Tensors] = field(default_factory=list)  # of each stage, where its graph ends
    output: Any = None
    loss: Tensor | None = None


class StageRun:
    """Copies of all stages of a model, or of the model itself, and of the loss; all that they change is thrown away.

    Attributes:
        modules: for each stage the modules that compute, under the model's names.
    """

    def __init__(self, stages: Sequence[Any], spec: TrainSpec, device: torch.device, name: str = "") -> None:
        """Take the ``stages``, which are on ``device``, or on meta; errors call them ``name`` if they are one model."""
        self.stages, self._spec, self._device, self.last = stages, spec, device, len(stages) - 1
        self.modules: list[nn.Module] = [
            vars(stage).get("model", stage) if is_part(stage) else stage for stage in stages
        ]
        self._places = [name or f"stage {k} ({units_of(stage)})" for k, stage in enumerate(stages)]
        loss_fn = spec.loss_fn
        self._loss_fn = copy.deepcopy(loss_fn) if hasattr(loss_fn, "state_dict") else loss_fn
        if isinstance(self._loss_fn, nn.Module):
            self._loss_fn.to(device)
        self._within = spec.precision.autocasting(device)
        self._draws_common = any(is_part(stage) and stage.draws[0] for stage in stages)
        self.is_lazy = any(p.is_meta for p in stages[0].parameters())
        self._seen = [[Seen() for _ in stages] for _ in Specs._fields]
        self._traits = [StageTraits() for _ in stages]
        self._targets: list[tuple[int, Tensors]] = []
        self._num_classes: int | None = None
        self._num_outputs: int | None = None
        is_mean = spec.loss_reduction == "batch" or is_known_mean(spec.loss_fn)  # as declared, or torch's own
        self._checks_mean = spec.pipeline.micro_batches_per_update > 1 and not is_mean
        self._outputs: list[tuple[Any, Batch]] = []  # of both micro-batches in training, with targets, if asked for
        self._learns = self._is_loss_tried = False
        self._of_loss = LossTraits()
        self._returned: dict[int, list[Tensor]] = {}
        self._trained = [
            {name: p for name, p in stage.named_parameters() if p.requires_grad and takes_gradient(p)}
            for stage in stages
        ]

    def run(
        self,
        samples: Samples,
        take: Take = lambda when, what, values: None,
        *,
        between: frozenset[str] = frozenset(),
        delayed: bool = False,
        backward: bool = True,
    ) -> None:
        """Train on both micro-batches and evaluate them; ``take`` gets the results.

        Args:
            samples: the two micro-batches.
            take: is called with (when, what, values by name).
            between: names of the parameters that change between the two; all others change before the evaluation.
            delayed: whether the second forward comes before the first backward, with the older weights put back in for
                that, as in training with delayed gradients.
            backward: whether there are gradients.

        Raises:
            ConfigError: If a stage or the loss fails.
            CutImpossibleError: If the stages cannot agree on what crosses a cut.
        """
        first, second = samples.pair
        exchanges = [
            Exchange([p for name, p in trained.items() if name in between], [module] if between else [])
            for trained, module in zip(self._trained, self.modules, strict=True)
        ]
        older: list[list[nn.Parameter]] = [[] for _ in self.stages]
        one = self.forward(first, FIRST)
        _give_results(take, FIRST, one)
        if not delayed and backward:
            take(FIRST, "gradient", self._backward(one, FIRST))
        if delayed and between:
            older = [exchange.moved_on() for exchange in exchanges]
        for exchange in exchanges:
            change_values(exchange.parameters)
        two = self.forward(second, SECOND)
        _give_results(take, SECOND, two)
        if delayed and backward:
            is_swapped = between and self._spec.pipeline.method.weights != "latest"
            swapped = [
                partial_swap(exchange, old if is_swapped else [])
                for exchange, old in zip(exchanges, older, strict=True)
            ]
            names = [[name for name in trained if name in between] for trained in self._trained]
            gather = [dict(zip(some, old, strict=False)) for some, old in zip(names, older, strict=True)]
            take(FIRST, "gradient", self._backward(one, FIRST, gather, swapped))
        del one
        if backward:
            take(SECOND, "gradient", self._backward(two, SECOND))
        del two
        for trained in self._trained:
            change_values([p for name, p in trained.items() if name not in between])
        _give_results(take, EVALUATION, self.forward(first, EVALUATION, training=False))
        _give_results(take, EVALUATION_AGAIN, self.forward(second, EVALUATION_AGAIN, training=False))
        take(STATE, "buffer", {n: b.detach() for stage in reversed(self.stages) for n, b in stage.named_buffers()})

    def forward(self, batch: MicroBatch, when: str, *, training: bool = True) -> _Passage:
        """Forward one micro-batch through all stages; there is a graph in training."""
        passage, size = _Passage(), len(batch.input_)
        seed = stream_seed(self._spec.seed, when)
        seed_streams(seed, self._device)
        seeds: tuple[Any, Any] = (
            dict.fromkeys(("torch", "python", "numpy"), seed),
            {name: stream_seed(self._spec.seed, f"own {name} {when}") for name in ("torch", "python", "numpy")},
        )
        tensors: Tensors = tensors_of(batch.input_)
        if self.is_lazy:
            tensors = tuple(t.to(META) if takes_gradient(t) else t for t in tensors)
        needs = [False] * len(tensors)
        for k, stage in enumerate(self.stages):
            stage.train(training)
            seen = self._seen[0 if training else 1][k]
            seen.acts.append((size, tuple(torch.empty_like(t, device=META) for t in tensors)))
            seen.needs_grad.append(needs)
            leaves = tuple(_as_sent(t).requires_grad_(need) for t, need in zip(tensors, needs, strict=True))
            gets = f"{self._places[k]} gets {', '.join(_shown(t) for t in leaves)}"
            if self._draws_common:
                vars(stage)["seeds"] = seeds
            streams = Streams(self._device)
            with torch.set_grad_enabled(training):
                # The samples are used again, and a model may write to its input.
                out = self._call(k, tuple(t.clone() for t in leaves) if k == 0 else leaves, batch, gets)
            if self._draws_common and vars(stage)["own_streams"] is not None:
                seeds = seeds[0], vars(stage)["own_streams"]
            outs, earlier = unpacked(out), self._returned.setdefault(k, [])
            seen.lies_in_stage.append(_lie_in(outs, self.modules[k], earlier))
            earlier += [out.detach() for out in outs]
            passage.acts.append(leaves)
            if k == self.last:
                _check_output(out, size, gets)
                passage.output = out
                with torch.set_grad_enabled(training):
                    passage.loss = self._loss(k, out, batch.target)
                self._learns = self._learns or passage.loss.requires_grad
                passage.ends.append((passage.loss,))
            else:
                tensors, needs = outs, [t.requires_grad for t in outs]
                passage.ends.append(outs)
            self._note_draws(k, streams)
        return passage

    def _note_draws(self, k: int, before: Streams) -> None:
        moved = frozenset(before.moved() - {"torch"})
        self._traits[k] = replace(self._traits[k], draws=self._traits[k].draws | moved)

    def _call(self, k: int, acts: Tensors, batch: MicroBatch, gets: str) -> Any:
        stage, layout = self.stages[k], layout_of(batch.input_)
        args, kwargs = arguments_of(acts, None if is_part(stage) else layout)
        try:
            with self._within(), _OnMeta() if self.is_lazy else nullcontext():
                return stage(*args, **kwargs)
        except (torch.OutOfMemoryError, AdlError):
            raise
        except (Exception, SystemExit) as error:  # the user's own forward can raise anything
            if isinstance(error, IndexError) and not is_part(stage):
                refuse_unknown_ids(stage, acts, layout, f"stage {k}")
            raise failed(gets, error, training=stage.training) from error

    def _loss(self, k: int, out: Any, target: Batch) -> Tensor:
        if self.is_lazy:
            generator = torch.Generator(self._device).manual_seed(0)
            out = tree_map(lambda leaf: _MadeUp.apply(leaf, generator) if isinstance(leaf, Tensor) else leaf, out)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outs:
            raise ConfigError(
                f"the model returns a {type(out).__name__} without a tensor that can be seen; expected a tensor, or "
                "tuples, lists and dictionaries of tensors"
            )
        self._targets.append((len(target), tensors_of(target)))
        got = f"{', '.join(map(_shown, outs))} and {', '.join(map(_shown, tensors_of(target)))}"
        self._num_classes = outs[0].shape[1] if outs[0].ndim == 2 else None
        classes = class_loss(self._loss_fn)
        dim = 1 if classes is None else classes.dim
        self._num_outputs = outs[0].shape[dim] if outs[0].ndim > 1 else None
        target = target.to(outs[0].device)
        is_whole = isinstance(target, Tensor) and not target.is_floating_point()
        if is_whole and classes is not None and self._num_outputs is not None:
            # One out of range ends a GPU's process; the loader names the micro-batch.
            known = target.clamp(0, self._num_outputs - 1).to(target.dtype)  # type: ignore[union-attr]
            target = torch.where(as_classes(target) == classes.ignore_index, target, known)  # type: ignore[arg-type]
        if torch.is_grad_enabled() and self._checks_mean and len(self._outputs) < 2:
            self._outputs.append((tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, detached(out)), target))
        given, versions = target.clone(), [_version_of(leaf) for leaf in outs]  # the samples are used again
        state = self._state_of_loss()
        with self._within():
            loss = try_loss(k, got, out, given, self._loss_fn)
            now = self._state_of_loss()
            moves = {name for name, value in now.items() if name not in state or not torch.equal(value, state[name])}
            self._of_loss = replace(
                self._of_loss,
                writes_output=self._of_loss.writes_output or versions != [_version_of(leaf) for leaf in outs],
                moves=sorted({*self._of_loss.moves, *moves}),
            )
            if len(target) > 1 and not self._is_loss_tried:
                check_broadcast(k, self._loss_fn, out, target)
                self._is_loss_tried = True
        return loss

    def _state_of_loss(self) -> dict[str, Tensor]:
        state = self._loss_fn.state_dict() if hasattr(self._loss_fn, "state_dict") else {}
        return {
            name: torch.as_tensor(v).clone() for name, v in state.items() if isinstance(v, Tensor | bool | int | float)
        }

    def _backward(
        self,
        passage: _Passage,
        when: str,
        gather: Sequence[Mapping[str, nn.Parameter]] = (),
        swapped: Sequence[Callable[[], AbstractContextManager[None]]] = (),
    ) -> dict[str, Tensor | None]:
        """Backward stage by stage, from the last to the first; return the gradients, each summed over the stages.

        ``gather``: of each stage, the tensors that hold the gradients of the parameters of their names.
        """
        assert passage.loss is not None
        seed_streams(stream_seed(self._spec.seed, f"backward of {when}"), self._device)
        gradients: dict[str, Tensor | None] = {name: None for trained in self._trained for name in trained}
        grads: list[Tensor | None] = [torch.ones_like(passage.loss) if passage.loss.requires_grad else None]
        for k in reversed(range(len(self.stages))):
            arrived, streams = zip(passage.ends[k], grads, strict=True), Streams(self._device)
            if pairs := [(end, grad) for end, grad in arrived if end.requires_grad and grad is not None]:
                try:
                    with swapped[k]() if swapped else nullcontext():
                        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
                except (torch.OutOfMemoryError, AdlError):
                    raise
                except Exception as error:  # a hook or a function of the user's own can raise anything
                    text = f"{self._places[k]} fails in its backward: {type(error).__name__}: {error}"
                    raise ConfigError(text) from error
            self._note_draws(k, streams)
            grads = [leaf.grad for leaf in passage.acts[k]]
            self._note_gradients(k, [grad is not None for grad in grads])
            for name, parameter in self._trained[k].items():
                holder = gather[k].get(name, parameter) if gather else parameter
                if holder.grad is not None:
                    before = gradients[name]  # of another stage that holds it
                    gradients[name] = holder.grad if before is None else before + holder.grad
                holder.grad = parameter.grad = None
        return gradients

    def _note_gradients(self, k: int, gets: list[bool]) -> None:
        """Note which of the stage's acts got a gradient, which must be the same each time."""
        before = self._seen[0][k].gets_grad
        before.append(gets)
        if gets != before[0] and k > 0:
            raise CutImpossibleError(
                k - 1, f"{self._places[k]} gives what it gets a gradient for some micro-batches only"
            )

    def agreed(self, samples: Samples) -> Agreed:
        """Return what has been seen.

        Raises:
            ConfigError: If the method cannot train the model's output or the loss.
        """
        method, of_loss = self._spec.pipeline.method, replace(self._of_loss, target=layout_of(samples.one[1]))
        acts, traits = {}, {}
        for k, (seen, in_evaluation) in enumerate(zip(*self._seen, strict=True)):
            gets_grad = seen.gets_grad[-1] if seen.gets_grad else None
            acts[k] = Specs(seen.specs(), in_evaluation.specs()).getting_gradients(gets_grad)
            traits[k] = replace(
                self._traits[k],
                lies_in_stage=(_any(seen.lies_in_stage), _any(in_evaluation.lies_in_stage)),
                needs_grad=seen.needs_grad[-1],
                gets_grad=gets_grad,
                layout=layout_of(samples.one[0]) if not is_part(self.stages[k]) else None,
                loss=of_loss,
            )
        if method.spec.has_heads:
            for k in range(self.last):
                sent = acts[k + 1].training
                gets_gradient = all(act.takes_gradient and act.is_floating_point for act in sent)
                check_outs(method, k, [act.shape for act in sent], gets_gradient=gets_gradient)
        fault = None
        if self._outputs:
            outs, targets = map(list, zip(*self._outputs, strict=True))
            if samples.varies:  # two micro-batches cannot be put together, but one can be divided
                half = len(targets[1]) // 2
                outs = [tree_map(partial(_rows, rows=rows), outs[1]) for rows in (slice(half), slice(half, None))]
                targets = [targets[1][:half], targets[1][half:]]
            try:
                with self._within():
                    check_is_mean(self.last, self._loss_fn, outs, targets, loss_terms(self._loss_fn, samples.one[1]))
            except ConfigError as error:  # evaluation may do with such a loss, and training come after it
                fault = str(error)
        of_target = Seen(self._targets).specs()
        return Agreed(acts, of_target, joined(traits), self._num_classes, self._num_outputs, self._learns, fault)


def _rows(leaf: Any, rows: slice) -> Any:
    return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim else leaf


class _OnMeta(TorchFunctionMode):
    """Puts real tensors on meta where a model on meta computes with them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            args, kwargs = map_tensors(lambda t: t if t.is_meta else t.to(META), (args, kwargs))
        return func(*args, **kwargs)


class _MadeUp(torch.autograd.Function):
    """Values in the place of a tensor on meta, whose gradient is on meta again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, generator: torch.Generator) -> Tensor:
        ctx.like = torch.empty_like(tensor, device=META)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
        return made.normal_(generator=generator) if tensor.is_floating_point() else made.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.like), None


def change_values(parameters: Sequence[nn.Parameter]) -> None:
    """Change the weights in place, unevenly and by a quarter at most, so that what still uses the old ones shows."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for p in parameters:
            if p.numel() and not p.is_meta:
                half = len(p) // 2 if p.ndim else 0
                if half:
                    p[:half].mul_(0.8)
                (p[half:] if p.ndim else p).mul_(1.25)
                if not p.any():
                    p.add_(0.01)


def partial_swap(exchange: Exchange, older: Sequence[nn.Parameter]) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which a backward meets the ``older`` weights."""
    return lambda: exchange.swapped(older) if older else nullcontext()


def failed(gets: str, error: BaseException, *, training: bool) -> ConfigError:
    """Return the error that a forward has failed, which began as ``gets`` says."""
    text = f"{gets} and fails on it: {type(error).__name__}: {error}"
    if not training and "does not require grad" in str(error):
        text += "; in evaluation no gradients are recorded: a forward that takes some needs torch.enable_grad()"
    return ConfigError(text)


def _give_results(take: Take, when: str, passage: _Passage) -> None:
    leaves = [leaf.detach() for leaf in tree_leaves(passage.output) if isinstance(leaf, Tensor)]
    take(when, "output", {str(place): leaf for place, leaf in enumerate(leaves)})
    assert passage.loss is not None
    take(when, "loss", {"": passage.loss.detach()})


def _as_sent(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as it arrives at the next stage: in its memory format, without a graph."""
    batched = tensor.ndim > 0
    return TensorSpec.of(tensor, batched=batched).fit(tensor.detach(), len(tensor) if batched else 0, str).detach()


def _shown(tensor: Tensor) -> str:
    return str(TensorSpec.of(tensor)) if tensor.ndim else "a number"


def _version_of(tensor: Tensor) -> int:
    """Return how often it was written to, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _lie_in(outs: Sequence[Tensor], module: nn.Module, earlier: Sequence[Tensor]) -> list[bool]:
    """Return for each of ``outs`` whether it lies in memory that ``module`` keeps.

    That is memory of a parameter or buffer, or of a result that it has returned ``earlier`` and that is still there.
    """
    own = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    numbers = shared_memory([*outs, *earlier])
    used = {numbers.get(id(tensor)) for tensor in earlier} - {None}
    return [storage_of(out) in own or numbers.get(id(out)) in used for out in outs]


def _check_output(out: Any, size: int, gets: str) -> None:
    """Raise a ConfigError if ``out`` of the model is not of ``size`` samples."""
    for leaf in tree_leaves(out):  # numbers, like a penalty next to the output, are for the loss to take
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) != size:
            raise ConfigError(
                f"{gets} and returns {list(leaf.shape)} for {size} samples; expected an output of the model whose "
                "first dimension is the batch"
            )


def _any(flags: Sequence[Sequence[bool]]) -> list[bool]:
    if len({*map(len, flags)}) > 1:  # of an output whose number of tensors follows a length
        if any(map(any, flags)):
            raise ConfigError(
                "the model's output has as many tensors as a length, in memory that the model keeps, so that it would "
                "be written over; let it return clones of these"
            )
        return []
    return [any(each) for each in zip(*flags, strict=True)]

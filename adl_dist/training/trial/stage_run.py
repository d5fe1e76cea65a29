"""A run of all stages in turn on two micro-batches, as in training.

Every rank runs the whole model, on copies. So each finds by itself which tensors cross the cuts, and all find the same
errors.
"""

import copy
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from adl_dist.batch import (
    Batch,
    Tensors,
    arguments_of,
    copy_batch,
    describe_names,
    logits_of,
    map_tensors,
    move_batch,
    num_samples,
    rows_of,
    tensors_of,
)
from adl_dist.errors import AdlError, ConfigError, in_one_line
from adl_dist.losses import ModelLoss
from adl_dist.memory import memory_of
from adl_dist.partition.recorder import Recorder
from adl_dist.partition.recording import Recording
from adl_dist.partition.stage_plan import CutImpossibleError, ModePlan
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import ROWS, StageInfo, describe_units, flatten_output, is_part, link_stages, takes_gradient
from adl_dist.stage.heads import check_outs
from adl_dist.stage.loss import check_is_mean, class_loss, is_known_mean, loss_terms, try_loss
from adl_dist.stage.versions import Exchange
from adl_dist.streams import Streams, seed_streams
from adl_dist.training.input import check_targets
from adl_dist.training.trial.samples import MicroBatch, Samples
from adl_dist.transport.spec import Specs, TensorSpec, merge_specs

META = torch.device("meta")
STREAMS = "torch", "python", "numpy"
FIRST, SECOND, EVALUATION = "the first micro-batch", "the second micro-batch", "evaluation"
EVALUATION_AGAIN, STATE = "evaluation of the second micro-batch", "after that"

Leaves = dict[str, nn.Parameter]
Context = Callable[[], AbstractContextManager[None]]


class Results(NamedTuple):
    """Values of one kind at one time; None stands for no gradient."""

    when: str
    what: str  # output, loss, gradient or buffer
    values: Mapping[str, Tensor | None]  # by name


class TrialResult(NamedTuple):
    """Facts about the model and all stages, the same on every rank."""

    acts: dict[int, Specs]  # the tensors that arrive at each stage
    targets: tuple[TensorSpec, ...]  # the tensors that the loss takes besides the output
    infos: dict[int, StageInfo]
    num_classes: int | None  # classes that the model tells apart; None if its output is not [B, classes]
    num_outputs: int | None  # its output's dimension of classes; None if that has none
    learns: bool  # whether a gradient of the loss reaches the model
    loss_fault: str | None = None  # why no group of micro-batches can be trained with the loss
    single_fault: str | None = None  # why the model cannot be trained on a micro-batch of one sample


@dataclass
class Crossing:
    """One stage's incoming tensors of one micro-batch, without elements."""

    size: int  # number of samples
    acts: Tensors
    needs_grad: list[bool]
    keeps_memory: list[bool] = field(default_factory=list)  # of each tensor that the stage returned


def specs_of(seen: Sequence[tuple[int, Tensors]]) -> tuple[TensorSpec, ...]:
    """Merge the specs of tensors over micro-batches; leave varying sizes open."""
    found = []
    for tensors in zip(*(tensors for _, tensors in seen), strict=True):
        batched = all(t.ndim and len(t) == size for t, (size, _) in zip(tensors, seen, strict=True))
        found.append([TensorSpec.of(tensor, batched=batched) for tensor in tensors])
    return merge_specs([*zip(*found, strict=True)])


def recorded_crossings(mode: ModePlan, edge: int) -> list[Crossing]:
    """Return the Crossing after stage ``edge`` in each recorded call."""
    recorded, seen = mode.recorded, []
    labels = [slot[0] for slot in mode.crossing[edge]]
    tail = [len(labels)] if mode.decides else []
    tail += [sum(map(len, recorded.inputs[0]))] if mode.sizes[edge] is None else []
    needs = [recorded.tensors[label][1] for label in labels] + [False] * len(tail)
    for run, inputs in enumerate(recorded.inputs):
        made = [
            torch.empty(recorded.shapes[label][run], dtype=recorded.tensors[label][0], device=META) for label in labels
        ]
        numbers = [torch.empty(size, dtype=torch.int64, device=META) for size in tail]
        seen.append(Crossing(inputs[0][0], (*made, *numbers), needs))
    return seen


@dataclass
class _Passage:
    """A micro-batch between its forward and its backward."""

    acts: list[Tensors] = field(default_factory=list)  # of each stage, leaves of its graph
    ends: list[Tensors] = field(default_factory=list)  # of each stage, where its graph ends
    output: Any = None
    loss: Tensor | None = None


NOT_JOINED = (
    "the outputs of two micro-batches cannot be joined along the batch, so it cannot be seen whether the loss is a "
    "mean over the samples; give the loss num_terms(target), the number of terms that it averages over, or declare "
    "loss.reduction=batch (docs/own.md)"
)


class StageRun:
    """A trial run of copied stages, or of the uncut model.

    The state of the stages is thrown away, like the state of the loss, which is copied here.

    Attributes:
        modules: for each stage the module that computes, under the model's names.
    """

    def __init__(self, stages: Sequence[Any], spec: TrainSpec, device: torch.device, name: str = "") -> None:
        """Take the ``stages``, or one model in a list, which errors call ``name``."""
        self.stages, self._spec, self._device, self.last = stages, spec, device, len(stages) - 1
        self.modules: list[nn.Module] = [
            vars(stage).get("model", stage) if is_part(stage) else stage for stage in stages
        ]
        self._places = [name or f"stage {k} ({describe_units(stage)})" for k, stage in enumerate(stages)]
        loss_fn = spec.loss_fn
        self._loss_fn = copy.deepcopy(loss_fn) if hasattr(loss_fn, "state_dict") else loss_fn
        if isinstance(self._loss_fn, nn.Module):
            self._loss_fn.to(device)
        self._within = spec.precision.autocasting(device)
        self._draws_common = any(is_part(stage) and stage.draws[0] for stage in stages)
        self.is_lazy = any(p.is_meta for p in stages[0].parameters())
        self._seen: list[list[list[Crossing]]] = [[[] for _ in stages] for _ in Specs._fields]
        self._gets_grad: list[list[list[bool]]] = [[] for _ in stages]
        self._draws: list[set[str]] = [set() for _ in stages]
        self._targets: list[tuple[int, Tensors]] = []
        self._outputs: list[tuple[Any, Batch]] = []  # of both micro-batches in training, with targets
        self._learns, self._dataset = False, "training"
        self._trained: list[Leaves] = [
            {name: p for name, p in stage.named_parameters() if p.requires_grad and takes_gradient(p)}
            for stage in stages
        ]

    def run(
        self,
        samples: Samples,
        *,
        between: Collection[str] | None = None,
        delayed: bool = False,
        backward: bool = True,
    ) -> Iterator[Results]:
        """Train on both micro-batches and evaluate them; yield the results.

        Parameters named in ``between``, by default all, change before the second forward, and all before the
        evaluation. If ``delayed``, the first backward comes after the second forward, with the older weights put back
        in for it, as in training with delayed gradients.

        Raises:
            ConfigError: If a stage or the loss fails.
            CutImpossibleError: If a tensor at a cut gets a gradient for some micro-batches only.
        """
        first, second = samples.pair
        self._dataset = "training" if samples.trains else "validation"
        leaves, plain, gradients = self._trained, list[Context]([nullcontext] * len(self.stages)), None
        within, changing = plain, [p for of in self._trained for n, p in of.items() if between is None or n in between]
        one = self.forward(first, FIRST)
        yield from _results(FIRST, one)
        if delayed:
            leaves, within = self._start_versions(changing)
        elif backward:
            gradients = self._backward(one, FIRST, leaves, within)
        change_values(changing)
        two = self.forward(second, SECOND)
        yield from _results(SECOND, two)
        if backward:
            if gradients is None:
                gradients = self._backward(one, FIRST, leaves, within)
            yield Results(FIRST, "gradient", gradients)
            yield Results(SECOND, "gradient", self._backward(two, SECOND, self._trained, plain))
        del one, two
        for trained in self._trained:
            change_values(trained.values())
        yield from _results(EVALUATION, self.forward(first, EVALUATION, training=False))
        yield from _results(EVALUATION_AGAIN, self.forward(second, EVALUATION_AGAIN, training=False))
        yield Results(STATE, "buffer", {n: b.detach() for s in reversed(self.stages) for n, b in s.named_buffers()})

    def _start_versions(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Leaves], list[Context]]:
        """Put copies, as a new version, into ``parameters``.

        Return two lists with an entry per stage: its older version by name, which gets the gradients of graphs built
        before, and the context of their backward.
        """
        leaves, within, chosen = list[Leaves](), list[Context](), {id(p) for p in parameters}
        is_swapped = self._spec.pipeline.method.weights != "latest"
        for trained, module in zip(self._trained, self.modules, strict=True):
            names = [name for name, p in trained.items() if id(p) in chosen]
            exchange = Exchange([trained[name] for name in names], [module])
            older = exchange.start_version()
            leaves.append({**trained, **dict(zip(names, older, strict=True))})
            within.append(partial(exchange.swapped, older) if is_swapped else nullcontext)
        return leaves, within

    def forward(self, batch: MicroBatch, when: str, *, training: bool = True) -> _Passage:
        """Run the forward of one micro-batch through all stages."""
        passage, size = _Passage(), num_samples(batch.input_)
        seed = stream_seed(self._spec.seed, when)
        seed_streams(seed, self._device)
        own = {name: stream_seed(self._spec.seed, f"own {name} {when}") for name in STREAMS}
        seeds: tuple[Any, Any] = dict.fromkeys(STREAMS, seed), own
        tensors: Tensors = tensors_of(batch.input_)
        if self.is_lazy:
            tensors = tuple(t.to(META) if takes_gradient(t) else t for t in tensors)
        needs = [False] * len(tensors)
        for k, stage in enumerate(self.stages):
            stage.train(training)
            seen = Crossing(size, tuple(torch.empty_like(t, device=META) for t in tensors), needs)
            before = Streams(self._device)
            self._seen[0 if training else 1][k].append(seen)
            leaves = tuple(_as_sent(t).requires_grad_(need) for t, need in zip(tensors, needs, strict=True))
            names = describe_names(batch.input_) if k == 0 else ""
            gets = f"{self._places[k]} gets {', '.join(_shown(t) for t in leaves)}{names}"
            if self._draws_common:
                vars(stage).update(seeds=seeds, own_streams=None)
            with torch.set_grad_enabled(training):
                # The samples are used again, and a model may write to its input.
                out = self._call(k, tuple(t.clone() for t in leaves) if k == 0 else leaves, batch, gets)
            if self._draws_common and vars(stage)["own_streams"] is not None:
                seeds = seeds[0], vars(stage)["own_streams"]
            tensors = flatten_output(out)
            needs = [t.requires_grad for t in tensors]
            memory = {memory_of(tensor) for tensor in (*self.modules[k].parameters(), *self.modules[k].buffers())}
            seen.keeps_memory = [memory_of(out) in memory for out in tensors]
            passage.acts.append(leaves)
            passage.ends.append(tensors)
            if k == self.last:
                _check_output(out, size, gets)
                passage.output = out
                with torch.set_grad_enabled(training):
                    passage.loss = self._loss(out, batch.target)
                self._learns = self._learns or passage.loss.requires_grad
                passage.ends[k] = (passage.loss,)
            self._draws[k] |= before.moved() - {"torch"}
        return passage

    def _call(self, k: int, acts: Tensors, batch: MicroBatch, gets: str) -> Any:
        stage = self.stages[k]
        input_ = acts if is_part(stage) else tree_unflatten(acts, tree_structure(batch.input_))
        args, kwargs = arguments_of(input_)
        try:
            with self._within():
                if self.is_lazy:
                    return Recorder(stage, Recording(), training=stage.training).observe(input_)
                return stage(*args, **kwargs)
        except (torch.OutOfMemoryError, AdlError):
            raise
        except (Exception, SystemExit) as error:  # the user's own forward can raise anything
            raise forward_error(gets, error, training=stage.training) from error

    def _loss(self, out: Any, target: Batch) -> Tensor:
        if self.is_lazy:
            generator = torch.Generator(self._device).manual_seed(0)
            out = map_tensors(lambda leaf: _made_up(leaf, generator), out)
        outs = flatten_output(out)
        if not outs:
            raise ConfigError(
                f"the model returns an object of class {type(out).__name__} without a tensor that can be seen; "
                "expected a tensor, or tuples, lists and dictionaries of tensors"
            )
        self._targets.append((num_samples(target), tensors_of(target)))
        got = f"{', '.join(map(_shown, outs))} and {', '.join(map(_shown, tensors_of(target)))}"
        self._outs, reduction = outs, self._spec.loss_reduction
        if (classes := class_loss(self._loss_fn)) is not None:  # one out of range would end a GPU's process
            check_targets(
                target,
                f"{self._dataset} dataset: micro-batch 0 of epoch 1",
                classes=classes,
                num_outputs=self._num_outputs,
                may_ignore=reduction == "batch" or loss_terms(self._loss_fn, target) is not None,
            )
        target = move_batch(target, outs[0].device)
        if torch.is_grad_enabled() and len(self._outputs) < 2:
            self._outputs.append((map_tensors(lambda leaf: leaf.detach().clone(), out), target))
        with self._within():
            return try_loss(self.last, got, out, copy_batch(target), self._loss_fn)  # the samples are used again

    @property
    def _num_outputs(self) -> int | None:
        classes = class_loss(self._loss_fn)
        return self._outs[0].shape[1 if classes is None else classes.dim] if self._outs[0].ndim > 1 else None

    def _backward(
        self, passage: _Passage, when: str, leaves: Sequence[Leaves], within: Sequence[Context]
    ) -> dict[str, Tensor | None]:
        """Run the backward of all stages, last to first; return summed gradients.

        ``when`` names the forward, and seeds the random streams. ``leaves`` are by stage the tensors that get
        gradients, by the names of parameters; ``within`` are by stage the contexts of the backward.
        """
        assert passage.loss is not None
        seed_streams(stream_seed(self._spec.seed, f"backward of {when}"), self._device)
        gradients: dict[str, Tensor | None] = {name: None for trained in self._trained for name in trained}
        grads: list[Tensor | None] = [torch.ones_like(passage.loss) if passage.loss.requires_grad else None]
        for k in reversed(range(len(self.stages))):
            arrived, before = zip(passage.ends[k], grads, strict=True), Streams(self._device)
            if pairs := [(end, grad) for end, grad in arrived if end.requires_grad and grad is not None]:
                try:
                    with within[k]():
                        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
                except (torch.OutOfMemoryError, AdlError):
                    raise
                except Exception as error:  # a hook or a function of the user's own can raise anything
                    text = f"{self._places[k]} fails in its backward: {in_one_line(error)}"
                    raise ConfigError(text) from error
            self._draws[k] |= before.moved() - {"torch"}
            grads = [leaf.grad for leaf in passage.acts[k]]
            self._note_gradients(k, [grad is not None for grad in grads])
            for name, leaf in leaves[k].items():
                if leaf.grad is not None:
                    earlier = gradients[name]  # of a later stage that holds it, too
                    gradients[name] = leaf.grad if earlier is None else earlier + leaf.grad
                leaf.grad = self._trained[k][name].grad = None
        return gradients

    def _note_gradients(self, k: int, gets: list[bool]) -> None:
        """Record which inputs get a gradient; CutImpossibleError if it changes."""
        before = self._gets_grad[k]
        before.append(gets)
        if gets != before[0] and k > 0:
            raise CutImpossibleError(
                k - 1, f"{self._places[k]} gives what it gets a gradient for some micro-batches only"
            )

    def result(self, samples: Samples) -> TrialResult:
        """Return the facts observed in all runs.

        Raises:
            ConfigError: If the method cannot train the model's output.
            CutImpossibleError: If the number of tensors at a cut differs between micro-batches.
        """
        method, acts, infos = self._spec.pipeline.method, {}, {}
        for k, modes in enumerate(zip(*self._seen, strict=True)):
            gets_grad = self._gets_grad[k][-1] if self._gets_grad[k] else None
            if any(len({len(one.acts) for one in seen}) > 1 for seen in modes):
                raise CutImpossibleError(k - 1, "the number of tensors that cross it differs between micro-batches")
            specs = Specs(*(specs_of([(one.size, one.acts) for one in seen]) for seen in modes))
            kept = [[any(of) for of in zip_longest(*(one.keeps_memory for one in seen))] for seen in modes]
            acts[k] = specs.getting_gradients(gets_grad)
            infos[k] = StageInfo(
                keeps_memory=(kept[0], kept[1]),
                needs_grad=modes[0][-1].needs_grad,
                gets_grad=gets_grad,
                draws=frozenset(self._draws[k]),
                inputs=None if is_part(self.stages[k]) else tree_structure(samples.one[0]),
                target=None if isinstance(samples.one[1], Tensor) else tree_structure(samples.one[1]),
            )
        if method.spec.has_heads:
            for k in range(self.last):
                sent = acts[k + 1].training
                gets_gradient = all(act.takes_gradient and act.is_floating_point for act in sent)
                check_outs(method, k, [act.shape for act in sent], gets_gradient=gets_gradient)
        out, targets = self._outs[0], specs_of(self._targets)
        num_classes = out.shape[1] if out.ndim == 2 else None
        fault = self._loss_fault(samples)
        return TrialResult(acts, targets, link_stages(infos), num_classes, self._num_outputs, self._learns, fault)

    def _loss_fault(self, samples: Samples) -> str | None:
        """Return why the loss is not a mean, or None."""
        spec = self._spec
        is_mean = spec.loss_reduction == "batch" or is_known_mean(spec.loss_fn)  # as declared, or torch's own
        if is_mean or spec.pipeline.micro_batches_per_update == 1 or len(self._outputs) < 2:
            return None
        (one, first), (two, second), loss_fn, more = *self._outputs, self._loss_fn, dict[str, Any]()
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        is_small = any(p.is_floating_point() and p.element_size() < 4 for p in parameters)
        # A GPU may compute with TF32.
        more["is_rounded"] = spec.precision.autocast is not None or is_small or self._device.type == "cuda"
        if isinstance(loss_fn, ModelLoss):  # which needs a forward of both together
            (one, first), (two, second), loss_fn = *samples.pair, self._loss_in_evaluation
            more["give"] = (
                "use adl_dist.losses.ModelLoss(num_terms=f) with a function f(target), of target[:, 1:] if the model "
                "shifts its labels"
            )
        try:
            with self._within():
                terms = loss_terms(self._loss_fn, samples.one[1])
                sizes = [[leaf.shape[1:] for leaf in flatten_output(out)] for out in (one, two)]
                is_joined = _has_batch_first(one, first) and _has_batch_first(two, second)
                if not is_joined or (sizes[0] != sizes[1] and not samples.varies):
                    return None if terms is not None else NOT_JOINED
                pairs = [([one, two], [first, second])]
                if samples.varies:  # two micro-batches of different lengths cannot be joined, but one can be divided
                    pairs = [_divided(two, second, n) for n in (1, 2, 3)]  # in any way, as lengths may alternate
                for outs, targets in pairs:
                    check_is_mean(self.last, loss_fn, outs, targets, terms, **more)
        except ConfigError as error:  # evaluation may do with such a loss, and training come after it
            return str(error)
        return None

    def _loss_in_evaluation(self, input_: Batch, target: Batch) -> Tensor:
        """Return the loss of a forward in evaluation mode.

        There no layer mixes samples, as BatchNorm does in training.
        """
        loss = self.forward(MicroBatch(input_, target), "a mean", training=False).loss
        assert loss is not None
        return loss


def _divided(out: Any, target: Batch, n: int) -> tuple[list[Any], list[Batch]]:
    """Split outputs and targets of four samples: 0 and ``n``, then the others."""
    halves = [0, n], [m for m in (1, 2, 3) if m != n]
    return [map_tensors(partial(_rows, rows=half), out) for half in halves], [rows_of(target, half) for half in halves]


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _has_batch_first(out: Any, target: Batch) -> bool:
    """Return whether dimension 0 of each non-scalar in ``out`` is the batch."""
    return all(len(leaf) == num_samples(target) for leaf in flatten_output(out) if leaf.ndim)


def _made_up(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random values in the place of a meta tensor."""
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=generator.device)
    made = made.normal_(generator=generator) if tensor.is_floating_point() else made
    return made.requires_grad_(tensor.requires_grad).clone()  # no leaf, as the loss may not write to one


def change_values(parameters: Iterable[nn.Parameter]) -> None:
    """Change weights unevenly in place, to expose any use of the old ones."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for p in parameters:
            if p.numel() and not p.is_meta:
                rows = p if p.ndim else p[None]
                rows[: len(rows) // 2].mul_(0.8)
                rows[len(rows) // 2 :].mul_(1.25)
                if not p.any():
                    p.add_(0.01)


def forward_error(gets: str, error: BaseException, *, training: bool) -> ConfigError:
    """Return the error of a failed forward; it begins with ``gets``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [one for frame in frames if isinstance(one := frame.f_locals.get("self"), nn.Module)]
    where = f" in {type(modules[-1]).__name__}({modules[-1].extra_repr()})" if modules else ""
    text = f"{gets} and fails on it{where}: {in_one_line(error)}"
    if isinstance(error, IndexError):
        text += ROWS
    if not training and "does not require grad" in text:
        text += "; in evaluation no gradients are recorded: a forward that takes some needs torch.enable_grad()"
    return ConfigError(text)


def exhaust(results: Iterable[Results]) -> None:
    """Carry out a run, and ignore its results."""
    deque(results, maxlen=0)


def _results(when: str, passage: _Passage) -> Iterator[Results]:
    outs = [leaf.detach() for leaf in flatten_output(passage.output)]
    yield Results(when, "output", {str(place): out for place, out in enumerate(outs)})
    assert passage.loss is not None
    yield Results(when, "loss", {"": passage.loss.detach()})


def _as_sent(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as it arrives at the next stage."""
    batched = tensor.ndim > 0
    return TensorSpec.of(tensor, batched=batched).fit(tensor.detach(), len(tensor) if batched else 0, str).detach()


def _shown(tensor: Tensor) -> str:
    return str(TensorSpec.of(tensor)) if tensor.ndim else "a number"


def _check_output(out: Any, size: int, gets: str) -> None:
    """Raise ConfigError unless ``out``'s first tensor has ``size`` samples."""
    first = logits_of(out)  # not numbers, like a penalty next to it, or what further outputs a model has
    if first is not None and len(first) != size:
        raise ConfigError(
            f"{gets} and returns {list(first.shape)} for {size} samples; expected an output of the model whose "
            "first dimension is the batch"
        )

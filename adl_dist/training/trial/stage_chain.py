"""The trial at the start: all stages, one after the other, on two real micro-batches of different sizes.

Every rank runs the whole model, so nothing has to be agreed on: each finds by itself what travels over every edge, what
has to be known of every stage, and the same mistakes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.batch import Batch, Several, Tensors, as_classes, call, layout_of, tensors_of
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.memory import memory_of
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.piece import as_argument
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import packed, refuse_unknown_ids, unpacked
from adl_dist.stage.heads import check_outs
from adl_dist.stage.loss_check import check_is_mean, halves, num_made_up, put_together
from adl_dist.stage.loss_terms import class_loss, is_known_mean, loss_terms
from adl_dist.stage.traits import LossTraits, StageTraits, Takes, joined
from adl_dist.stage.versions import Exchange
from adl_dist.streams import Streams, seed_streams
from adl_dist.training.trial.cut_values import check_output, crossing, lie_in, share_memory
from adl_dist.training.trial.findings import Agreed, CutImpossible, Seen
from adl_dist.training.trial.homes import Around, Homes
from adl_dist.training.trial.loss_checks import check_broadcast, check_not_shared, is_called_again, try_loss
from adl_dist.training.trial.outcome import EVALUATION, FIRST, SECOND, THIRD, Outcome, Replacement, change_values
from adl_dist.training.trial.samples import NUM_SAMPLES, MicroBatch, Samples
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.varying import merged


@dataclass
class _Passage:
    """A micro-batch between its forward and its backward."""

    acts: list[Tensors] = field(default_factory=list)  # of each stage, leaves of its graph
    ends: list[Tensors] = field(default_factory=list)  # of each stage, where its graph ends
    output: Any = None
    loss: Tensor | None = None


class StageChain:
    """All stages of a model, called one after the other as in training."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        spec: TrainSpec,
        device: torch.device,
        *,
        name: str = "",
        on_turn: Callable[[str], None] = lambda when: None,
        around: Around = lambda k: nullcontext(),
    ) -> None:
        """Take the ``stages``, which are on ``device``.

        ``name``: what they are called in errors; empty: each by its index and units. ``on_turn`` is called
        with what begins, like ``FIRST``. The forward of stage k, and the loss, run in ``around(k)``.
        """
        self.stages, self.last = stages, len(stages) - 1
        self.homes = Homes(stages, name)
        self._places = self.homes.places
        self._on_turn, self._around = on_turn, around
        self._loss_fn, self._within = spec.loss_fn, spec.precision.autocasting(device)
        self._device, self._seed = device, spec.seed
        self._seen = [[Seen() for _ in stages] for _ in Specs._fields]
        self._traits = [StageTraits() for _ in stages]
        self._targets: list[tuple[TensorSpec, ...]] = []
        self._varies = False  # whether lengths of the samples do
        self._num_classes: int | None = None
        self._num_outputs: int | None = None
        self._outputs: list[tuple[Any, Batch]] = []  # of both micro-batches in training, with their targets, for M > 1
        self._accumulates = spec.pipeline.micro_batches_per_update > 1
        self._learns = self._is_loss_tried = False
        self._of_loss = LossTraits()
        self._looks = False
        self._returned: dict[int, list[Tensor]] = {}  # by each stage while it is looked at
        self._is_training: bool | None = None  # which mode the stages are in; None: unknown

    def run(
        self,
        samples: Samples,
        change: Replacement | None = None,
        *,
        backward: bool = True,
        look: Sequence[ModuleState] = (),
        into: Outcome | None = None,
    ) -> Outcome:
        """Forward and backward of both micro-batches, and evaluation of the first; what they move stays moved.

        Only what ``change`` has replaced is put back, and only its gradients are part of the outcome. Without
        ``backward`` there are none. ``look``: the states of the stages, as they are; without them nothing is found out
        for :meth:`agreed`. ``into``: the outcome to add to; None: a new one.

        Raises:
            ConfigError: a stage does not take what it gets, or the loss fails on what the model returns.
            CutImpossible: what a stage returns cannot cross a cut.
            PartitionError: a stage computes with a parameter of another one.
        """
        change, outcome = change or Replacement(), Outcome() if into is None else into
        older: list[nn.Parameter] = []
        first, second = samples.pair
        self._varies, self._looks = samples.varies, bool(look)
        replaced = {name: p for name, p in change.parameters.items() if name in change.between}
        exchange = Exchange([*replaced.values()], self.stages if replaced else ())
        in_place = [p for n, p in change.parameters.items() if change.changed is None or n in change.changed]
        gather: dict[str, nn.Parameter] = {}
        try:
            self._turn_to(FIRST)
            passage = self.forward(first, look=look)
            if replaced:  # with more than one micro-batch in flight, as in training
                older = exchange.moved_on()
                change_values(exchange.parameters)
                gather = dict(zip(replaced, older, strict=True))
                self._turn_to(SECOND)
                behind = self.forward(second)
            if backward:
                within = change.swapped_in(exchange, older)
                self._backward(passage, FIRST, change.parameters, outcome, gather, within)
                for p in exchange.parameters:  # what went to the new weights was not meant for them
                    p.grad = None
            _keep(outcome, FIRST, passage)
            if not replaced:
                change_values(in_place)
                self._turn_to(SECOND)
                behind = self.forward(second)
            del passage
            if change.third and change.delayed:
                self._forward_third(first, outcome)
            if backward:
                self._backward(behind, SECOND, change.parameters, outcome)
            _keep(outcome, SECOND, behind)
            del behind
            if change.third and not change.delayed:
                self._forward_third(first, outcome)
            self._turn_to(EVALUATION)
            _keep(outcome, EVALUATION, self.forward(first, training=False))
        finally:
            if older:
                exchange.swap(older)
        return outcome

    def _turn_to(self, when: str) -> None:
        """Begin the forward of a micro-batch: what is drawn does not depend on what came before."""
        self._seed_for(when)
        self._on_turn(when)

    def _seed_for(self, purpose: str) -> None:
        seed_streams(stream_seed(self._seed, purpose), self._device)

    def _forward_third(self, batch: MicroBatch, outcome: Outcome) -> None:
        self._turn_to(THIRD)
        _keep(outcome, THIRD, self.forward(batch))

    def forward(
        self, batch: MicroBatch, *, training: bool = True, graph: bool = True, look: Sequence[ModuleState] = ()
    ) -> _Passage:
        """Forward one micro-batch through all stages; ``look``: their states, to note also what each of them moves.

        ``graph``: whether to keep the graph in training, in evaluation there is none.
        """
        passage, size, graph = _Passage(), len(batch.input_), graph and training
        if training != self._is_training:
            self._is_training = training
            for stage in self.stages:
                stage.train(training)
        tensors: Tensors = tensors_of(batch.input_)
        needs, shared = ([False] * len(tensors) for _ in range(2))
        given = as_argument(self.stages[0], batch.input_)
        structure: Takes | None = given.layout if isinstance(given, Several) else None
        for k in range(len(self.stages)):
            seen = self._seen[0 if training else 1][k]
            specs = tuple(map(TensorSpec.of, tensors))
            gets = f"{self._places[k]} gets {', '.join(map(str, specs))}"
            leaves = tuple(
                spec.fit(t, size, lambda: gets).detach().requires_grad_(need)  # noqa: B023
                for spec, t, need in zip(specs, tensors, needs, strict=True)
            )
            with torch.set_grad_enabled(graph):
                # Clones: autograd would refuse an operation in place on a leaf, and those are to be found.
                acts = tuple(leaf.clone() for leaf in leaves)
                argument = packed(acts) if structure is None else structure.build(acts)
                versions = [act._version for act in acts]
                with self._looking(k, look[k]) if look else nullcontext():
                    out = self._call(k, argument, gets)
            overwrites = [act._version != version for act, version in zip(acts, versions, strict=True)]
            if any(a and b for a, b in zip(overwrites, shared, strict=True)):
                reason = f"{gets} and writes in place to one that shares its memory with another"
                text = f"{reason}, which would not see it; cut elsewhere, or replace the operation by one that does"
                raise CutImpossible(f"{text} not work in place", stage=k - 1, reason=reason)
            seen.specs.append(specs)
            seen.takes.append(structure)
            seen.overwrites.append(overwrites)
            seen.needs_grad.append(needs)
            if self._looks:
                outs, earlier = unpacked(out), self._returned.setdefault(k, [])
                seen.lies_in_stage.append(lie_in(outs, self.stages[k], earlier))
                earlier += [out.detach() for out in outs]
            passage.acts.append(leaves)
            if k == self.last:
                check_output(out, size, gets)
                passage.output = out
                looking = self._looking_at_loss(look[k]) if look else nullcontext()
                with torch.set_grad_enabled(graph), self._around(k), looking:
                    passage.loss = self._loss(k, out, batch.target)
                self._learns = self._learns or passage.loss.requires_grad
                passage.ends.append((passage.loss,))
            else:
                behind = self._seen[0 if training else 1][k + 1]
                tensors, structure = crossing(k, out, size, gets, behind, varies=self._varies)
                passage.ends.append(tensors)
                shared = share_memory(tensors, acts, shared)
                needs = [t.requires_grad for t in tensors]
        return passage

    def agreed(self, samples: Samples, spec: TrainSpec) -> Agreed:
        """Return what has been seen of the ``samples``, after a look at evaluation with the other size if need be."""
        training, evaluation = self._seen
        pairs = zip(training[1:], evaluation[1:], strict=True)
        sizes = samples.varies or any((a.specs[0], a.takes[0]) != (b.specs[0], b.takes[0]) for a, b in pairs)
        # Once more, for what it returns in the same memory; and with another size, unless training has told what the
        # batch dimension is.
        self.forward(samples.pair[1 if sizes else 0], training=False)
        self._looks = False
        self._returned.clear()
        acts, traits = {}, {}
        of_loss = replace(self._of_loss, varies=samples.varies, target=layout_of(samples.one[1]))
        if is_called_again(spec.pipeline) and not is_known_mean(self._loss_fn):
            of_loss = replace(of_loss, writes_target=True)  # it may, with other targets
        for k, (seen, in_evaluation) in enumerate(zip(training, evaluation, strict=True)):
            gets_grad = seen.gets_grad[-1] if seen.gets_grad else None
            modes = seen.specs, in_evaluation.specs
            of_modes = map(merged, modes) if samples.varies else (specs[-1] for specs in modes)
            acts[k] = Specs(*of_modes).getting_gradients(gets_grad)
            traits[k] = replace(
                self._traits[k],
                overwrites=(_any(seen.overwrites), _any(in_evaluation.overwrites)),
                takes=(seen.takes[-1], in_evaluation.takes[-1]),
                lies_in_stage=(_any(seen.lies_in_stage), _any(in_evaluation.lies_in_stage)),
                needs_grad=seen.needs_grad[-1],
                gets_grad=gets_grad,
                loss=of_loss,
            )
        for k in range(self.last):
            traits[k] = replace(traits[k], returns=traits[k + 1].takes)  # type: ignore[arg-type]  # no input's
        traits = joined(traits)
        of_target = merged(self._targets) if samples.varies else self._targets[-1]
        method = spec.pipeline.method
        if method.spec.has_heads:
            for k in range(self.last):
                sent = acts[k + 1].training
                gets_gradient = all(act.takes_gradient and act.is_floating_point for act in sent)
                check_outs(method, k, [act.shape for act in sent], gets_gradient=gets_gradient)
        outs, targets = zip(*self._outputs, strict=True) if self._outputs else ((), ())
        if samples.varies and outs:  # two micro-batches cannot be put together, but one can be divided
            outs, targets = halves(outs[-1]), halves(targets[-1])
        fault = None
        try:
            check_not_shared(spec.pipeline, self._of_loss)
            if self._accumulates:
                terms = loss_terms(self._loss_fn, samples.one[1])
                check_is_mean(self._loss_fn, outs, targets, terms)
        except ConfigError as error:  # evaluation may do with such a loss, and training come after it
            fault = str(error)
        output = put_together(outs) if outs and num_made_up(outs[0]) > NUM_SAMPLES else None
        return Agreed(acts, of_target, traits, self._num_classes, self._num_outputs, self._learns, fault, output)

    @contextmanager
    def _looking(self, k: int, state: ModuleState) -> Iterator[None]:
        """Note what the stage's forward moves of its ``state``, and draws from."""
        streams, stage = Streams(), self.stages[k]
        memory = {name: memory_of(p) for name, p in stage.named_parameters()}
        yield
        persistent, names = {*stage.state_dict(keep_vars=True)}, {*state.changed_names()}
        moves = tuple(sorted(names - persistent))
        trained = {name for name, p in stage.named_parameters() if p.requires_grad}
        moves_more = bool(names - trained - {*dict(stage.named_buffers())})
        draws, writes = frozenset(streams.moved() - {"torch"}), tuple(sorted(names & trained))
        replaces = tuple(name for name, p in stage.named_parameters() if memory_of(p) != memory.get(name))
        found = replace(self._traits[k], draws=draws, moves=moves, writes=writes, replaces=replaces)
        self._traits[k] = replace(found, moves_more=moves_more)

    @contextmanager
    def _looking_at_loss(self, like: ModuleState) -> Iterator[None]:
        """Note what the loss keeps and changes, and draws from; ``like``: the state of the last stage at the start."""
        streams, state = Streams(), ModuleState.of(alike=like, functions={"loss_fn": self._loss_fn})
        yield
        moves = tuple(state.changed_names())
        self._of_loss = replace(self._of_loss, moves=moves)
        known, draws = self._traits[self.last], streams.moved() - {"torch"}
        moves_more = known.moves_more or bool(moves)
        self._traits[self.last] = replace(known, draws=known.draws | draws, moves_more=moves_more)

    @contextmanager
    def _looking_at_draws(self, k: int) -> Iterator[None]:
        """Note what the stage's backward draws from."""
        if not self._looks:
            yield
            return
        streams = Streams(self._device)
        yield
        known = self._traits[k]
        self._traits[k] = replace(known, draws=known.draws | (streams.moved() - {"torch"}))

    def _call(self, k: int, argument: Any, gets: str) -> Any:
        try:
            with self._within(), self._around(k):
                return call(self.stages[k], argument)
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:  # the user's own forward can raise anything
            if isinstance(error, IndexError):
                refuse_unknown_ids(self.stages[k], argument, f"stage {k}")
            text = f"{gets} and fails on it: {type(error).__name__}: {error}"
            if not self._is_training and "does not require grad" in str(error):
                text += "; in evaluation no gradients are recorded: a forward that takes some needs torch.enable_grad()"
            raise ConfigError(text) from error

    def _loss(self, k: int, out: Any, target: Batch) -> Tensor:
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outs:
            raise ConfigError(
                f"the model returns a {type(out).__name__} without a tensor that can be seen; expected a tensor, or "
                "tuples, lists and dictionaries of tensors"
            )
        specs = [TensorSpec.of(leaf) if leaf.ndim else "a number" for leaf in outs]
        self._targets.append(tuple(map(TensorSpec.of, tensors_of(target))))
        got = ", ".join(map(str, specs)) + " and " + ", ".join(map(str, self._targets[-1]))
        self._num_classes = outs[0].shape[1] if outs[0].ndim == 2 else None
        classes = class_loss(self._loss_fn)
        dim = 1 if classes is None else classes.dim
        self._num_outputs = outs[0].shape[dim] if outs[0].ndim > 1 else None
        target = target.to(outs[0].device)
        if (
            isinstance(target, Tensor)
            and classes is not None
            and self._num_outputs is not None
            and not target.is_floating_point()
        ):
            # One out of range ends a GPU's process; the loader names the micro-batch.
            known = target.clamp(0, self._num_outputs - 1).to(target.dtype)  # of bool it would be int64
            target = torch.where(as_classes(target) == classes.ignore_index, target, known)
        if torch.is_grad_enabled() and self._accumulates and len(self._outputs) < 2:
            held = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, out)
            self._outputs.append((held, target))
        given, versions = target.clone(), [_version_of(leaf) for leaf in outs]  # the samples are used again
        with self._within():
            loss = try_loss(k, got, out, given, self._loss_fn)
            self._of_loss = replace(
                self._of_loss,
                writes_output=self._of_loss.writes_output or versions != [_version_of(leaf) for leaf in outs],
                writes_target=self._of_loss.writes_target or given._version > 0,
            )
            if isinstance(target, Tensor) and len(target) > 1 and not self._is_loss_tried:
                check_broadcast(k, self._loss_fn, out, target)
                self._is_loss_tried = True
        return loss

    def _backward(
        self,
        passage: _Passage,
        when: str,
        parameters: Mapping[str, nn.Parameter],
        outcome: Outcome,
        older: Mapping[str, nn.Parameter] = MappingProxyType({}),
        within: Callable[[int], AbstractContextManager[None]] = lambda k: nullcontext(),
    ) -> None:
        """Backward stage by stage, from the last to the first; a gradient that is None stays so.

        ``older``: those that gather the gradients of the ``parameters`` of their names.
        """
        assert passage.loss is not None
        self._seed_for(f"backward of {when}")
        gradients: dict[str, Tensor | None] = dict.fromkeys(parameters)
        grads: list[Tensor | None] = [torch.ones_like(passage.loss) if passage.loss.requires_grad else None]
        for k in reversed(range(len(self.stages))):
            arrived = zip(passage.ends[k], grads, strict=True)
            if pairs := [(end, grad) for end, grad in arrived if end.requires_grad and grad is not None]:
                try:
                    with within(k), self._looking_at_draws(k):
                        torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a hook or a function of the user's own can raise anything
                    text = f"{self._places[k]} fails in its backward: {type(error).__name__}: {error}"
                    raise ConfigError(text) from error
            grads = [leaf.grad for leaf in passage.acts[k]]
            self._note_gradients(k, [grad is not None for grad in grads])
            for name in parameters:
                holder = older.get(name, parameters[name])
                if holder.grad is not None:
                    self.homes.check(name, parameters[name], k)
                    tied = gradients[name]  # by a stage that holds it, too
                    gradients[name] = holder.grad if tied is None else tied + holder.grad
                    holder.grad = None
        outcome.add(when, "gradient", gradients)

    def _note_gradients(self, k: int, gets: list[bool]) -> None:
        """Note which of the stage's acts got a gradient, which must be the same each time."""
        before = self._seen[0][k].gets_grad
        before.append(gets)
        if gets != before[0] and k > 0:
            reason = f"{self._places[k]} gives what it gets a gradient for some micro-batches only"
            raise CutImpossible(f"{reason}; cut elsewhere (partition.balance)", stage=k - 1, reason=reason)


def _version_of(tensor: Tensor) -> int:
    """Return how often it was written to, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _keep(outcome: Outcome, when: str, passage: _Passage) -> None:
    leaves = [leaf.detach() for leaf in tree_leaves(passage.output) if isinstance(leaf, Tensor)]
    outcome.add(when, "output", {str(place): leaf for place, leaf in enumerate(leaves)})
    assert passage.loss is not None
    outcome.add(when, "loss", {"": passage.loss.detach()})


def _any(flags: Sequence[Sequence[bool]]) -> list[bool]:
    if len({*map(len, flags)}) > 1:  # of an output whose number of tensors follows a length
        if any(map(any, flags)):
            raise PartitionError(
                "the model's output has as many tensors as a length, in memory that the model keeps, so that it would "
                "be written over; let it return clones of these"
            )
        return []
    return [any(each) for each in zip(*flags, strict=True)]

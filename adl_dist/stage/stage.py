"""One stage of the model, and its state from forward to backward."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from operator import gt
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adl_dist.batch import Batch, Tensors, logits_of, map_tensors, move_batch
from adl_dist.errors import ConfigError, DataError, PartitionError, in_one_line, place_of
from adl_dist.stage.average import WeightAverage
from adl_dist.stage.calls import (
    ROWS,
    Compiler,
    StageInfo,
    call_of,
    flatten_output,
    is_part,
    takes_gradient,
)
from adl_dist.stage.deferred import DeferredGrad, DeferredGradients
from adl_dist.stage.heads import GradientHead
from adl_dist.stage.loss import StageLoss
from adl_dist.stage.metrics import measured, metrics_of
from adl_dist.stage.mitigation import mitigation_of
from adl_dist.stage.model_norm import ModelNorm
from adl_dist.stage.nonfinite import NonFiniteCheck, keep_buffers_finite
from adl_dist.stage.optimizer import Learner
from adl_dist.stage.random_streams import BACKWARD, BACKWARD_WEIGHT, RandomStreams
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stats import StepStats, norm_of, norms_of
from adl_dist.stage.tied import TiedWeights
from adl_dist.stage.versions import check_versions
from adl_dist.stage.weights import NEWEST, Latest, Stash, weight_policy

CPU = torch.device("cpu")
UNKNOWN = StageInfo()
GradEdges = tuple[GradientEdge | None, ...]  # one for each tensor that takes a gradient; None: nothing here computed it


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward."""

    acts: Tensors  # what came in; their .grad is sent upstream
    target: Batch | None  # where there is a loss
    version: int  # updates that had led to the weights of the forward
    grad_edges: GradEdges | None = None  # where the graph begins to go backward; None: to be recomputed
    output_and_loss: tuple[Tensor | None, Tensor] | None = None  # the model's output if this is its end, and the loss
    buffers: dict[str, Tensor] | None = None  # those that the forward met, for its replay
    tape: Any = None  # the calls of the forward, for its replay; None where the model itself runs again
    # Where the loss counts its terms: its weight in the group, and how many terms it has.
    loss_weight: float | None = None
    measured: Sequence[Tensor] = ()  # (sum, count) of each metric
    num_terms: float | None = None


class Stage(Learner):
    """Forward, delayed backward and update of one part of the model.

    It knows no rank, peer or schedule.

    Attributes:
        index: k in [0, K).
        module: the part of the model, on its device.
        head: turns the output into a local loss, or predicts its gradient; None if there is no head.
        gradient_head: the head that predicts gradients, with its optimizer; None if there is none.
        loss: the loss of the model, or a local one; None if this stage computes none.
        metrics: the metrics of its output besides the loss; only the last stage has any.
        epoch_metrics: the metrics of all outputs of an evaluation together.
        in_flight: micro-batches forwarded and not yet back-propagated, oldest first.
        tally: the figures of the group or evaluation so far; the owner takes them and puts in a fresh object.
        faults: the check of loss and gradient of each update; the last ones are checked at the end of a segment.
        ties: its copies of weights that other stages also hold, by the number of the tie.
        model_norm: its part in the norm of the whole model's gradient, if it clips by that norm; otherwise None.
    """

    def __init__(  # 9: the module, facts about it, and where and how it is trained
        self,
        module: nn.Module,
        index: int,
        spec: TrainSpec,
        *,
        device: torch.device = CPU,
        head: nn.Module | None = None,
        info: StageInfo = UNKNOWN,
        tied: Mapping[int, Mapping[str, nn.Parameter]] = MappingProxyType({}),
        compiler: Compiler | None = None,
    ) -> None:
        """Take over ``module``, which is on ``device``, as stage ``index``.

        Args:
            module: called with the tensors of one micro-batch; returns the tensors for the next stage, in a tuple, or
                the output of the model.
            index: k.
            spec: how the whole model is trained.
            device: where the module is.
            head: (tensors for the next stage, target, loss_fn) to a loss of the stage's own, or, where the method
                predicts gradients, the network of a :class:`GradientHead`.
            info: facts about the stage from the trial.
            tied: the parameters of each of its ties, by their first names in the uncut model.
            compiler: compiles the module; None if it runs as it is.

        Raises:
            ConfigError: If the method's weights cannot be kept for the module, or the optimizer cannot train it.
        """
        factor = spec.pipeline.lr_factor(index)
        super().__init__(spec, device, where=f"stage {index}", key=str(index), lr_factor=factor)
        self.index, self.is_last = index, index == spec.pipeline.num_stages - 1
        self.module, self.head = module, head
        self.in_flight: dict[int, InFlight] = {}
        self.tally = StepStats()
        self.gradient_head: GradientHead | None = None
        self._info, self._within = info, spec.precision.autocasting(device)
        self._forward_version: int | None = None  # None: the newest
        self._first_version = 0  # of the segment
        self._epoch = 0
        self._random = RandomStreams(spec.seed, index, info.draws)
        self._init_training(spec, tied)
        self.loss: StageLoss | None = None
        if self.is_last or self._trained is not module:
            self.loss = StageLoss(spec, info.target, None if self.is_last else head, device)
        metrics = metrics_of(spec.metrics, self.loss.classes) if self.is_last and self.loss is not None else []
        self.metrics = [metric for metric in metrics if metric.compute is None]
        self.epoch_metrics = [metric for metric in metrics if metric.compute is not None]
        self._init_call(spec, compiler)
        self._set_mode(training=True)

    def _init_training(self, spec: TrainSpec, tied: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """Make the optimizer, and everything between gradients and weights."""
        pipeline, method, gradients, index = spec.pipeline, spec.pipeline.method, spec.gradients, self.index
        assert method.weights is not None
        # All stages alike, or one upstream would name an update that it got from one that looks later.
        self.faults = NonFiniteCheck(gradients, stage=index, is_last=self.is_last, reads_late=method.splits)
        self._skips = gradients.skips
        self._gradient_norm: Tensor | None = None  # of the group that is complete
        self.model_norm: ModelNorm | None = None
        self._gradient_shrink, self._learns_locally = method.gradient_shrink, method.spec.local_losses
        self._trained = self.module
        if self.head is not None and method.spec.predicts_gradients:
            self.gradient_head = GradientHead(self.head, index, spec, self._device, self.faults)
        elif self.head is not None:
            # Trained together: the part of the model and the head that serves only to train it.
            self._trained = nn.ModuleList([self.module, self.head])
        self.ties = {
            tie.number: TiedWeights(tie, tied[tie.number], index, spec, self.faults) for tie in pipeline.ties_of(index)
        }
        self._is_tied = {id(p) for tie in self.ties.values() for _, p in tie.named_parameters()}
        self.make_optimizer(spec.optimizer)
        self.mitigation = mitigation_of(pipeline, index, self.optimizer, self._lr_factor) if self.optimizer else None
        named = self.module.named_parameters(remove_duplicate=False)
        averaged = ((name, p) for name, p in named if id(p) not in self._is_tied)
        if spec.ema is not None and self.optimizer is not None:
            self.average = WeightAverage(averaged, spec.ema)
        # A stage that is alone sends no gradient, and may train other parameters later on.
        trained = self._trained.named_parameters() if pipeline.num_stages > 1 else ()
        self._takes_gradient = {name: p.requires_grad for name, p in trained}
        self._policy: Latest | Stash | None = None
        if self.optimizer or self.ties:
            ahead = self._weights_ahead if pipeline.forwards_ahead(index) else None
            self._policy = weight_policy(method.weights, self._trained, self.optimizer, self.mitigation, ahead)
            is_delayed = method.weights == "2bw" or (pipeline.delays[index] and not method.spec.flush)
            if is_delayed and method.weights in ("stash", "2bw"):
                check_versions(self._trained, self.where)

    def _init_call(self, spec: TrainSpec, compiler: Compiler | None) -> None:
        """Build the call of the module, compiled or split if asked for."""
        module = self.module
        self._part = cast(Any, module) if is_part(module) else None
        self._draws_common = self._part is not None and bool(self._part.draws[0])
        if self._part is not None and compiler is not None:
            self._part.compile_units(compiler)
        self._call_module = call_of(module, self._info.inputs, None if self._part is not None else compiler)
        self._deferred_grads: dict[int, tuple[int, list[DeferredGrad]]] = {}  # by micro-batch, with the version
        if spec.pipeline.splits_backward(self.index):
            self._deferred = DeferredGradients(module, self.where)
            self._call_module = self._deferred.while_ready(self._call_module)
        self._watch_buffers = keep_buffers_finite if self._skips else nullcontext

    @property
    def has_loss(self) -> bool:
        """``True`` if this stage computes a loss."""
        return self.loss is not None

    @property
    def head_prefix(self) -> str:
        """The prefix of names of the head's tensors."""
        return f"head{self.index}:"

    @property
    def learners(self) -> tuple[Learner, ...]:
        """The stage, its tied weights, and its head if that has an optimizer."""
        return (self, *self.ties.values()) if self.gradient_head is None else (self, self.gradient_head)

    @property
    def averages(self) -> list[WeightAverage]:
        """The moving averages of all that the stage trains, tied weights included."""
        return [one for one in (self.average, *(tie.average for tie in self.ties.values())) if one is not None]

    @property
    def averages_to_save(self) -> list[WeightAverage]:
        """The averages to save here; those of tied weights are the first stage's."""
        others = [tie.average for tie in self.ties.values() if not tie.is_first]
        return [one for one in self.averages if one not in others]

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) by the uncut model's names.

        Tied weights and the parameters of a head with its own optimizer are left out.
        """
        of_module = self.module.named_parameters(remove_duplicate=remove_duplicate)
        yield from ((name, p) for name, p in of_module if id(p) not in self._is_tied) if self.ties else of_module
        if self.head is not None and self.gradient_head is None:
            named = self.head.named_parameters(remove_duplicate=remove_duplicate)
            yield from ((f"{self.head_prefix}{name}", p) for name, p in named)

    def begin(self, epoch: int, *, training: bool, first_micro_batch: int = 0) -> None:
        """Prepare for a segment from ``first_micro_batch`` of ``epoch`` on."""
        self._epoch = epoch
        self._random.begin(epoch, first_micro_batch=first_micro_batch)
        self._first_version, self._forward_version = self.version, None
        self.tally = StepStats()
        self.faults.forget()
        self.take_changes()
        self._set_mode(training=training)
        # Gradients that an interrupted segment, or the user, has left there belong to no group.
        self.in_flight.clear()
        self._deferred_grads.clear()
        if self._policy is not None:
            self._policy.forget()
        if self.mitigation is not None:
            self.mitigation.begin(epoch)
        if self.gradient_head is not None:
            self.gradient_head.begin(epoch)
        for tie in self.ties.values():
            tie.begin(epoch, self.version)
        if training:
            self._check_trains_the_same()
            self._trained.zero_grad()

    def take_changes(self) -> None:
        """Take over the changes that the user has made to the model."""
        if self._part is not None:
            self._part.take_changes()

    def end(self) -> None:
        """Put state that the segment has replaced into the user's model.

        Changes by callbacks are taken first.
        """
        if self._part is not None:
            self._part.take_changes()
            self._part.give_state()

    def _check_trains_the_same(self) -> None:
        """Raise ConfigError if ``requires_grad`` of a parameter was changed."""
        named = self._trained.named_parameters()
        if unlike := [name for name, p in named if p.requires_grad != self._takes_gradient.get(name, p.requires_grad)]:
            raise ConfigError(
                f"{self.where}: requires_grad of '{unlike[0]}' was changed during the run, but what stages train, keep "
                "and send was settled at its start; change it between two calls of fit"
            )

    def rounding_seed(self, micro_batch: int) -> int:
        """Return the seed that rounds the gradients sent for one micro-batch."""
        return self._random.seed_of("codec", micro_batch)

    def wait_for_device(self) -> None:
        """Wait for the work launched on the current stream of a GPU."""
        if self._device.type == "cuda":  # also that of a stage without parameters
            torch.cuda.current_stream(self._device).synchronize()

    def use_weights(self, num_updates: int) -> None:
        """Forward from here on with the weights after ``num_updates`` updates.

        The updates are counted in the segment.
        """
        self._forward_version = self._first_version + num_updates

    def forward(
        self,
        micro_batch: int,
        acts: Tensors,
        *wanted: Tensor | None,
        keep_graph: bool = True,
    ) -> Tensors:
        """Forward one micro-batch; return the detached tensors for the next stage.

        The last stage returns (). ``acts`` [B, ...] come from upstream or the data. ``wanted`` has the target [B, ...]
        or its tensors, followed by the counts of :func:`~adl_dist.stage.loss.counted` if the loss counts its terms;
        None without a loss. The graph is kept for :meth:`backward`; without ``keep_graph`` only the inputs are kept,
        for :meth:`recompute`.
        """
        target, weight, num_terms = (None, None, None) if self.loss is None else self.loss.wanted(wanted)
        leaves = self._leaves_of(acts) if self.index > 0 else acts
        if target is not None:
            target = move_batch(target, self._device)
        version = self.version if self._forward_version is None else self._forward_version
        kept = self.in_flight[micro_batch] = InFlight(leaves, target, version, loss_weight=weight, num_terms=num_terms)
        given = leaves
        if not keep_graph:  # the module may overwrite its inputs and its buffers, which the replay needs
            given = tuple(leaf.clone() for leaf in leaves)
            kept.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        if self._part is not None:
            self._part.keep_tape = not keep_graph
        self._seed_forward(micro_batch)
        with torch.set_grad_enabled(keep_graph), self._weights_of(kept.version, forward=True):
            with self._watch_buffers(self.module):
                out = self._call(given)
            outs = flatten_output(out)
            out = self._as_given_to_loss(out, outs)
            last = outs if self.loss is None else (self.loss(out, kept.target, kept.num_terms),)
        if self.loss is not None:
            if self.metrics:
                kept.measured = measured(self.metrics, map_tensors(Tensor.detach, out), kept.target)
            kept.output_and_loss = logits_of(self._lasting(outs)) if self.is_last else None, last[0]
        if keep_graph:
            kept.grad_edges = self._grad_edges_of(last, micro_batch)
        elif self._part is not None:
            kept.tape, self._part.tape = getattr(self._part, "tape", None), None
        return () if self.is_last else self._lasting(tuple([out.detach() for out in outs]))

    def _lasting(self, outs: Tensors) -> Tensors:
        """Return ``outs``, copied where they may be overwritten."""
        if not any(self._keeps_memory):
            return outs
        return tuple(out.clone() if mine else out for out, mine in zip(outs, self._keeps_memory, strict=True))

    def _leaves_of(self, acts: Tensors) -> Tensors:
        """Return tensors from upstream as leaves of this stage's graph."""
        is_sent = not self._learns_locally
        needs = self._info.needs_grad if self._info.needs_grad is not None else map(takes_gradient, acts)
        return tuple([a.detach().requires_grad_(is_sent and need) for a, need in zip(acts, needs, strict=True)])

    def recompute(self, micro_batch: int) -> None:
        """Replay a forward with the present weights, and keep the graph.

        Dropout draws the same numbers again, and the module sees the buffers that the forward saw. Changes that the
        replay makes to buffers are dropped, because BatchNorm's running statistics have moved in the forward. A stage
        of a cut model runs only its own calls again, without the user's Python between them.
        """
        kept = self.in_flight[micro_batch]
        self._seed_forward(micro_batch)
        out = self._call(kept.acts, kept.buffers, kept.tape)
        kept.tape, last = None, flatten_output(out)
        if self.loss is not None:
            last = (self.loss(self._as_given_to_loss(out, last), kept.target, kept.num_terms),)
        kept.grad_edges = self._grad_edges_of(last, micro_batch)

    def backward(self, micro_batch: int, grads: Tensors) -> Tensors:
        """Back-propagate one micro-batch, adding to the gradients of the group.

        Without a loss, ``grads`` are the gradients of the tensors sent downstream that take one. With a loss, ``grads``
        has one entry, the weight of this micro-batch's loss in its group; it is not read if the forward got the weight.
        Return the gradients of the acts that take one, for upstream; () on stage 0 and where stages learn locally.

        Raises:
            PartitionError: If an act has no gradient but should have one, or has one but should not.
        """
        kept = self.in_flight.pop(micro_batch)
        assert kept.grad_edges is not None, "the schedule recomputes before it goes backward"
        if kept.loss_weight is not None and kept.output_and_loss is not None:
            grads = (torch.full_like(kept.output_and_loss[1], kept.loss_weight),)
        if self._gradient_shrink != 1.0 and self.loss is None:
            grads = tuple(grad * self._gradient_shrink for grad in grads)
        if paired := [(end, grad) for end, grad in zip(kept.grad_edges, grads, strict=True) if end is not None]:
            ends, grads = zip(*paired, strict=True)
            self._random.seed(micro_batch, self._device, BACKWARD)
            with self._weights_of(kept.version):  # a backward may compute with them again, as checkpointing does
                torch.autograd.backward(ends, grads)
        self.tally.staleness.append(self.version - kept.version)
        for tie in self.ties.values():
            tie.count(self.version, kept.version)
        if self.loss is not None and kept.output_and_loss is not None:
            assert kept.target is not None
            out, loss = kept.output_and_loss
            self.tally.score(out, kept.target, loss, kept.num_terms, self.loss.classes)
            if kept.measured:
                self.tally.measured.append(kept.measured)
        if self.index == 0 or self._learns_locally:
            return ()
        leaving = self._gradients_of(kept, micro_batch)
        self.faults.sent(leaving)
        return leaving

    def backward_input(self, micro_batch: int, grads: Tensors, *, completes: bool) -> Tensors:
        """Run the first part of a backward, see :meth:`backward`.

        Most gradients of weights are left for :meth:`backward_weight`. If this ``completes`` a group, the group before
        is checked. If updates may be skipped as well, both parts run now, because the gradients sent depend on the
        check of this group.
        """
        if completes and self._skips:
            for earlier in list(self._deferred_grads):
                self.backward_weight(earlier, completes=False)
            with self._deferred.ready():
                leaving = self.backward(micro_batch, grads)
            return self.finish_group(grads, leaving)
        kept = self.in_flight[micro_batch]
        with self._deferred.deferrable([end.node for end in kept.grad_edges or () if end is not None]) as later:
            leaving = self.backward(micro_batch, grads)
        self._deferred_grads[micro_batch] = kept.version, later
        if completes:
            self.faults.check()
        return leaving

    def backward_weight(self, micro_batch: int, *, completes: bool) -> None:
        """Run the second part of a backward, unless it has run already.

        If it ``completes`` a group, see :meth:`finish_group`.
        """
        if micro_batch not in self._deferred_grads:
            return
        version, later = self._deferred_grads.pop(micro_batch)
        self._random.seed(micro_batch, self._device, BACKWARD_WEIGHT)
        with self._weights_of(version):
            self._deferred.compute(later)
        if completes:
            self.finish_group((), ())

    def finish_group(self, arrived: Tensors, leaving: Tensors) -> Tensors:
        """Check a complete group before its last gradients go upstream.

        No stage upstream can complete the group before these arrive. The last backward took ``arrived`` and returned
        ``leaving``; return the gradients to send instead.

        Raises:
            DivergedError: If the loss or the gradient of the group is not finite; weights are left as they are. On a
                GPU, and with a split backward, the error is about the group before, which has been applied.
        """
        parameters = self._policy.gather() if self._policy else []
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = norms_of(gradients) if gradients else None
        self._gradient_norm = self.tally.gradient_norm = None if norms is None else torch.linalg.vector_norm(norms)
        if self.model_norm is not None:
            self.model_norm.begin(parameters, () if norms is None else norms)
        if self.ties:  # whose parts are looked at here, and clipped as a whole
            gradients += [grad for tie in self.ties.values() for grad in tie.gather(self.version)]
            self.tally.gradient_norm = norm_of(gradients)
        if self.gradient_head is not None:
            self.tally.predictions, self.gradient_head.predictions = self.gradient_head.predictions, []
        self.tally.skipped = self.faults.judge(self.tally, arrived, update=self.version, epoch=self._epoch)
        if self.tally.skipped is None:
            return leaving
        for tie in self.ties.values():
            tie.skip(self.version)
        return tuple(torch.full_like(grad, math.nan) for grad in leaving)

    def update(self) -> None:
        """Apply the gradients of the group; advance version and learning rate.

        A group that is skipped leaves weights and optimizer as they are; versions and learning rates advance.
        """
        skip, norm = self.tally.skipped is not None, self._gradient_norm
        if self.model_norm is not None:
            norm = self.tally.model_norm = self.model_norm.whole()
        rates = [float(one.optimizer.param_groups[0]["lr"]) * one.rate_factor for one in self.learners if one.optimizer]
        self.tally.learning_rate = next(iter(rates), None)  # all weights of a stage may be tied
        if self._policy is not None:
            in_flight = {kept.version for kept in self.in_flight.values() if kept.grad_edges is not None}
            parameters = self._policy.next_version(self.version, in_flight)
            self.apply(parameters, norm, in_place=self._policy.in_place(), skipped=skip)
        else:
            self.apply([], norm, skipped=skip)
        self._note_tied()

    def update_tied(self, tie: int) -> None:
        """Apply the oldest gradient sum of a tie, right after an update."""
        assert self._policy is not None
        self.ties[tie].update(self._policy.in_place(), self.model_norm.whole() if self.model_norm else None)
        self._note_tied()

    def _weights_ahead(self, version: int) -> dict[nn.Parameter, Tensor]:
        """Return the predicted weights of forwards in ``version``, tied or not."""
        ahead = {} if self.mitigation is None else self.mitigation.forward_weights(version)
        for tie in self.ties.values():
            if tie.mitigation is not None:
                ahead |= tie.mitigation.forward_weights(tie.version)
        return ahead

    def _note_tied(self) -> None:
        if not self.ties:
            return
        # With 2BW forwards to come see the version before the newest.
        oldest = min([self.version - 1, *(kept.version for kept in self.in_flight.values())])
        for tie in self.ties.values():
            tie.note(self.version, oldest=oldest)

    @torch.no_grad()
    def predict(self, micro_batch: int, acts: Tensors, *wanted: Tensor | None) -> Tensors:
        """Forward one micro-batch for evaluation, without a graph.

        Return the tensors for the next stage. The last stage returns () and adds loss and metrics to its tally.
        ``wanted`` is that of :meth:`forward`.
        """
        self._seed_forward(micro_batch)
        out = self._call(acts)
        outs = flatten_output(out)
        if not self.is_last:
            return self._lasting(outs)
        assert self.loss is not None
        target, _, num_terms = self.loss.wanted(wanted)
        assert target is not None
        target = move_batch(target, outs[0].device)
        if self.metrics:
            self.tally.measured.append(measured(self.metrics, out, target))
        if self.epoch_metrics:
            both = map_tensors(lambda tensor: tensor.detach().to(CPU, copy=True), (out, target))
            self.tally.outputs.append(both)
        self.tally.score(logits_of(outs), target, self.loss(out, target, num_terms), num_terms, self.loss.classes)
        return ()

    def _set_mode(self, *, training: bool) -> None:
        self._trained.train(training)
        self._keeps_memory = self._info.keeps_memory[0 if training else 1]

    def _seed_forward(self, micro_batch: int) -> None:
        self._random.seed(micro_batch, self._device)
        if self._draws_common and self._part is not None:
            self._part.seeds = self._random.seeds_of(micro_batch)

    def _weights_of(self, version: int, *, forward: bool = False) -> AbstractContextManager[None]:
        """Put weight ``version`` into the module in the block, if it is kept."""
        policy = self._policy
        if policy is None or (version == self.version and not policy.forwards_ahead):
            return NEWEST
        return policy.forward_weights(version) if forward else policy.weights_of(version)

    def _call(self, acts: Tensors, buffers: dict[str, Tensor] | None = None, tape: Any = None) -> Any:
        try:
            with self._within():
                return self._call_module(acts, buffers, tape)
        except IndexError as error:  # most often of an embedding
            said = f"{self.where}: {in_one_line(error)}{place_of(error)}"
            ids = [int(end) for a in acts if a.dtype in (torch.int32, torch.int64) and a.numel() for end in a.aminmax()]
            said += ROWS
            said += f" Those of this micro-batch are {min(ids)} to {max(ids)}" if ids else ""
            raise DataError(said) from error

    def _as_given_to_loss(self, out: Any, outs: Tensors) -> Any:
        """Return the output as the loss takes it: one tensor without its tuple."""
        return out if self.is_last or len(outs) != 1 else outs[0]

    def _grad_edges_of(self, outs: Tensors, micro_batch: int) -> GradEdges:
        """Return the graph edges at which the backward of ``outs`` starts."""
        ends: Iterable[Tensor] = outs
        if self.loss is None:
            needs, gets = self._info.out_needs_grad, self._info.out_gets_grad
            takes = [out.requires_grad for out in outs]
            if needs is not None and (len(takes) != len(needs) or any(map(gt, takes, needs))):
                raise self._unlike_trial("leave it", takes, needs, micro_batch)
            ends = filter(takes_gradient, outs) if gets is None else compress(outs, gets)
        return tuple([get_gradient_edge(out) if out.requires_grad else None for out in ends])

    def _gradients_of(self, kept: InFlight, micro_batch: int) -> Tensors:
        """Return the gradients of those acts that got one in the trial."""
        acts, gets = kept.acts, self._info.gets_grad
        if gets is None:
            gets = [act.requires_grad for act in acts]
        if kept.num_terms == 0:  # there was nothing to differentiate
            return tuple([torch.zeros_like(act) for act in compress(acts, gets)])
        grads = [act.grad for act in acts]
        if (got := [grad is not None for grad in grads]) != [*gets]:
            raise self._unlike_trial("reach it", got, gets, micro_batch)
        return tuple([grad for grad in grads if grad is not None])

    def _unlike_trial(self, how: str, found: Sequence[bool], was: Sequence[bool], micro_batch: int) -> PartitionError:
        return PartitionError(
            f"stage {self.index}: of the tensors that {how} in micro-batch {micro_batch}, {[*found]} take a gradient, "
            f"but {[*was]} did in the trial at the start; what crosses a cut must be used alike in every micro-batch: "
            "cut elsewhere"
        )

"""The edges between stages: their list and their ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from adl_dist.codecs import Codecs
from adl_dist.distributed.world import World, common_edges
from adl_dist.engine import StageContext
from adl_dist.schedule import Pipeline, max_pending_of
from adl_dist.schedule.actions import TIED, Message, Op, Tie, tied_message
from adl_dist.stage import Stage
from adl_dist.stage.calls import describe_units
from adl_dist.stage.tied import TiedWeights
from adl_dist.transport.process import POSTED_AHEAD, SIZES, ProcessReceiver, ProcessSender
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.wire import LocalChannel, SpecsByMicroBatch, Wire

COUNTS = TensorSpec((2,), "float64")  # travels with the target, where the loss counts its terms
GO = Specs.always([TensorSpec((), "uint8")])  # only its arrival counts


def edges_of(pipeline: Pipeline) -> list[tuple[str, int, int]]:
    """Return (kind, sending stage, receiving stage) of edges, without ties."""
    edges = common_edges(pipeline.num_stages)
    for k in range(pipeline.num_stages - 1):
        if pipeline.spec.forward_lock:
            edges.append(("go", k + 1, k))
        if pipeline.method.passes_targets:
            edges.append(("label", k, k + 1))
        if pipeline.shares_norms:
            edges += [("norm", k + 1, k), ("total", k, k + 1)]
    return edges


def tied_edges(pipeline: Pipeline) -> list[tuple[Tie, Op, Message]]:
    """Return (tie, action, message) of the edges for tied weights."""
    ties = [Tie(number, stages) for number, stages in enumerate(pipeline.tied)]
    return [(tie, op, tied_message(op, tie, holder)) for tie in ties for op in TIED for holder in tie.stages[1:]]


def connect_stages(
    world: World,
    stages: Mapping[int, Stage],
    acts: Mapping[int, Specs],
    targets: Sequence[TensorSpec],
    pipeline: Pipeline,
    codecs: Codecs,
) -> dict[int, StageContext]:
    """Connect the stages of this process; return their contexts by stage.

    ``acts`` are the specs of arriving activations, by stage, for these stages and the next ones. ``targets`` are the
    specs of the loss's arguments after the output; ``COUNTS`` is the last if the loss counts its terms. ``codecs`` are
    for activations and gradients only: targets, labels and the sums of tied weights are never coded.
    """
    edges, tied = edges_of(pipeline), tied_edges(pipeline)
    if world.is_distributed:
        has_headers = world.backend == "nccl" and any(specs.varies for specs in acts.values())
        header_edges = [(f"act{SIZES}", k, k + 1) for k in range(pipeline.num_stages - 1)] if has_headers else []
        world.connect_more([*edges, *header_edges, *(message for _, _, message in tied)])
    join = _Joiner(world, stages, pipeline)
    for what, source, to in edges:
        if source not in stages and to not in stages:
            continue
        # Labels travel to the next stage from the CPU; a stage that computes with one moves it. Counts are read.
        is_read = what in ("go", "label") or (what == "target" and targets[-1] == COUNTS)
        ahead = receives_ahead(pipeline, source, to) if world.backend == "gloo" else POSTED_AHEAD
        if what == "act":
            wire = Wire(acts[to], what, codecs.activations)
        elif what == "grad":
            # Gradients are rounded at random, see coding.py.
            seed_of = stages[source].rounding_seed if source in stages else None
            wire = Wire(acts[source].of_gradients(), what, codecs.gradients, seed_of)
        elif what in ("norm", "total"):
            wire = Wire(specs_of_norm(what, stages[source if source in stages else to]), what)
            ahead = int(
                world.backend == "gloo"
            )  # of the next group, which a stop keeps: its first micro-batch is later
        else:
            wire = Wire(GO if what == "go" else Specs.always(targets), what)
        join(wire, source, to, device=torch.device("cpu") if is_read else world.device, posted_ahead=ahead)
    for tie, op, (what, source, to) in tied:
        if (here := stages.get(source, stages.get(to))) is not None:
            wire = Wire(specs_of_tied(here.ties[tie.number]), what)
            join(wire, source, to, device=world.device, posted_ahead=posted_ahead(pipeline, tie, op, to))
    return join.contexts


class _Joiner:
    """A builder of the ends of edges in this process."""

    def __init__(self, world: World, stages: Mapping[int, Stage], pipeline: Pipeline) -> None:
        self.contexts = {k: StageContext(stage) for k, stage in stages.items()}
        self._world, self._pipeline = world, pipeline
        self._most = max_pending_of(pipeline) if world.is_distributed else {}
        self._answers: dict[int, SpecsByMicroBatch] = {k: {} for k in stages}

    def __call__(self, wire: Wire, source: int, to: int, *, device: torch.device, posted_ahead: int) -> None:
        """Build this process's ends of an edge; messages arrive on ``device``."""
        what, contexts = wire.what, self.contexts
        units = f" ({describe_units(contexts[source].stage.module)})" if source in contexts else ""
        if source in contexts and to in contexts:
            channel = LocalChannel(wire, edge=f"stage {source}{units} -> stage {to}")
            contexts[source].senders[what] = contexts[to].receivers[what] = channel
            return
        edge, limit = self._world.edges[what, source], self._pipeline.max_pending
        headers = None
        if wire.varies and what != "grad":
            headers = edge if edge.backend == "gloo" else self._world.edges[f"{what}{SIZES}", source]
        if source in contexts:
            is_answered = what == "act" and not self._pipeline.spec.local_losses and wire.agreed.of_gradients().varies
            contexts[source].senders[what] = ProcessSender(
                edge,
                wire,
                max_pending=self._most.get((what, source), limit),  # no entry: the edge is only for evaluation
                max_pending_in_evaluation=limit,
                units=units,
                headers=headers,
                answers=self._answers[source] if is_answered else None,
            )
        else:
            contexts[to].receivers[what] = ProcessReceiver(
                edge,
                wire,
                device=device,
                posted_ahead=posted_ahead,
                pinned=device.type == "cpu" and self._world.device.type == "cuda",
                headers=headers,
                answers=self._answers[to] if what == "grad" and wire.varies else None,
            )


def receives_ahead(pipeline: Pipeline, source: int, to: int) -> int:
    """Return the number of receives that gloo posts beyond the awaited one."""
    is_next = abs(to - source) == 1
    return pipeline.received_ahead(min(source, to)) if is_next else pipeline.most_received_ahead


def posted_ahead(pipeline: Pipeline, tie: Tie, op: Op, stage: int) -> int:
    """Return the number of receives of tied gradients beyond the awaited one.

    They are limited to groups that a stop keeps: it keeps all micro-batches that a stage has forwarded. After the
    forward of the last micro-batch of group g + d, with the delay d, the first stage awaits parts of group g, and the
    others the sum of group g - D, with the delay D of the tie.
    """
    if pipeline.flush or pipeline.method.flush_epochs:
        return 0
    late = pipeline.tie_delay(tie) if op is Op.SEND_SUM else 0
    return min(POSTED_AHEAD, late + pipeline.delays[stage] // pipeline.micro_batches_per_update)


def specs_of_norm(what: str, stage: Stage) -> Specs:
    """Return the specs of the norms exchanged by ``stage``, or of their total."""
    assert stage.model_norm is not None
    norms = stage.model_norm.norms
    return Specs.always([TensorSpec.of(norms if what == "norm" else norms[:, 0])])


def specs_of_tied(tied: TiedWeights) -> Specs:
    """Return the specs of tied gradients: each a batch of one, never narrowed."""
    specs = (replace(TensorSpec.of(p.unsqueeze(0)), order=()) for _, p in tied.named_parameters())
    return Specs.always(specs)

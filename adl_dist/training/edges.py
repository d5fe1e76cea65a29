"""Joins stages to their neighbours: which edges there are, and what is at their ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from adl_dist.codecs import Codecs
from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.schedule import Pipeline, max_pending_of
from adl_dist.schedule.actions import TIED, Message, Op, Tie, tied_message
from adl_dist.stage import Stage
from adl_dist.stage.tied import TiedWeights
from adl_dist.training.trial.findings import units_of
from adl_dist.transport.channel import LocalChannel
from adl_dist.transport.coded import CODED, CodedChannel, CodedReceiver, CodedSender
from adl_dist.transport.coding import Coder
from adl_dist.transport.process import POSTED_AHEAD, SIZES, Edge, ProcessReceiver, ProcessSender
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.varying import AsSent, GradientReceiver, VaryingChannel, VaryingReceiver, VaryingSender

COUNTS = TensorSpec((2,), "float64")  # travels with the target, where the loss counts its terms
AnyEnd = TypeVar("AnyEnd", bound=LocalChannel | ProcessSender | ProcessReceiver)
GO = Specs.always([TensorSpec((), "uint8")])  # carries nothing but that it has come


def edges_of(pipeline: Pipeline) -> list[tuple[str, int, int]]:
    """Return all edges: what travels, from which stage, to which."""
    last = pipeline.num_stages - 1
    edges = [("target", 0, last)] if last > 0 else []
    for k in range(last):
        edges += [("act", k, k + 1), ("grad", k + 1, k)]
        if pipeline.spec.forward_lock:
            edges.append(("go", k + 1, k))
        if pipeline.method.passes_targets:
            edges.append(("label", k, k + 1))
    return edges


def tied_edges(pipeline: Pipeline) -> list[tuple[Tie, Op, Message]]:
    """Return the edges between stages that share weights: of which tie, what is sent, and between which stages."""
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
    """Join the stages of this process to their neighbours, in this process or in others.

    ``acts`` are what arrives at each of them and at the next one, ``targets`` what the loss takes besides the output,
    and last the ``COUNTS`` of its terms if there are any. Sizes that change are told with each message. ``codecs`` are
    for activations and gradients alone: targets, labels and the sums of tied weights travel as they are.
    """
    edges = edges_of(pipeline)
    contexts = {k: StageContext(stage) for k, stage in stages.items()}
    if world.is_distributed:
        most = max_pending_of(pipeline)
        has_headers = world.backend == "nccl" and any(map(varies, acts.values()))
        links = {what for what, _, _ in edges} | ({f"act{SIZES}"} if has_headers else set())
        world.connect_more(sorted(links), [message for _, _, message in tied_edges(pipeline)])
    as_sent = {k: AsSent() for k in stages}
    for what, source, to in edges:
        if source not in stages and to not in stages:
            continue
        if what == "act":
            specs = acts[to]
        elif what == "grad":
            specs = acts[source].of_gradients()
        else:
            specs = GO if what == "go" else Specs.always(targets)
        units = f" ({units_of(stages[source].module)})" if source in stages else ""
        codec = {"act": codecs.activations, "grad": codecs.gradients}.get(what, "none")
        if source in stages and to in stages:
            kind = coding(VaryingChannel if varies(specs) else LocalChannel, codec)
            channel = kind(specs, what=what, edge=f"stage {source}{units} -> stage {to}")
            give_coder(channel, codec, what, stages[source])
            contexts[source].senders[what] = contexts[to].receivers[what] = channel
        elif source in stages:
            sender = coding(VaryingSender if varies(specs) else ProcessSender, codec)(
                world.edges[what, source],
                specs,
                what=what,
                max_pending=most.get((what, source), pipeline.max_pending),  # or it is for evaluation alone
                max_pending_in_evaluation=pipeline.max_pending,
                units=units,
            )
            if isinstance(sender, VaryingSender) and what != "grad":
                is_answered = what == "act" and not pipeline.spec.local_losses and varies(specs.of_gradients())
                sender.telling(header_edge(world, what, source), as_sent[source] if is_answered else None)
            give_coder(sender, codec, what, stages[source])
            contexts[source].senders[what] = sender
        else:
            # Labels travel to the next stage from the CPU; a stage that computes with one moves it. Counts are read.
            is_read = what in ("go", "label") or (what == "target" and targets[-1] == COUNTS)
            device = torch.device("cpu") if is_read else world.device
            contexts[to].receivers[what] = receiver_of(
                *(world, what, source, specs, device, as_sent[to], codec),
                posted_ahead=receives_ahead(pipeline, source, to) if world.backend == "gloo" else POSTED_AHEAD,
            )
    for tie, op, message in tied_edges(pipeline):
        connect_tied(world, contexts, pipeline, tie, op, message)
    return contexts


def receives_ahead(pipeline: Pipeline, source: int, to: int) -> int:
    """Return how many receives stage ``to`` posts beyond the one that it awaits from stage ``source``, over gloo."""
    is_next = abs(to - source) == 1
    return pipeline.received_ahead(min(source, to)) if is_next else pipeline.most_received_ahead


def connect_tied(
    world: World, contexts: Mapping[int, StageContext], pipeline: Pipeline, tie: Tie, op: Op, message: Message
) -> None:
    """Join two stages that share the weights of ``tie`` for what one of them sends with ``op``, as far as here."""
    what, source, to = message
    if (here := contexts.get(source, contexts.get(to))) is None:
        return
    specs = specs_of(here.stage.ties[tie.number])
    if source in contexts and to in contexts:
        channel = LocalChannel(specs, what=what, edge=f"stage {source} -> stage {to}")
        contexts[source].senders[what] = contexts[to].receivers[what] = channel
    elif source in contexts:
        most = max_pending_of(pipeline).get((what, source), pipeline.max_pending)
        contexts[source].senders[what] = ProcessSender(
            world.edges[what, source], specs, what=what, max_pending=most, max_pending_in_evaluation=most
        )
    else:
        contexts[to].receivers[what] = ProcessReceiver(
            world.edges[what, source],
            specs,
            what=what,
            device=world.device,
            posted_ahead=posted_ahead(pipeline, tie, op, to),
        )


def posted_ahead(pipeline: Pipeline, tie: Tie, op: Op, stage: int) -> int:
    """Return how many receives ``stage`` may post beyond the one awaited, so that none is of a group that a stop omits.

    The first stage awaits parts of group g, another one the sum of g - D, after its forward of the last micro-batch of
    g + d, with the delay d, and none of a micro-batch that it has forwarded is omitted.
    """
    if pipeline.flush or pipeline.method.flush_epochs:
        return 0
    late = pipeline.tie_delay(tie) if op is Op.SEND_SUM else 0
    return min(POSTED_AHEAD, late + pipeline.delays[stage] // pipeline.micro_batches_per_update)


def specs_of(tied: TiedWeights) -> Specs:
    """Return what is sent of the gradients of tied weights: each as a batch of one, never narrowed."""
    specs = (replace(TensorSpec.of(p.unsqueeze(0)), channels_last=False) for _, p in tied.named_parameters())
    return Specs.always(specs)


def receiver_of(
    world: World,
    what: str,
    source: int,
    specs: Specs,
    device: torch.device,
    as_sent: AsSent,
    codec: str,
    *,
    posted_ahead: int,
) -> ProcessReceiver:
    """Return the end of an edge at which ``what`` stage ``source`` sends arrives, to be on ``device``."""
    edge, pinned = world.edges[what, source], device.type == "cpu" and world.device.type == "cuda"
    common: dict[str, Any] = {"what": what, "device": device, "posted_ahead": posted_ahead}
    receiver: ProcessReceiver
    if not varies(specs):
        receiver = coding(ProcessReceiver, codec)(edge, specs, **common, pinned=pinned)
    elif what == "grad":
        receiver = coding(GradientReceiver, codec)(edge, specs, **common, as_sent=as_sent)
    else:
        headers = header_edge(world, what, source)
        receiver = coding(VaryingReceiver, codec)(edge, specs, **common, headers=headers, pinned=pinned)
    give_coder(receiver, codec, what)
    return receiver


def coding(kind: type[AnyEnd], codec: str) -> type[AnyEnd]:
    """Return the class of an end whose messages are coded, or ``kind``, if they are not."""
    return kind if codec == "none" else CODED[kind]


def give_coder(end: object, codec: str, what: str, sender: Stage | None = None) -> None:
    """Have ``end`` code, if it does, what ``sender`` sends: gradients are rounded at random, see coding.py."""
    if isinstance(end, CodedChannel | CodedSender | CodedReceiver):
        end.coder = Coder(codec, sender.rounding_seed if sender is not None and what == "grad" else None)


def varies(specs: Specs) -> bool:
    """Return whether sizes of these tensors change from one micro-batch to another."""
    return any(spec.varies for mode in specs for spec in mode)


def header_edge(world: World, what: str, source: int) -> Edge:
    """Return the edge by which the sizes of what stage ``source`` sends are told: of gloo, which needs no GPU."""
    edge = world.edges[what, source]
    return edge if edge.backend == "gloo" else world.edges[f"{what}{SIZES}", source]

"""One row per method: a method is a schedule plus a weight policy.

A schedule is a delay for each stage and a few yes-or-no facts: is the pipeline emptied after each group, do
backwards run last-in first-out, is the forward locked, are losses local. :mod:`adl_dist.schedule.build_actions` turns
a row into actions, the same way for all. What a user may change are the fields of
:class:`adl_dist.schedule.methods.Method`; a row names those that mean something to it, and all others are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Weights = Literal["stash", "latest", "recompute", "2bw"]
DelayRule = Literal["decoupled", "minimal", "none", "group", "queues"]
ANYONES_DELAYS = ("decoupled", "minimal", "none")  # the other rules belong to one method each
Recompute = Literal["never", "except_last", "always"]
Order = Literal["forward_first", "backward_first"]
Reduction = Literal["mean", "sum"]
LrIndex = Literal["update", "slot"]
Head = Literal["mlp_sr", "mlp", "cnn", "linear", "predsim"]

# Ticks between a micro-batch's forward and its backward on stage k of K, with M micro-batches per update.
DELAYS: dict[str, Callable[[int, int, int], int]] = {
    # One hop per tick each way (ADL, section 4.1).
    "decoupled": lambda k, K, M: 2 * (K - 1 - k),
    # As few as keep every stage busy if a message takes no time (PipeDream's 1F1B).
    "minimal": lambda k, K, M: K - 1 - k,
    # The backward follows its own forward: one micro-batch at a time.
    "none": lambda k, K, M: 0,
    # All forwards of a group come first.
    "group": lambda k, K, M: M - 1,
    # "queues" follows from the lengths of DSP's queues, which only the method knows.
}

ANY = ("accumulation_steps", "reduction", "lr_factors")
STALE = (*ANY, "weights", "delay", "order", "gradient_shrink")
CLOCKED = (*STALE, "lr_index")  # stages move in step, so that there is one clock


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """The facts that tell one method from another.

    Attributes:
        summary: name and source.
        delay: rule of ``DELAYS``, unless the user gives another.
        weights: which weights a backward uses, unless the user gives others.
        accumulation_steps: M, unless the user gives another.
        flush: whether the pipeline is emptied after each group, so that nothing is stale.
        last_in_first_out: whether a group's backwards run in reverse.
        forward_lock: whether no stage continues before its micro-batch has passed all stages.
        local_losses: whether each stage learns from a loss of its own instead of a gradient from downstream.
        options: the fields of ``Method`` that mean something to it.
    """

    summary: str
    delay: DelayRule
    weights: Weights = "stash"
    accumulation_steps: int = 1
    flush: bool = False
    last_in_first_out: bool = False
    forward_lock: bool = False
    local_losses: bool = False
    options: Sequence[str] = STALE


METHODS = {
    "adl": MethodSpec(
        summary="Accumulated Decoupled Learning (Zhuang et al., ICML 2021)",
        delay="decoupled",
        accumulation_steps=4,
        options=CLOCKED,
    ),
    "fdg": MethodSpec(
        summary="Fully Decoupled with Delayed Gradients (Zhuang et al., TNNLS 2021)", delay="decoupled", options=CLOCKED
    ),
    "dsp": MethodSpec(
        summary="Diversely Stale Parameters (Xu et al., CVPR 2020)",
        delay="queues",
        weights="recompute",
        options=(*CLOCKED, "activation_queue", "gradient_queue"),
    ),
    "ddg": MethodSpec(
        summary="Decoupled Parallel BP with Delayed Gradients (Huo et al., ICML 2018)",
        delay="minimal",
        forward_lock=True,
        options=CLOCKED,
    ),
    "fr": MethodSpec(
        summary="Features Replay (Huo et al., NeurIPS 2018)",
        delay="minimal",
        weights="recompute",
        forward_lock=True,
        options=CLOCKED,
    ),
    "dgl": MethodSpec(
        summary="Decoupled Greedy Learning (Belilovsky et al., ICML 2020)",
        delay="none",
        local_losses=True,
        options=(*ANY, "head", "buffer_size", "buffer_reuse", "stage_speeds"),
    ),
    "bp": MethodSpec(
        summary="Backpropagation, one micro-batch at a time",
        delay="none",
        accumulation_steps=4,
        flush=True,
        options=ANY,
    ),
    "gpipe": MethodSpec(
        summary="GPipe (Huang et al., NeurIPS 2019)",
        delay="group",
        accumulation_steps=4,
        flush=True,
        last_in_first_out=True,
        options=(*ANY, "recompute"),
    ),
    "1f1b": MethodSpec(
        summary="1F1B with flush (PipeDream-Flush, Narayanan et al., ICML 2021)",
        delay="minimal",
        accumulation_steps=4,
        flush=True,
        options=ANY,
    ),
    "pipedream": MethodSpec(summary="PipeDream (Narayanan et al., SOSP 2019)", delay="minimal"),
    "2bw": MethodSpec(
        summary="PipeDream-2BW (Narayanan et al., ICML 2021)", delay="minimal", weights="2bw", accumulation_steps=4
    ),
    "paci": MethodSpec(
        summary="PACI (2026): 1F1B, local accumulation, no stash",
        delay="minimal",
        weights="latest",
        accumulation_steps=4,
    ),
}

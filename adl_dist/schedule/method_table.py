"""One row per method: a method is a schedule plus a weight policy.

A schedule is a delay for each stage and a few yes-or-no facts: is the pipeline emptied after each group, do
backwards run last-in first-out, is the forward locked, are losses local, are gradients predicted.
:mod:`adl_dist.schedule.build_actions` turns a row into actions, the same way for all. A user may change the fields of
:class:`adl_dist.schedule.methods.Method`; a row names those that it uses, and all others are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Weights = Literal["stash", "latest", "recompute", "2bw"]
DelayRule = Literal["decoupled", "minimal", "third", "auto", "none", "group", "queues"]
ANYONES_DELAYS = ("decoupled", "minimal", "third", "auto", "none")  # the other rules belong to one method each

# Ticks between a micro-batch's forward and its backward on stage k of K, with M micro-batches per update.
DELAYS: dict[str, Callable[[int, int, int], int]] = {
    # One hop per tick each way (ADL, section 4.1).
    "decoupled": lambda k, K, M: 2 * (K - 1 - k),
    # As few as keep every stage busy if a message takes no time (PipeDream's 1F1B).
    "minimal": lambda k, K, M: K - 1 - k,
    # As few as keep stages busy if a message takes no time, and a backward sends its gradient after half of its work.
    # A round trip of n = K - k stages is 2n thirds of the work on a micro-batch, and the part that is deferred until
    # the update is one more: ceil((2n + 1) / 3) micro-batches are in flight.
    "third": lambda k, K, M: 2 * (K - k) // 3,
    # What is measured decides; until then as above. See :mod:`adl_dist.schedule.least_delays`.
    "auto": lambda k, K, M: K - 1 - k,
    # The backward follows its own forward: one micro-batch at a time.
    "none": lambda k, K, M: 0,
    # All forwards of a group come first.
    "group": lambda k, K, M: M - 1,
    # "queues" follows from the lengths of DSP's queues, which only the method knows.
}

LOCAL = ("accumulation_steps", "reduction", "lr_factors")
ANY = (*LOCAL, "split_backward", "max_deferred")
STALE = (*ANY, "weights", "delay", "max_staleness", "order", "gradient_shrink", "mitigation", "flush_epochs")
RECOMPUTING = (*ANY, "recompute")
CLOCKED = (*STALE, "lr_clock")  # stages move in step, so that there is one clock
QUEUED = (*CLOCKED, "activation_queue", "gradient_queue")
SHARING = (*LOCAL, "stages_per_process")
GREEDY = (*LOCAL, "head")
PREDICTING = (*LOCAL, "head_layers", "head_width", "head_sees_target", "head_delay", "head_lr_factor")


@dataclass(frozen=True)
class MethodSpec:
    """The facts that distinguish a method from others."""

    summary: str  # name and source
    delay: DelayRule  # unless the user gives another
    accumulation_steps: int = 1  # M, unless the user gives another
    weights: Weights = "stash"  # which weights a backward uses, unless the user gives others
    flush: bool = False  # whether the pipeline is emptied after each group, so that nothing is stale
    last_in_first_out: bool = False  # whether a group's backwards run in reverse
    early: bool = False  # whether stage 0 updates before the last stage has its gradients, in spite of a flush
    forward_lock: bool = False  # whether no stage continues before its micro-batch has passed all stages
    splits: bool = False  # whether a backward is in two parts, the second as late everywhere as the first on stage 0
    local_losses: bool = False  # whether each stage learns from its own loss instead of a gradient from downstream
    predicts_gradients: bool = False  # whether each stage learns from a prediction of the gradient from downstream
    options: Sequence[str] = CLOCKED  # the fields of ``Method`` that mean something to it

    @property
    def has_heads(self) -> bool:
        """Whether stages have heads, and so wait for no gradient."""
        return self.local_losses or self.predicts_gradients


METHODS = {
    "adl": MethodSpec("Accumulated Decoupled Learning (Zhuang et al., ICML 2021)", "decoupled", 4),
    "fdg": MethodSpec("Fully Decoupled with Delayed Gradients (Zhuang et al., TNNLS 2021)", "decoupled"),
    "dsp": MethodSpec(
        "Diversely Stale Parameters (Xu et al., CVPR 2020)", "queues", weights="recompute", options=QUEUED
    ),
    "ddg": MethodSpec(
        "Decoupled Parallel BP with Delayed Gradients (Huo et al., ICML 2018)", "minimal", forward_lock=True
    ),
    "fr": MethodSpec("Features Replay (Huo et al., NeurIPS 2018)", "minimal", weights="recompute", forward_lock=True),
    "dgl": MethodSpec(
        "Decoupled Greedy Learning (Belilovsky et al., ICML 2020)", "none", local_losses=True, options=GREEDY
    ),
    "dni": MethodSpec(
        "Decoupled Neural Interfaces (Jaderberg et al., ICML 2017)",
        "none",
        predicts_gradients=True,
        options=PREDICTING,
    ),
    "bp": MethodSpec("Backpropagation, one micro-batch at a time", "none", 4, flush=True, options=ANY),
    "gpipe": MethodSpec(
        "GPipe (Huang et al., NeurIPS 2019)", "group", 4, flush=True, last_in_first_out=True, options=RECOMPUTING
    ),
    "1f1b": MethodSpec(
        "1F1B with flush (PipeDream-Flush, Narayanan et al., ICML 2021)", "minimal", 4, flush=True, options=ANY
    ),
    "zbh1": MethodSpec(
        "ZB-H1 (zero bubble, Qi et al., ICLR 2024)", "minimal", 4, flush=True, splits=True, options=LOCAL
    ),
    "zbh2": MethodSpec(
        "ZB-H2 (zero bubble, Qi et al., ICLR 2024)", "decoupled", 4, flush=True, early=True, splits=True, options=LOCAL
    ),
    "interleaved": MethodSpec(
        "Interleaved 1F1B (Narayanan et al., SC 2021)", "decoupled", 4, flush=True, options=SHARING
    ),
    "pipedream": MethodSpec("PipeDream (Narayanan et al., SOSP 2019)", "minimal", options=STALE),
    "2bw": MethodSpec("PipeDream-2BW (Narayanan et al., ICML 2021)", "minimal", 4, "2bw", options=STALE),
    "paci": MethodSpec("PACI (2026): 1F1B, local accumulation, no stash", "minimal", 4, "latest", options=STALE),
}

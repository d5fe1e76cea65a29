"""A method on K stages: delays, staleness and learning rates."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adl_dist.errors import ConfigError
from adl_dist.schedule.actions import Tie
from adl_dist.schedule.method_table import DELAYS, MethodSpec
from adl_dist.schedule.methods import Method

RECEIVED_AHEAD = 2  # at least, so that a message arrives while the one before is processed


@dataclass(frozen=True)
class Pipeline:
    """A method on ``num_stages`` (K) stages.

    Attributes:
        method: the method.
        num_stages: K.
        flushed: whether to empty the pipeline after each group even if the method's row does not say so.
        tied: for each tie, the stages that hold a copy of its weights, in order.
        shares_norms: whether stages send each other the norms of their gradients before each update.

    Raises:
        ConfigError: If K is below 1, a list does not fit K, delays are impossible, or the method excludes ties.
    """

    method: Method
    num_stages: int
    flushed: bool = False
    tied: tuple[tuple[int, ...], ...] = ()
    shares_norms: bool = False

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ConfigError(f"partition.num_stages (K) must be at least 1, got {self.num_stages}")
        _ = self.delays, self.lr_factor(0)  # each raises if it does not fit K
        if self.tied and (why := self.method.why_not_tied) is not None:
            raise ConfigError(f"weights cannot be shared by several stages: {why}; use partition.tied=untie")

    @property
    def micro_batches_per_update(self) -> int:
        """The number of micro-batches per update, M."""
        return self.method.micro_batches_per_update

    @property
    def stages_per_process(self) -> int:
        """The largest number of stages in one process, v."""
        return self.method.stages_per_process if "stages_per_process" in self.spec.options else 1

    @property
    def num_processes(self) -> int:
        """The number of processes, P; stage s is in process s mod P."""
        return -(-self.num_stages // self.stages_per_process)

    def stages_of(self, process: int) -> range:
        """Return the stages of ``process`` in [0, P)."""
        return range(process, self.num_stages, self.num_processes)

    def forward_tick(self, stage: int, index: int) -> int:
        """Return the tick of the forward ``index`` (from 0) of ``stage``.

        Ticks count from the first forward of the stage's process. With one stage per process the tick is ``index``.
        Otherwise the stages of a process run P forwards each in turn, because a micro-batch takes P ticks to its next
        stage in the same process.
        """
        v, P = self.stages_per_process, self.num_processes
        return (index // P * v + stage // P) * P + index % P if v > 1 else index

    @property
    def spec(self) -> MethodSpec:
        """The method's row in the table of methods."""
        return self.method.spec

    @property
    def flush(self) -> bool:
        """Whether the pipeline is emptied after each group."""
        return self.spec.flush or self.flushed

    def in_epoch(self, epoch: int) -> "Pipeline":
        """Return the pipeline of ``epoch``; the first ``flush_epochs`` flush."""
        return replace(self, flushed=True) if epoch < self.method.flush_epochs else self

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """Ticks between a micro-batch's forward and its backward, for each stage."""
        K, M, method = self.num_stages, self.micro_batches_per_update, self.method
        delays = list(self.nominal_delays)
        if any(d < 0 for d in delays) or delays != sorted(delays, reverse=True):
            raise ConfigError(
                f"method.delay={delays} is impossible: each stage must have at least the delay of the next one, and "
                "none below 0, or both would wait for each other; for example " + str(list(range(K - 1, -1, -1)))
            )
        if method.order == "backward_first":
            # Backward, update, forward of one tick, over and over, is the order in which the same backward belongs
            # to the tick before.
            delays = [max(d - 1, 0) for d in delays]
        if method.weights == "2bw" and delays[0] > M:
            raise ConfigError(
                f"method.weights=2bw needs method.accumulation_steps (M) of at least the delay of stage 0, or the "
                f"weights it asks for are not there yet; M is {M}: use method.accumulation_steps={delays[0]}"
            )
        return tuple(delays)

    @property
    def nominal_delays(self) -> tuple[int, ...]:
        """The delays by ``method.delay``, before ``order=backward_first``."""
        K, rule = self.num_stages, self.method.delay
        if rule == "queues":
            hops = [p + q for p, q in zip(self._hops("activation_queue"), self._hops("gradient_queue"), strict=True)]
            return tuple(sum(hops[k:]) for k in range(K))
        if isinstance(rule, str):
            M = self.micro_batches_per_update
            delays = [DELAYS[rule](k, K, M) for k in range(K)]
            is_bounded = rule == "auto" and self.method.weights == "2bw"  # as the measured ones will be
            return tuple(min(delay, M) for delay in delays) if is_bounded else tuple(delays)
        return tuple(self._one_each("delay", K))

    @property
    def overlaps(self) -> bool:
        """Whether a stage keeps a graph while it runs further forwards."""
        return any(self.delays) and self.method.weights != "recompute" and self.method.recompute != "always"

    def splits_backward(self, stage: int) -> bool:
        """Return whether ``stage`` splits its backward, if the method does.

        Stage 0 sends no gradient, so all that it gains by a split is that a forward may come between the two parts. If
        its delay leaves room, it does both parts at once, which saves 7 % of the work of both stages of a ResNet-20,
        because saved activations are read once, not twice.
        """
        if stage > 0 or self.spec.flush or self.spec.forward_lock or not self.method.splits:
            return self.method.splits
        return not self._has_room_for_whole_backward

    @cached_property
    def _has_room_for_whole_backward(self) -> bool:
        K = self.num_stages
        if K <= 2:
            return self.room_for_links(0) >= 0
        # Stages in between may do a WG first. With this part, spread over 2(K-1) messages, stage 0 must still leave as
        # much room for links as they do.
        room = self.room_for_links(0) - 1 / (2 * (K - 1))
        return room >= max(0.0, min(map(self.room_for_links, range(1, K - 1))))

    def room_for_links(self, stage: int) -> float:
        """Return the longest message time for which ``stage`` never waits.

        The unit is the time of a part: a forward, an I or a WG. A round trip to the loss takes 2n parts of work, n =
        K - k, and 2(n-1) messages, and before an update there may be one more part, a WG. In that time the stage works
        on d + 1 micro-batches of three parts each.
        """
        n = self.num_stages - stage
        return (3 * (self.delays[stage] + 1) - 2 * n - 1) / (2 * (n - 1)) if n > 1 else math.inf

    def received_ahead(self, stage: int) -> int:
        """Return the receives posted ahead between ``stage`` and the next.

        gloo sends a message only when its receive is posted. So, beyond the awaited one, there is a receive for each
        message that may be on its way: as many as the delay falls from one stage to the next.
        """
        has_next = 0 <= stage < self.num_stages - 1
        return max(RECEIVED_AHEAD, self.delays[stage] - self.delays[stage + 1]) if has_next else RECEIVED_AHEAD

    @property
    def most_received_ahead(self) -> int:
        """The most receives that any stage posts beyond an awaited one."""
        return max(map(self.received_ahead, range(self.num_stages - 1)), default=RECEIVED_AHEAD)

    def head_delay(self, stage: int) -> int | None:
        """Return the ticks from a forward to its head's learning, None if no head."""
        has_head = self.spec.predicts_gradients and stage < self.num_stages - 1
        return self.method.head_delay if has_head else None

    @property
    def round_trip(self) -> int:
        """The ticks after which a forward of stage 0 affects stage 0 again."""
        if not self.spec.predicts_gradients:
            return self.delays[0]
        # A stage learns of the next one by a gradient, ``head_delay`` forwards later.
        return (self.num_stages - 1) * (self.method.head_delay + 1)

    @property
    def updates_to_fill(self) -> int:
        """The number of updates after which all stages are busy."""
        return -(-self.round_trip // self.micro_batches_per_update) + 1

    @property
    def max_pending(self) -> int:
        """The most messages under way on an edge if no gradients come back.

        That is so in evaluation and with local losses. It keeps stage 0 from running away, but not from filling the
        pipeline. With gradients, :func:`max_pending_of` has a smaller number for each edge.
        """
        return max(self.round_trip, 2 * (self.num_stages - 1)) + 2

    def lr_lead(self, stage: int) -> int:
        """Return the updates by which the learning rate of ``stage`` runs ahead.

        It is 0 except for ``lr_clock=global``. All stages share a clock of slots with a forward and a backward each,
        and its rate is that of update floor(slot / M). Micro-batch b reaches stage k in slot b + k (with DSP's queues
        b + p_0 + .. + p_k-1, with a locked forward b) and comes back d slots later; the last one of a group brings the
        update. If the backward comes first, the last stage, which has its own in the same slot, updates in the next
        slot.
        """
        if self.method.lr_clock == "update":
            return 0
        M = self.micro_batches_per_update
        arrives = 0 if self.spec.forward_lock else sum(self._hops("activation_queue")[:stage])
        slot = M - 1 + arrives + self.nominal_delays[stage]
        if self.method.order == "backward_first" and stage == self.num_stages - 1:
            slot += 1
        return slot // M

    def lr_factor(self, stage: int) -> float:
        """Return the factor on the learning rate of ``stage``."""
        return float(self._one_each("lr_factors", self.num_stages)[stage])

    def forward_version(self, stage: int, micro_batch: int) -> int:
        """Return the number of updates that a micro-batch's forward sees.

        Micro-batch b, counted from 0 within the segment, sees the weights after floor(max(0, b - d) / M) updates. With
        ``2bw`` it sees the weights from before the update of the previous group (at least the first of the segment),
        and with a flush those after all groups before its own.
        """
        M = self.micro_batches_per_update
        if self.flush:
            return micro_batch // M
        if self.method.weights == "2bw":
            return max(0, micro_batch // M - 1)
        return max(0, micro_batch - self.delays[stage]) // M

    def staleness(self, stage: int, micro_batch: int) -> int:
        """Return the staleness of a gradient, in updates.

        It counts updates, not micro-batches, between the gradient's forward and its own update. With delay d and M
        accumulation steps, micro-batch b of a segment has

            LoS(b) = floor(b / M) - floor(max(0, b - d) / M),

        which is ceil((d - i) / M) for offset i = b mod M once b >= d (paper, Eq. 17).
        """
        return micro_batch // self.micro_batches_per_update - self.forward_version(stage, micro_batch)

    def steady_staleness(self, stage: int) -> list[int]:
        """Return the staleness of offsets 0..M-1 of a full group in steady state.

        Its mean is d / M, except with a flush and with ``2bw``.
        """
        M = self.micro_batches_per_update
        group = self.delays[stage] // M + 2  # by then the pipeline is full
        return [self.staleness(stage, group * M + offset) for offset in range(M)]

    def mean_staleness(self, stage: int | Tie) -> float:
        """Return the mean staleness of ``stage``, or of a tie, in steady state."""
        if isinstance(stage, Tie):
            stale = [one for holder in stage.stages for one in self.tied_staleness(stage, holder)]
            return sum(stale) / len(stale)
        return sum(self.steady_staleness(stage)) / self.micro_batches_per_update

    @cached_property
    def _ties(self) -> dict[int, list[Tie]]:
        ties = [Tie(number, stages) for number, stages in enumerate(self.tied)]
        return {k: [tie for tie in ties if k in tie.stages] for k in {k for stages in self.tied for k in stages}}

    def ties_of(self, stage: int) -> list[Tie]:
        """Return the ties that ``stage`` holds a copy of."""
        return self._ties.get(stage, []) if self.tied else []

    def tie_delay(self, tie: Tie) -> int:
        """Return the delay D of tied updates.

        A stage updates its copy with the sum of group g next to its own update with group g + D. The sum is complete
        when the first stage, whose delay d_f is the longest, has its own part: in the tick of its forward d_f after the
        last micro-batch of g. A stage of delay d updates with group s in the tick of its forward d after the last
        micro-batch of s, and next awaits the activation that the first stage sends only after its update. So with
        s >= g + ceil((d_f - d) / M) the sum makes no stage wait that would not wait anyway.
        """
        if self.flush:
            return 0
        longest = self.delays[tie.stages[0]] - self.delays[tie.stages[-1]]
        return -(-longest // self.micro_batches_per_update)

    def tied_staleness(self, tie: Tie, stage: int) -> list[int]:
        """Return the staleness of a stage's tied gradients in steady state.

        There is a number for each of the offsets 0..M-1 of a full group, in updates of the tied weights. It is LoS + D,
        because the sum is applied D updates late.
        """
        return [stale + self.tie_delay(tie) for stale in self.steady_staleness(stage)]

    def mitigations(self, stage: int | Tie) -> frozenset[str]:
        """Return the rows of ``method.mitigation`` that act in ``stage``.

        These are all, or none if no gradient is stale. Here and below a tie may stand for a stage, because shared
        weights have their own staleness.
        """
        rows = self.method.mitigation
        return frozenset(rows) if rows and self.mean_staleness(stage) else frozenset()

    def forwards_ahead(self, stage: int) -> bool:
        """Return whether forwards of ``stage`` see predicted weights, tied or not."""
        places: list[int | Tie] = [stage, *self.ties_of(stage)]
        return any(not self.mitigations(at).isdisjoint({"predict", "nesterov"}) for at in places)

    def remembers_displacement(self, stage: int | Tie) -> bool:
        """Return whether ``stage`` remembers the displacement of its last update."""
        rows = self.mitigations(stage)
        return "nesterov" in rows or ("predict" in rows and self.method.predict_from == "displacement")

    def feedback_lag(self, stage: int | Tie) -> int:
        """Return the number of updates remembered for error feedback, or 0."""
        if "error_feedback" not in self.mitigations(stage):
            return 0
        return self.method.error_feedback_lag or math.ceil(self.mean_staleness(stage))

    @property
    def drain_is_exact(self) -> bool:
        """Whether emptying the pipeline after any update changes no value."""
        if any(self.head_delay(stage) for stage in range(self.num_stages)):
            return False  # heads would learn earlier
        return not any(any(self.steady_staleness(stage)) for stage in range(self.num_stages))

    def _hops(self, name: str) -> list[int]:
        return self._one_each(name, self.num_stages - 1)

    def _one_each(self, name: str, num: int) -> list[Any]:
        """Return ``num`` values of an option, from its list or one for all."""
        value = getattr(self.method, name)
        if not isinstance(value, tuple):
            return [1.0 if value is None else value] * num
        if len(value) != num:
            raise ConfigError(
                f"method.{name}={list(value)} has {len(value)} numbers, but there are {self.num_stages} stages; "
                f"give {num}"
            )
        return list(value)

"""The early end of a segment: one decision, applied by each process.

It may also be the end of the job, because a process failed: over NCCL nothing else would end a wait on the GPU.

Stage 0 decides, because no stage is ahead of it. Before it loads micro-batch b, no stage can wait for a micro-batch
after b and the receives posted ahead. The segment ends with the group of the last of these. Stage 0 continues only when
all other processes have the decision; none of them can meet a micro-batch after b before that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from adl_dist.control.messages import Abort, Failure, Stop
from adl_dist.engine import StageContext
from adl_dist.schedule import Action, Op, Pipeline, Segment, shorten, updates_that_load


class EarlyStop:
    """The early end of the segments that one process trains."""

    def __init__(self) -> None:
        # On rank 0: whether the running segment should end, and a function that sends the decision to all others.
        self.is_wanted: Callable[[], bool] = lambda: False
        self.announce: Callable[[Stop], None] = lambda stop: None
        self.failure: Failure | None = None  # that ended the job
        self._stop: Stop | None = None
        self._has_news = False  # whether the main thread has not seen the last message

    def take(self, news: Stop | Abort) -> None:
        """Take a message of rank 0, in any thread."""
        if isinstance(news, Abort):
            self.failure = news.failure
        else:
            self._stop = news
        self._has_news = True

    def applied(
        self,
        order: Iterable[tuple[int, Action]],
        segment: Segment,
        pipeline: Pipeline,
        contexts: Mapping[int, StageContext],
        *,
        posted_ahead: int,
    ) -> Iterator[tuple[int, Action]]:
        """Yield ``order``, and shorten its lists once there is a decision.

        ``order`` reads the lists ``contexts[k].work.actions`` of the running ``segment``. ``posted_ahead`` is the
        number of receives posted before they are needed.

        Raises:
            StageFailed: If the job has ended because a process failed.
        """

        def apply() -> bool:
            """Shorten the lists if there is a decision for this segment."""
            if self._stop is None or self._stop.after_update <= segment.first_update:
                return False
            groups = segment.group_sizes[: self._stop.after_update - segment.first_update]
            for k, context in contexts.items():
                context.shorten(sum(groups))
                shorten(context.work.actions, pipeline.in_epoch(segment.epoch), k, group_sizes=groups)
            return True

        is_applied = apply()  # stage 0 may have decided before this process began the segment
        for k, action in order:
            if action.op is Op.LOAD and not is_applied and self.is_wanted():
                num_updates = updates_that_load(segment.group_sizes, action.number + 1 + posted_ahead)
                if num_updates < segment.num_updates:
                    stop = Stop(segment.first_update + num_updates)
                    self.announce(stop)
                    self.take(stop)
            yield k, action
            if self._has_news:
                self._has_news = False  # first: a later message sets it again
                if self.failure is not None:
                    raise self.failure.error()
                is_applied = is_applied or apply()

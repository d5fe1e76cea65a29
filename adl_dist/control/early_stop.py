"""Ends a running segment early, after the same update in all stages, so that a stop need not wait for its end.

Stage 0 decides, because no stage is ahead of it: about to load micro-batch b, it knows that nobody waits for more than
b and the receives posted beyond. The segment ends with the group of the last of these. All others are told so over the
control plane, whose threads shorten what is still to be done; no main thread has to answer, since it may be waiting for
the very micro-batch b. Only when all have heard does stage 0 go on, and with it everybody else.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.control.requests import Requests
from adl_dist.distributed.rpc_errors import translate_rpc_errors
from adl_dist.distributed.world import World, name_of
from adl_dist.engine import StageContext
from adl_dist.schedule import Pipeline, Segment, shorten, updates_that_load
from adl_dist.transport.process import POSTED_AHEAD

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class RunningSegment:
    """A segment of training that the stages of this process carry out.

    Attributes:
        segment: as it was begun.
        pipeline: the method and K.
        contexts: this process's stages, opened.
        world: this process among the others.
    """

    segment: Segment
    pipeline: Pipeline
    contexts: Mapping[int, StageContext]
    world: World

    def stop_on_request(self, batches: Iterator[Batch], requests: Requests) -> Iterator[Batch]:
        """Hand ``batches`` through, on stage 0; once something is asked for, end the segment as soon as can be."""
        has_ended = False
        for micro_batch in range(len(self.segment.sizes)):
            if requests.any_open and not has_ended:
                has_ended = True
                self._end_everywhere(micro_batch)
            yield next(batches)

    def end_after(self, num_updates: int) -> None:
        """Shorten what this process's stages still do; called by any thread, before they get there."""
        groups = self.segment.group_sizes[:num_updates]
        for k, context in self.contexts.items():
            context.shorten(sum(groups))
            # In place: the loop that carries out the actions continues with what it finds there, at no cost.
            shorten(context.work.actions, self.pipeline, k, group_sizes=groups)

    def _end_everywhere(self, next_micro_batch: int) -> None:
        awaited = next_micro_batch + 1 + (POSTED_AHEAD if self.world.is_distributed else 0)
        num_updates = updates_that_load(self.segment.group_sizes, awaited)
        if num_updates == self.segment.num_updates:
            return
        message = json.dumps({"first_update": self.segment.first_update, "num_updates": num_updates})
        with translate_rpc_errors("a process"):
            others = (rank for rank in range(self.world.size) if rank != self.world.rank)
            torch.futures.wait_all([rpc.rpc_async(name_of(rank), _hear, args=(message,)) for rank in others])
        self.end_after(num_updates)


_lock = threading.Lock()
_running: RunningSegment | None = None
_heard: dict[int, int] = {}  # of a segment by its first update: after how many updates it ends


@contextmanager
def accept_early_stop(running: RunningSegment) -> Iterator[None]:
    """Let rank 0 end ``running`` early; enter with the seats opened and before the first action."""
    global _running
    first = running.segment.first_update
    with _lock:
        _running = running
        if first in _heard:  # stage 0 was quicker
            running.end_after(_heard[first])
    try:
        yield
    finally:
        with _lock:
            _running = None
            _heard.clear()


def _hear(message: str) -> None:
    told = json.loads(message)
    first, num_updates = told["first_update"], told["num_updates"]
    with _lock:
        _heard[first] = num_updates
        if _running is not None and _running.segment.first_update == first:
            _running.end_after(num_updates)

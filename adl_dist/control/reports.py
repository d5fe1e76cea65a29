"""What the stages report to the coordinator: their records, their results, and that they failed."""

import json
import logging
import queue
import time
import traceback
from typing import Any

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.checkpoint.async_save import PartReport, Saver
from adl_dist.distributed.rpc_errors import translate_rpc_errors
from adl_dist.distributed.world import COORDINATOR_RANK, World, name_of
from adl_dist.errors import AdlError, ChannelError

logger = logging.getLogger("adl_dist")

REPORT_SECONDS = 0.2  # records travel in batches this far apart

_reports: "queue.SimpleQueue[str]" = queue.SimpleQueue()


_savers: list[Saver] = []  # of the job that runs, on rank 0


def use_saver(saver: Saver) -> None:
    """On rank 0: hand what processes report of their parts to ``saver``."""
    _savers[:] = [saver]


def _take_part(part: PartReport) -> None:
    for saver in _savers:
        saver.take_part(part)


def send_part(world: World, part: PartReport) -> None:
    """Report to rank 0 how the part of this process has ended."""
    if world.rank == COORDINATOR_RANK:
        _take_part(part)
        return
    try:
        rpc.rpc_sync(name_of(COORDINATOR_RANK), _take_part, args=(part,))
    except RuntimeError as error:
        logger.warning("could not tell rank 0 that its part is written: %s", str(error).partition("\n")[0])


def _take(message: str) -> None:
    _reports.put(message)


def next_report(seconds: float | None = None) -> dict[str, Any]:
    """On rank 0: take the oldest report that was not taken yet, or wait for one.

    Raises:
        queue.Empty: none came in ``seconds``.
    """
    return dict(json.loads(_reports.get(timeout=seconds)))


def report_gone(rank: int, text: str) -> None:
    """On rank 0: report, in place of ``rank``, that it is gone."""
    failure = {"failed": text, "traceback": text, "exit_code": 1, "is_victim": False, "is_gone": True}
    _reports.put(json.dumps({"rank": rank, **failure}))
    _take_part(PartReport(rank=rank, failure=text, is_gone=True))


class Reporter:
    """Sends this process's records and results to the coordinator; training never waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: list[dict[str, Any]] = []
        self._sent_at = 0.0
        self._under_way: list[torch.futures.Future[Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        """Take one record; it leaves with the next batch."""
        self._records.append(record)
        if time.monotonic() - self._sent_at > REPORT_SECONDS:
            self._under_way = [f for f in self._under_way if not f.done()]
            self._under_way.append(self._send({}))

    def report(self, **message: Any) -> None:
        """Send ``message`` and what records are left; return when all has arrived.

        Raises:
            ChannelError: it has not.
        """
        # RPC keeps no order between messages: the records sent before must be there before the result is.
        with translate_rpc_errors("rank 0"):
            torch.futures.wait_all(self._under_way)
            self._under_way = []
            self._send(message).wait()

    def report_failure(self, error: BaseException) -> bool:
        """Tell the coordinator first-hand, before the peers fail for want of this stage; return whether it heard."""
        text = str(error)
        if not isinstance(error, AdlError):
            text = f"rank {self._world.rank}: {type(error).__name__}: {error}"
        failure = {
            "failed": text,
            "traceback": "".join(traceback.format_exception(error)),
            "exit_code": getattr(error, "exit_code", 1),
            "is_victim": isinstance(error, ChannelError),
            "is_gone": False,
        }
        if self._world.rank == COORDINATOR_RANK:  # which it reaches also when RPC has ended
            _take(self._written(failure))
            return True
        try:
            self._send(failure).wait()
            return True
        except RuntimeError as unheard:
            logger.warning("could not report the failure to the coordinator: %s", str(unheard).partition("\n")[0])
            return False

    def _send(self, message: dict[str, Any]) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = rpc.rpc_async(
            name_of(COORDINATOR_RANK), _take, args=(self._written(message),)
        )
        return future

    def _written(self, message: dict[str, Any]) -> str:
        text = json.dumps({"rank": self._world.rank, "records": self._records, **message})
        self._records, self._sent_at = [], time.monotonic()
        return text

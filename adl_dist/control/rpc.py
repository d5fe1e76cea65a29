"""The control plane: what the coordinator tells the stages, and what they report (reports.py), over RPC.

Messages are JSON: plain numbers and strings. RPC puts commands and reports into queues; the main thread of each process
takes its commands from there and is the only one that issues data-plane communication. What cannot wait for a main
thread is answered by RPC's own: the doctor's questions (deputy.py), and that a segment ends early (early_end.py).
"""

import contextlib
import json
import logging
import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.control.reports import Reporter, next_report
from adl_dist.control.requests import Ask, Requests
from adl_dist.distributed.rpc_errors import is_timeout
from adl_dist.distributed.world import COORDINATOR_RANK, World, name_of
from adl_dist.errors import AdlError, ChannelError, StageFailed
from adl_dist.monitor.heartbeat import rank0_status

logger = logging.getLogger("adl_dist")

Record = dict[str, Any]
Result = dict[str, Any]

CAUSE_SECONDS = 1.0  # how long a victim's report waits for that of its cause
HEARD_SECONDS = 4 * CAUSE_SECONDS  # which rank 0 takes besides, to look around, until it has told the cause
ASK_SECONDS = 5.0  # within which a process that is there takes a request

_commands: "queue.SimpleQueue[str]" = queue.SimpleQueue()
requests = Requests()  # of the job that runs in this process, if it is rank 0's


def _take_command(message: str) -> None:
    _commands.put(message)


def _take_request(message: str) -> None:
    if message:
        asked = json.loads(message)
        requests.ask(Ask(asked["what"]), asked["why"])


def ask(world: World, what: Ask, why: str) -> bool:
    """Ask something of the job, on any rank and in any thread.

    Rank 0 looks whether the others are there. These look for rank 0 alone: between two of them there is no way.

    Returns:
        False: one of those is gone, so nothing will come of it. One that does not answer in time is there: it may be
        busy, and what it is sent waits for it.
    """
    if world.rank == COORDINATOR_RANK:
        requests.ask(what, why)
        told = dict.fromkeys(range(1, world.size), "")
    else:
        told = {COORDINATOR_RANK: json.dumps({"what": what.value, "why": why})}
    if not world.is_distributed:
        return True
    try:
        sent = [rpc.rpc_async(name_of(r), _take_request, args=(text,), timeout=ASK_SECONDS) for r, text in told.items()]
    except RuntimeError as error:  # RPC itself has ended
        logger.warning("asked by %s, but this process has left the others: %s", why, error)
        return False
    return all(_is_there(rank, future, why) for rank, future in zip(told, sent, strict=True))


def _is_there(rank: int, taken: "torch.futures.Future[Any]", why: str) -> bool:
    try:
        taken.wait()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        logger.warning("asked by %s, but rank %d is %s: %s", why, rank, "late" if is_timeout(error) else "gone", said)
        return is_timeout(error)
    return True


class Worker(Protocol):
    """Carries out commands on the stages of one process."""

    def execute(self, do: str, arguments: dict[str, Any], emit: Callable[[Record], None]) -> list[Result]:
        """Do it; return one result per stage; hand records to ``emit`` as they arise."""
        ...


class WorkerGroup(Protocol):
    """All stages, wherever they are, as the coordinator sees them."""

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """Have every stage do it; return their results in the order of stages."""
        ...


class LocalWorkerGroup:
    """All stages in this process."""

    def __init__(self, worker: Worker, on_record: Callable[[Record], None]) -> None:
        self._worker, self._on_record = worker, on_record

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """See :class:`WorkerGroup`."""
        return self._worker.execute(do, arguments, self._on_record)


class RpcWorkerGroup:
    """One stage in each process; used by the coordinator's thread on rank 0."""

    def __init__(self, world: World, on_record: Callable[[Record], None], held_up_by: Callable[[], str | None]) -> None:
        """Take the processes of ``world``; ``held_up_by`` names the one that victims wait for in vain."""
        self._world, self._on_record, self._held_up_by = world, on_record, held_up_by

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """See :class:`WorkerGroup`.

        Raises:
            StageFailed: a stage reported an error instead of a result.
        """
        self.tell(do, **arguments)
        results: dict[int, list[Result]] = {}
        while len(results) < self._world.size:
            report = self._take_report()
            if "failed" in report:
                raise self._cause(report)
            if "results" in report:
                results[report["rank"]] = report["results"]
        return [result for rank in sorted(results) for result in results[rank]]

    def tell(self, do: str, **arguments: Any) -> "list[torch.futures.Future[Any]]":
        """Send a command without waiting for results; the futures say when it has arrived."""
        message = json.dumps({"do": do, "arguments": arguments})
        return [rpc.rpc_async(name_of(rank), _take_command, args=(message,)) for rank in range(self._world.size)]

    def stop_all(self, error: BaseException) -> None:
        """Tell all stages that it is over and why; return when they have heard, or are gone."""
        arguments = {
            "failed": str(error),
            "exit_code": getattr(error, "exit_code", 1),
            "is_victim": getattr(error, "is_victim", False),
            "is_gone": getattr(error, "is_gone", False),
        }
        message = json.dumps({"do": "stop", "arguments": arguments})
        with contextlib.suppress(RuntimeError):  # RPC itself has ended, or a peer does not answer
            futures = [
                rpc.rpc_async(name_of(rank), _take_command, args=(message,), timeout=CAUSE_SECONDS)
                for rank in range(self._world.size)
            ]
            for future in futures:
                with contextlib.suppress(RuntimeError):
                    future.wait()

    def _take_report(self, seconds: float | None = None) -> dict[str, Any]:
        report = next_report(seconds)
        for record in report.get("records", ()):
            self._on_record(record)
        return report

    def _cause(self, report: dict[str, Any]) -> StageFailed:
        """Prefer, among the failures that arrive together, the one that the others follow from."""
        deadline = time.monotonic() + CAUSE_SECONDS
        told = [report]
        while told[-1]["is_victim"] and (left := deadline - time.monotonic()) > 0:
            try:
                later = self._take_report(left)
            except queue.Empty:
                break
            if "failed" in later:
                told.append(later)
        for one in told:
            logger.error("rank %s failed:\n%s", one["rank"], one["traceback"])
        cause = min(told, key=lambda one: bool(one["is_victim"]))
        if cause["is_victim"] and (name := self._held_up_by()):
            cause = {**cause, "failed": f"{name}; {cause['failed']}", "is_victim": False, "is_gone": True}
        return StageFailed(**_failure(cause))


def serve(worker: Worker, world: World) -> Result:
    """Carry out commands in this (main) thread until told to stop.

    Returns:
        What the coordinator gave with the stop.

    Raises:
        StageFailed: the coordinator stopped everything because of another stage.
        AdlError: this stage failed; if it is for want of a rank 0 that is gone, by the name of that.
    """
    outbox = Reporter(world)
    while True:
        command = json.loads(_commands.get())
        arguments = command["arguments"]
        if command["do"] == "stop":
            if "failed" in arguments:
                raise StageFailed(**_failure(arguments))
            return dict(arguments["result"])
        try:
            results = worker.execute(command["do"], arguments, outbox.add)
            _report(results, outbox)
        except BaseException as error:
            is_reported = outbox.report_failure(error)
            if isinstance(error, ChannelError):
                if (explained := _explained(error, is_reported)) is not error:
                    raise explained from None
            elif is_reported and world.rank != COORDINATOR_RANK:
                # The coordinator first lets a save end that is under way, and this process may be writing its part.
                with contextlib.suppress(queue.Empty):
                    _commands.get(timeout=LAST_SAVE_SECONDS)
            raise


def _report(results: list[Result], outbox: Reporter) -> None:
    try:
        outbox.report(results=results)
    except ChannelError:
        # With the last result rank 0 is done, and may end before its answer has left; what it has told since is here.
        if _commands.empty():
            raise


def _explained(error: ChannelError, is_reported: bool) -> AdlError:
    """What a victim raises: the cause, once the coordinator has told it, or that rank 0 was gone by then."""
    deadline = time.monotonic() + HEARD_SECONDS + (LAST_SAVE_SECONDS if is_reported else 0.0)
    is_last = False
    told: dict[str, Any] | None = None
    while told is None and not is_last:
        # What rank 0 has said before it ended may still be under way.
        is_last = time.monotonic() >= deadline or rank0_status() is not None
        with contextlib.suppress(queue.Empty):
            told = json.loads(_commands.get(timeout=CAUSE_SECONDS))["arguments"]
    if told is not None:
        return StageFailed(**_failure(told)) if not told.get("is_victim", True) else error
    # A rank 0 that took the report was there when the channel broke; it ends, too, when it has told the others.
    name = None if is_reported else rank0_status()
    return ChannelError(f"{name}; {error}") if name else error


def _failure(told: dict[str, Any]) -> dict[str, Any]:
    return {"text": told["failed"], **{name: told[name] for name in ("exit_code", "is_victim", "is_gone")}}

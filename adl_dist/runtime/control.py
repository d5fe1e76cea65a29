"""The control plane: what the coordinator tells the stages, and what they report, over torch.distributed.rpc.

Messages are JSON: plain numbers and strings. RPC handlers only enqueue; the main thread of each process takes
its commands from the queue and is the only one that issues data-plane communication.
"""

import contextlib
import json
import logging
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.errors import AdlError, ChannelError
from adl_dist.runtime.reaching import reaching
from adl_dist.runtime.requests import Ask, Requests
from adl_dist.runtime.world import World, name_of

logger = logging.getLogger("adl_dist")

Record = dict[str, Any]
Result = dict[str, Any]

COORDINATOR_RANK = 0
REPORT_SECONDS = 0.2  # records travel in batches this far apart
CAUSE_SECONDS = 1.0  # how long a victim's report waits for that of its cause
# For which a victim waits to hear of it: rank 0 may look around, and give a save under way a moment, before it tells.
HEARD_SECONDS = 4 * CAUSE_SECONDS
ASK_SECONDS = 5.0  # within which a process that is there takes a request
TIMEOUT = "more than set timeout"  # what RPC says of a process that does not answer; of one that is gone it says why
LAST_SAVE_SECONDS = 60.0  # how long a run that ends with an error waits for the save that is under way

_commands: "queue.SimpleQueue[str]" = queue.SimpleQueue()
_reports: "queue.SimpleQueue[str]" = queue.SimpleQueue()
requests = Requests()  # of the job that runs in this process, if it is rank 0's


def _take_command(message: str) -> None:
    _commands.put(message)


def _take_report(message: str) -> None:
    _reports.put(message)


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
        is_late = TIMEOUT in said
        logger.warning("asked by %s, but rank %d is %s: %s", why, rank, "late" if is_late else "gone", said)
        return is_late
    return True


class Worker(Protocol):
    """Carries out commands on the stages of one process."""

    def execute(self, do: str, arguments: dict[str, Any], emit: Callable[[Record], None]) -> list[Result]:
        """Do it; return one result per stage; hand records to ``emit`` as they arise."""
        ...


class Crew(Protocol):
    """All stages, wherever they are, as the coordinator sees them."""

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """Have every stage do it; return their results in the order of stages."""
        ...


class StageFailed(AdlError, RuntimeError):
    """Another process failed; it has told its user why.

    Attributes:
        is_victim: it failed for want of yet another one, which could not say anything.
        is_gone: it could not say anything itself.
    """

    def __init__(self, text: str, *, exit_code: int, is_victim: bool = False, is_gone: bool = False) -> None:
        super().__init__(text)
        self.exit_code, self.is_victim, self.is_gone = exit_code, is_victim, is_gone


class LocalCrew:
    """All stages in this process."""

    def __init__(self, worker: Worker, on_record: Callable[[Record], None]) -> None:
        self._worker, self._on_record = worker, on_record

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """See :class:`Crew`."""
        return self._worker.execute(do, arguments, self._on_record)


class RpcCrew:
    """One stage in each process; used by the coordinator's thread on rank 0."""

    def __init__(self, world: World, on_record: Callable[[Record], None], held_up_by: Callable[[], str | None]) -> None:
        """Take the processes of ``world``; ``held_up_by`` names the one that victims wait for in vain."""
        self._world, self._on_record, self._held_up_by = world, on_record, held_up_by

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """See :class:`Crew`.

        Raises:
            StageFailed: a stage reported an error instead of a result.
        """
        self.tell(do, **arguments)
        results: dict[int, list[Result]] = {}
        while len(results) < self._world.size:
            report = json.loads(_reports.get())
            for record in report.get("records", ()):
                self._on_record(record)
            if "failed" in report:
                raise _cause(report, self._held_up_by)
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


def serve(worker: Worker, world: World) -> Result:
    """Carry out commands in this (main) thread until told to stop.

    Returns:
        What the coordinator gave with the stop.

    Raises:
        AdlError: this stage failed, or the coordinator stopped everything because of another.
    """
    outbox = _Outbox(world)
    while True:
        command = json.loads(_commands.get())
        arguments = command["arguments"]
        if command["do"] == "stop":
            if "failed" in arguments:
                raise StageFailed(**_failure(arguments))
            return dict(arguments["result"])
        try:
            results = worker.execute(command["do"], arguments, outbox.add)
            outbox.report(results=results)
        except BaseException as error:
            heard = outbox.report_failure(error)
            if isinstance(error, ChannelError):
                if cause := _cause_heard():
                    raise cause from None
            elif heard and world.rank != COORDINATOR_RANK:
                # The coordinator first lets a save end that is under way, and this process may be writing its part.
                with contextlib.suppress(queue.Empty):
                    _commands.get(timeout=LAST_SAVE_SECONDS)
            raise


def _cause_heard() -> StageFailed | None:
    """For a victim: what the coordinator has heard of the cause, or hears within a moment."""
    try:
        command = json.loads(_commands.get(timeout=HEARD_SECONDS))
    except queue.Empty:
        return None
    arguments = command["arguments"]
    return None if arguments.get("is_victim", True) else StageFailed(**_failure(arguments))


def _failure(told: dict[str, Any]) -> dict[str, Any]:
    return {"text": told["failed"], **{name: told[name] for name in ("exit_code", "is_victim", "is_gone")}}


class _Outbox:
    """Sends this process's records and results to the coordinator; training never waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: list[Record] = []
        self._sent_at = 0.0
        self._under_way: list[torch.futures.Future[Any]] = []

    def add(self, record: Record) -> None:
        self._records.append(record)
        if time.monotonic() - self._sent_at > REPORT_SECONDS:
            self._under_way = [f for f in self._under_way if not f.done()]
            self._under_way.append(self._send({}))

    def report(self, **message: Any) -> None:
        # RPC keeps no order between messages: the records sent before must be there before the result is.
        with reaching("rank 0"):
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
        if self._world.rank == COORDINATOR_RANK:
            _reports.put(json.dumps({"rank": self._world.rank, **failure}))
            return True
        try:
            self._send(failure).wait()
            return True
        except RuntimeError:
            logger.warning("could not report the failure to the coordinator: it is gone")
            return False

    def _send(self, message: dict[str, Any]) -> "torch.futures.Future[Any]":
        text = json.dumps({"rank": self._world.rank, "records": self._records, **message})
        self._records, self._sent_at = [], time.monotonic()
        future: torch.futures.Future[Any] = rpc.rpc_async(name_of(COORDINATOR_RANK), _take_report, args=(text,))
        return future


def report_gone(rank: int, text: str) -> None:
    """On rank 0: report, in place of ``rank``, that it is gone."""
    failure = {"failed": text, "traceback": text, "exit_code": 1, "is_victim": False, "is_gone": True}
    _reports.put(json.dumps({"rank": rank, **failure}))


def _cause(report: dict[str, Any], held_up_by: Callable[[], str | None]) -> StageFailed:
    """Prefer, among the failures that arrive together, the one that the others follow from."""
    deadline = time.monotonic() + CAUSE_SECONDS
    told = [report]
    while told[-1]["is_victim"] and (left := deadline - time.monotonic()) > 0:
        try:
            later = json.loads(_reports.get(timeout=left))
        except queue.Empty:
            break
        if "failed" in later:
            told.append(later)
    for one in told:
        logger.error("rank %s failed:\n%s", one["rank"], one["traceback"])
    cause = min(told, key=lambda one: bool(one["is_victim"]))
    if cause["is_victim"] and (name := held_up_by()):
        cause = {**cause, "failed": f"{name}; {cause['failed']}", "is_victim": False, "is_gone": True}
    return StageFailed(**_failure(cause))

"""The launcher of local processes: torch's, without an open port.

The launcher's rendezvous and the processes' own store are files in a private folder, so nothing listens
except the loopback connections of the data and control planes.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adl_dist.distributed import parent_process
from adl_dist.distributed.parent_process import LAUNCH_ID, LAUNCHER, RENDEZVOUS_FOLDER
from adl_dist.launch.signals import STOPPING, SignalEscalation, signal_name

USER_ERROR = 2  # exit code of a rank that would fail again
CODES = {0, 1, USER_ERROR, parent_process.STOPPED_CODE}  # of ranks that print why they end
AGENT_SECONDS = 30 - 1  # from the agent's SIGTERM to its SIGKILL, in timestamps of whole seconds
ENDING = (signal.SIGHUP, signal.SIGQUIT)  # handled by the agent, which then ends its ranks


def launch_local(
    arguments: Sequence[str], *, num_processes: int, max_restarts: int, passes_stops_on: bool = True
) -> int:
    """Run ``python -m adl_dist *arguments`` as several ranks.

    If a rank was killed, but not by SIGTERM or SIGINT, or ended without a message, all ranks are started again, at
    most ``max_restarts`` times. With ``passes_stops_on`` the first SIGTERM, SIGINT or SIGUSR1 asks training ranks to
    stop; the second ends them.

    Returns:
        The exit code: 0; 75 if the run was stopped; 2 if the user can fix the cause, otherwise 1; 128 + n after signal
        n.

    Raises:
        KeyboardInterrupt: If the run was interrupted; no rank is left.
    """
    # The agent repeats the messages of the ranks at length. Some of its loggers set their own level.
    narrator = logging.getLogger("torch.distributed.elastic")
    narrator.addHandler(logging.NullHandler())
    narrator.propagate = False
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ[LAUNCH_ID] = uuid.uuid4().hex
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks rendezvous in their folder
    handlers = {number: signal.getsignal(number) for number in (*ENDING, *STOPPING)}
    stopping = StopHandler(passes_stops_on)
    for number in STOPPING:
        if handlers[number] != signal.SIG_IGN:  # a shell ignores SIGINT for a background job
            signal.signal(number, stopping.handle)
    attempt = 0
    try:
        while True:
            attempt += 1
            try:
                return parent_process.STOPPED_CODE if _run_ranks(arguments, num_processes, stopping) else 0
            except ChildFailedError as failed:
                code = USER_ERROR if USER_ERROR in (f.exitcode for f in failed.failures.values()) else 1
                lost = _lost_ranks(failed)
                was_asked = stopping.asked_by is not None or {signal.SIGTERM, signal.SIGINT} & set(lost.values())
                restarts = bool(lost) and code != USER_ERROR and attempt <= max_restarts and not was_asked
                _report(lost, failed, f"restart {attempt} of {max_restarts}" if restarts else None)
                if not restarts:
                    return code
    except SignalException as ended:
        number = stopping.ended_by or ended.sigval
        if number == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.stderr.write(f"adl-dist: ended by {number.name}; the same command resumes the run\n")
        return 128 + number
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in (LAUNCHER, LAUNCH_ID, RENDEZVOUS_FOLDER):
            os.environ.pop(name, None)


class StopHandler:
    """The handler of SIGTERM, SIGINT and SIGUSR1 in the launcher.

    The first signal goes to rank 0, if rank 0 listens. Otherwise, and at the second signal, the agent ends its ranks at
    once. Ranks have their own sessions, so a Ctrl-C at the terminal reaches only the launcher.
    """

    def __init__(self, passes_on: bool) -> None:
        self._passes_on, self._escalation = passes_on, SignalEscalation()
        self.folder: Path | None = None  # of the ranks
        self.asked_by: signal.Signals | None = None
        self.ended_by: signal.Signals | None = None

    def handle(self, number: int, frame: object) -> None:
        """Ask rank 0 to stop, or end the ranks by SignalException."""
        name = signal.Signals(number)
        if self._passes_on and not self._escalation.ends_with(number):
            if self._reaches_rank_0(name):
                self.asked_by = self.asked_by or name
            if self.asked_by is not None:  # also while the stopped ranks are ending
                return
        self.ended_by = name
        # By SIGKILL: they may wait for messages, and the next start cleans up after them.
        raise SignalException(f"ended by {name.name}", sigval=signal.SIGKILL)

    def _reaches_rank_0(self, name: signal.Signals) -> bool:
        if self.folder is None or (pid := parent_process.read_flag(parent_process.LISTENS, self.folder)) is None:
            return False
        parent_process.write_flag(self.folder, parent_process.ASKED, name.name)
        with contextlib.suppress(ProcessLookupError):  # it has just died, which the agent will notice
            os.kill(int(pid), signal.SIGUSR1)
        return True


def _run_ranks(arguments: Sequence[str], num_processes: int, stopping: StopHandler) -> bool:
    """Run all ranks once; return whether they were stopped by a request."""
    # A new folder for each attempt, or the ranks would read the addresses of their dead predecessors.
    with tempfile.TemporaryDirectory(prefix="adl-dist-launch-", ignore_cleanup_errors=True) as name:
        os.environ[RENDEZVOUS_FOLDER] = name
        stopping.folder = folder = Path(name)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(folder / "agent"),
            rdzv_configs={"store_type": "file"},
            max_restarts=0,  # its own restarts are silent, and repeat mistakes of the user
            monitor_interval=0.1,
            local_addr="127.0.0.1",
            signals_to_handle=",".join(n.name for n in ENDING if signal.getsignal(n) != signal.SIG_IGN),  # nohup stands
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "adl_dist", *arguments)
            return parent_process.read_flag(parent_process.STOPPED, folder) is not None
        finally:
            stopping.folder = None


def _lost_ranks(failed: ChildFailedError) -> dict[int, int | None]:
    """Return {rank: signal or None} of ranks that ended without a message."""
    first, first_failure = failed.get_first_failure()
    lost = {}
    for rank, failure in sorted(failed.failures.items()):
        number = _signal_in(failure.exitcode)
        is_late = failure.timestamp - first_failure.timestamp >= AGENT_SECONDS
        ended_by_agent = rank != first and (number == signal.SIGTERM or (number == signal.SIGKILL and is_late))
        if not ended_by_agent and failure.exitcode not in CODES:
            lost[rank] = number
    return lost


def _report(lost: Mapping[int, int | None], failed: ChildFailedError, restart: str | None) -> None:
    """Report ranks that ended without an error message, and the next step."""
    for rank, number in lost.items():
        code = failed.failures[rank].exitcode  # by the user's code or a library, os._exit
        how = f"was killed by {signal_name(number)}" if number is not None else f"ended with exit code {code}"
        way_on = "the same command resumes the run" if restart is None else f"starting all ranks again ({restart})"
        sys.stderr.write(f"adl-dist: rank {rank} {how}; {way_on}\n")
    sys.stderr.flush()


def _signal_in(exit_code: int) -> int | None:
    """Return the signal in an exit code (-n or 128 + n), or None."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if 0 < number < signal.NSIG else None

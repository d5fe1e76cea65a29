"""Other processes at work, while something is measured: stages of one machine share its caches and its memory.

``python -m adl_dist.cli.plan.profiler JSON`` is one of them. It trains the same model over and over.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adl_dist.distributed.parent_process import LAUNCHER
from adl_dist.errors import ConfigError

READY = "ready"


class BackgroundLoad:
    """Processes that train, or rest: at rest they hold memory, but no core."""

    def __init__(self, running: Sequence["subprocess.Popen[str]"]) -> None:
        self._running = running
        self.are_at_work = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Have all of them train inside."""
        self.are_at_work = bool(self._running)
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)
            self.are_at_work = False

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._running]

    def _send(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)


@contextlib.contextmanager
def neighbours(
    num: int, overrides: Sequence[str], measurer: Mapping[str, Any], samples: int
) -> Iterator[BackgroundLoad]:
    """Start ``num`` processes, which rest at first, and end them behind.

    Args:
        num: of processes.
        overrides: of the configuration whose model they train.
        measurer: arguments of :class:`adl_dist.cli.plan.profiler.Profiler`.
        samples: of a micro-batch.

    Raises:
        ConfigError: one of them ended before it began.
    """
    told = json.dumps({"overrides": list(overrides), "measurer": dict(measurer), "samples": samples})
    command = [sys.executable, "-m", "adl_dist.cli.plan.profiler", told]
    environment = {**os.environ, LAUNCHER: str(os.getpid())}  # they end with us
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(num):
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(_end, process)
            running.append(process)
        for process in running:
            assert process.stdout is not None
            assert process.stderr is not None
            if process.stdout.readline().strip() != READY:
                last = (process.stderr.read().strip() or "it said nothing").splitlines()[-1]
                raise ConfigError(f"a second process could not train the model beside the one that measures: {last}")
            process.send_signal(signal.SIGSTOP)
        yield BackgroundLoad(running)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()

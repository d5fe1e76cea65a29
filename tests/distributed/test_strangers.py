"""A minute of strangers at every port that a run has: its weights and its speed. Skipped unless: `make test-fuzz`."""

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.commands import assert_same, weights_of
from tests.support.kill import ADL_DIST, Command
from tests.support.ports import Fuzzer, free_port, open_ports

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="finds ports in /proc"),
]

EPOCHS = 120  # of the default run: a minute on two cores
WORDS = (f"train.epochs={EPOCHS}", "runtime.threads=1", "runtime.tensorboard=false")
AGENT = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=adl-dist")
MODULE = ("-m", "adl_dist")


def own_launcher() -> list[Sequence[str]]:
    return [ADL_DIST]


def torchrun() -> list[Sequence[str]]:
    return [(*AGENT, "--nnodes=1", "--nproc-per-node=2", *MODULE)]


def two_agents() -> list[Sequence[str]]:
    agent = (*AGENT, "--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", *MODULE)
    return [agent, agent]


def trained(starts: list[Sequence[str]], folder: Path, *, strangers: bool) -> tuple[dict[str, Tensor], str, str]:
    """Its weights, its speed and what it has computed, and what the strangers met.

    The strangers compute on the same cores. What they cost the run itself is told by its own CPU seconds.
    """
    folder.mkdir()
    of_runs_before = _cpu_seconds(resource.RUSAGE_CHILDREN)
    with ExitStack() as commands:
        nodes = [
            commands.enter_context(Command(WORDS, folder=folder, start=start, node=str(place)))
            for place, start in enumerate(starts)
        ]
        nodes[0].wait_for_update(1, seconds=200)
        ranks = {pid for pid, rank in nodes[0].processes().items() if rank is not None}
        fuzzer = Fuzzer(lambda: open_ports(nodes[0].processes()))
        began, of_strangers_before = time.monotonic(), _cpu_seconds(resource.RUSAGE_SELF)
        with fuzzer if strangers else nullcontext():
            codes = [node.finish(seconds=400) for node in nodes]
        seconds, cpu_of_strangers = time.monotonic() - began, _cpu_seconds(resource.RUSAGE_SELF) - of_strangers_before
        assert codes == [0] * len(nodes), "".join(node.err for node in nodes)
        assert [node.err for node in nodes if "Traceback" in node.err] == []
    assert bool(fuzzer.attempts) == strangers
    assert [port for port in fuzzer.attempts if not port.is_on_loopback] == []
    assert [port for port in fuzzer.let_in if port.pid in ranks] == [], "at most the agents talk to strangers"
    cpu_of_run = _cpu_seconds(resource.RUSAGE_CHILDREN) - of_runs_before
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    speed = f"{summary['samples_per_second']:.0f} samples/s, {cpu_of_run:.0f} CPU s"
    met = f"{fuzzer.attempts.total()} attempts at {len(fuzzer.attempts)} ports in {seconds:.0f} s"
    return weights_of(folder), speed, f"{met} with {cpu_of_strangers:.0f} CPU s, {fuzzer.let_in.total()} let in"


def _cpu_seconds(of: int) -> float:
    """By ``resource.RUSAGE_SELF`` or ``RUSAGE_CHILDREN``: those that have ended, and theirs."""
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("starts", [own_launcher, torchrun, two_agents], ids=lambda one: one.__name__)
def test_a_minute_of_strangers_at_every_port_changes_no_bit(
    starts: Callable[[], list[Sequence[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    expected, speed_alone, _ = trained(starts(), tmp_path / "alone", strangers=False)
    found, speed, met = trained(starts(), tmp_path / "among strangers", strangers=True)
    told = f"{starts.__name__}: {met}; {speed}; alone {speed_alone}"
    record_property("measured", told)
    assert_same(found, expected)

"""No port of a run can be reached from outside, and who reaches one from inside can do no harm."""

import json
import signal
import sys
import time
from contextlib import ExitStack, nullcontext

import pytest

from tests.support.commands import assert_same, in_process, weights_of
from tests.support.kill import ADL_DIST, HELD_RUN, HOLD, Command
from tests.support.ports import Fuzzer, free_port, open_ports
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="finds ports in /proc")]

# DDG has its edges made in two goes, the second once the ports are shut.
WORDS = (*HELD_RUN, "method=ddg", "train.epochs=3")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=adl-dist", "--max-restarts=2")
MODULE = ("-m", "adl_dist")
ONE_NODE = (*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", *MODULE)
FUZZ_SECONDS = 1.0
A_MINUTE = ("train.epochs=120", "runtime.threads=1", "runtime.tensorboard=false")  # of the default run, on two cores


def one_of_two_nodes():
    return (*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", *MODULE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the run, trained in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert in_process("train", *WORDS, "runtime.processes=false", f"run_dir={folder / 'run'}").code == 0
    return weights_of(folder)


@pytest.mark.parametrize("start", [pytest.param(ADL_DIST, id="own launcher"), slow(ONE_NODE, id="torchrun")])
def test_a_run_listens_on_loopback_only_and_lets_no_stranger_in(start, tmp_path, undisturbed):
    (tmp_path / HOLD).touch()
    with Command(WORDS, folder=tmp_path, start=start) as run:
        run.wait_for_update(1)
        ports = open_ports(run.processes())
        assert {run.processes()[port.pid] for port in ports} == {0, 1}, "no agent or launcher listens, all ranks do"
        assert [port for port in ports if not port.is_on_loopback] == []
        with Fuzzer(lambda: ports) as fuzzer:
            time.sleep(FUZZ_SECONDS)
        (tmp_path / HOLD).unlink()
        assert run.finish() == 0, run.err
    assert set(fuzzer.attempts) == ports
    assert fuzzer.let_in == {}
    assert_same(weights_of(tmp_path), undisturbed)


@pytest.mark.slow
def test_two_nodes_restart_and_a_stranger_changes_no_bit(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    agent = one_of_two_nodes()
    (tmp_path / HOLD).touch()
    with (
        Command(WORDS, folder=tmp_path, start=agent) as first,
        Command(WORDS, folder=tmp_path, start=agent, node="second") as second,
    ):
        first.wait_for_update(10)  # in the second epoch: 126 samples make 8 updates
        ports = open_ports(first.processes())
        assert [port for port in ports if not port.is_on_loopback] == []
        store = {port for port in ports if first.processes()[port.pid] is None}
        assert len(store) == 1
        with Fuzzer(lambda: store, per_second=100) as fuzzer:
            time.sleep(1)
            first.send(signal.SIGKILL, rank=1)
            (tmp_path / HOLD).unlink()
            codes = [agent.finish() for agent in (first, second)]
        assert codes == [0, 0], first.err + second.err
    assert fuzzer.let_in.total() > 50
    assert "Traceback" not in first.err + second.err
    assert_same(weights_of(tmp_path), undisturbed)


def trained(starts, folder, *, strangers):
    """Its weights; its speed, and what the strangers met, who compute on the same cores."""
    folder.mkdir()
    with ExitStack() as commands:
        nodes = [
            commands.enter_context(Command(A_MINUTE, folder=folder, start=start, node=str(place)))
            for place, start in enumerate(starts)
        ]
        nodes[0].wait_for_update(1, seconds=200)
        ranks = {pid for pid, rank in nodes[0].processes().items() if rank is not None}
        fuzzer = Fuzzer(lambda: open_ports(nodes[0].processes()))
        with fuzzer if strangers else nullcontext():
            codes = [node.finish(seconds=400) for node in nodes]
        assert codes == [0] * len(nodes), "".join(node.err for node in nodes)
        assert [node.err for node in nodes if "Traceback" in node.err] == []
    assert bool(fuzzer.attempts) == strangers
    assert [port for port in fuzzer.attempts if not port.is_on_loopback] == []
    assert [port for port in fuzzer.let_in if port.pid in ranks] == [], "at most the agents talk to strangers"
    speed = json.loads((folder / "run" / "summary.json").read_text())["samples_per_second"]
    met = f"{fuzzer.attempts.total()} attempts at {len(fuzzer.attempts)} ports, {fuzzer.let_in.total()} let in"
    return weights_of(folder), f"{speed:.0f} samples/s; {met}"


@pytest.mark.fuzz
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["own launcher", "torchrun", "two agents"])
def test_a_minute_of_strangers_at_every_port_changes_no_bit(where, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    starts = {"own launcher": [ADL_DIST], "torchrun": [ONE_NODE], "two agents": [one_of_two_nodes()] * 2}[where]
    expected, alone = trained(starts, tmp_path / "alone", strangers=False)
    weights, measured = trained(starts, tmp_path / "strangers", strangers=True)
    record_property("measured", f"{where}: {measured}; alone {alone}")
    assert_same(weights, expected)

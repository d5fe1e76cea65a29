"""No port of a run can be reached from outside, and who reaches one from inside can do no harm."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.commands import assert_same, in_process, weights_of
from tests.support.kill import ADL_DIST, HOLD, Command
from tests.support.ports import Fuzzer, free_port, open_ports
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="finds ports in /proc")]

UPDATES_PER_EPOCH = 8  # 126 samples in updates of 16
WORDS = (
    "method=ddg",  # which has its edges made in two goes, the second once the doors are shut
    "model._target_=tests.support.kill.net_with_dropout",
    "data._target_=tests.support.kill.held_images",
    "train.batch_size=16",
    "train.epochs=3",
    "optimizer.lr=0.05",
    "runtime.threads=1",
    "runtime.tensorboard=false",
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=adl-dist", "--max-restarts=2")
MODULE = ("-m", "adl_dist")
FUZZ_SECONDS = 3.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the run, trained in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert in_process("train", *WORDS, "runtime.processes=false", f"run_dir={folder / 'run'}").code == 0
    return weights_of(folder)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(ADL_DIST, id="own launcher"),
        slow((*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", *MODULE), id="torchrun"),
    ],
)
def test_a_run_listens_on_loopback_only_and_lets_no_stranger_in(
    start: Sequence[str], tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """On one node a run listens on loopback only and strangers cannot even connect."""
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
def test_two_nodes_restart_and_a_stranger_changes_no_bit(
    tmp_path: Path, undisturbed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents of torchrun on this machine, joined by the interface that is named."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    agent = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    (tmp_path / HOLD).touch()
    with (
        Command(WORDS, folder=tmp_path, start=(*agent, *MODULE)) as first,
        Command(WORDS, folder=tmp_path, start=(*agent, *MODULE), node="second") as second,
    ):
        first.wait_for_update(UPDATES_PER_EPOCH + 2)
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

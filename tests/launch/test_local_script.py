"""``launch/local.sh``: torchrun on one machine."""

import json
import sys
from getpass import getuser
from signal import Signals

import pytest

from tests.support.commands import ROOT, as_command, left_behind, words
from tests.support.kill import Command

pytestmark = pytest.mark.ranks

SCRIPT = str(ROOT / "launch" / "local.sh")


@pytest.mark.slow
def test_the_script_for_one_machine_trains_under_torchrun(tmp_path):
    _, *settings = words(tmp_path / "run", "partition.num_stages=2", processes=True)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    outcome = as_command(SCRIPT, "2", *settings, env={"PYTHON": sys.executable, "TMPDIR": str(temporary)})
    assert outcome.code == 0, outcome
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getuser()}"}  # torch's cache
    assert left_behind(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_script_stops_the_run_which_saves(signal, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")  # which is for runs on several machines
    _, *settings = words(tmp_path / "run", "train.epochs=100000", processes=True)
    settings.remove(f"run_dir={tmp_path / 'run'}")
    without_train = ("bash", "-c", 'shift; exec "$0" 2 "$@"', SCRIPT)
    with Command(settings, folder=tmp_path, start=without_train) as run:
        run.wait_for_update(1)
        run.interrupt() if signal == "Ctrl-C" else run.send(Signals[signal], rank=None)
        code = run.finish(seconds=40)
    assert code == 1, run.err  # torchrun's own
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    assert stopped["why"] == ("SIGINT" if signal == "Ctrl-C" else "SIGTERM")
    assert left_behind(tmp_path) == []

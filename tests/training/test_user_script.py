"""The Python API and the command line as users start them: plainly, and under torchrun."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "user_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*command, cwd):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_a_users_script_learns_and_gives_the_same_bits_plainly_and_under_torchrun(tmp_path):
    plain = json.loads(run(sys.executable, SCRIPT, "plain", cwd=tmp_path).stdout)
    under_torchrun = json.loads(run(*TORCHRUN, SCRIPT, "torchrun", cwd=tmp_path).stdout)
    assert under_torchrun == plain
    assert plain["accuracy"] >= 0.9
    assert plain["keys"][0] == "0.0.weight"
    assert {p.name for p in (tmp_path / "torchrun" / "logs").iterdir()} == {"rank0.log", "rank1.log"}


@pytest.mark.timeout(300)  # three commands, one of which trains
def test_the_digits_are_learnt_by_two_processes_and_export_and_evaluate_agree(tmp_path):
    """The main job, shortened to 6 epochs: train, evaluate, export, load into the uncut model."""
    command = [sys.executable, "-m", "adl_dist"]
    options = ["run_dir=run", "train.epochs=6", "runtime.tensorboard=false"]
    trained = run(*command, "train", *options, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation_accuracy"] >= 0.95
    assert f"validation accuracy {summary['validation_accuracy']:.2%}" in trained.stdout
    assert trained.stderr == ""
    assert [s["staleness_max"] for s in summary["stages"]] == [1, 0]

    evaluated = run(*command, "evaluate", "run_dir=run", cwd=tmp_path).stdout
    assert f"validation accuracy {summary['validation_accuracy']:.2%}, 360 samples" in evaluated

    run(*command, "export", "run_dir=run", "out=model.pt", cwd=tmp_path)
    check = (
        "import torch; from adl_dist.models import cifar_resnet; from adl_dist.data import digits\n"
        "model = cifar_resnet(8, in_channels=1); model.load_state_dict(torch.load('model.pt', weights_only=True))\n"
        "_, data = digits(); x, y = zip(*data); model.eval()\n"
        "print(sum(int(model(a[None]).argmax()) == int(b) for a, b in zip(x, y)))"
    )
    correct = int(run(sys.executable, "-c", check, cwd=tmp_path).stdout)
    assert correct == round(summary["validation_accuracy"] * 360)


def test_the_schedule_command_prints_the_tick_table(tmp_path):
    shown = run(sys.executable, "-m", "adl_dist", "schedule", "partition.num_stages=3", cwd=tmp_path).stdout
    assert "stage 0  F0" in shown
    assert "F4 B0" in shown
    assert not list(tmp_path.iterdir())

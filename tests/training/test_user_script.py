"""The Python API and the command line as users start them: plainly, and under torchrun."""

import json

import pytest
import torch

from adl_dist.data import digits
from adl_dist.models import cifar_resnet
from tests.support import user_script
from tests.support.commands import TORCHRUN, as_command, in_process
from tests.support.ranks import command_on_ranks

pytestmark = pytest.mark.ranks


def test_a_users_script_gives_the_same_bits_under_torchrun(tmp_path, capsys):
    user_script.main(str(tmp_path / "plain"))
    plain = json.loads(capsys.readouterr().out)
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=2", user_script.__file__, "torchrun")
    done = as_command(*command, cwd=tmp_path, timeout_seconds=100)
    assert done.code == 0, done.err
    assert "tensorpipe" not in done.err, "RPC takes the end of the others for a fault"
    assert json.loads(done.out) == plain
    assert plain["accuracy"] >= 0.9
    assert plain["keys"][0] == "0.0.weight"
    assert {p.name for p in (tmp_path / "torchrun" / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_the_digits_are_learnt_and_export_and_evaluate_agree(tmp_path):
    """The main job in two processes, shortened to 2 epochs: train, evaluate, export, load into the uncut model."""
    run_dir, out = tmp_path / "run", tmp_path / "model.pt"
    trained = command_on_ranks(2, "train", f"run_dir={run_dir}", "train.epochs=2", "runtime.tensorboard=false")
    assert (trained.code, trained.err) == (0, "")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["validation_accuracy"] >= 0.85
    assert f"validation accuracy {summary['validation_accuracy']:.2%}" in trained.out
    assert [s["staleness_max"] for s in summary["stages"]] == [1, 0]

    evaluated = in_process("evaluate", f"run_dir={run_dir}").out
    assert f"validation accuracy {summary['validation_accuracy']:.2%}, 360 samples" in evaluated

    assert in_process("export", f"run_dir={run_dir}", f"out={out}").code == 0
    model = cifar_resnet(8, in_channels=1)
    model.load_state_dict(torch.load(out, weights_only=True))
    x, y = zip(*digits()[1], strict=True)
    model.eval()
    correct = int((model(torch.stack(x)).argmax(1) == torch.tensor(y)).sum())
    assert correct == round(summary["validation_accuracy"] * 360)

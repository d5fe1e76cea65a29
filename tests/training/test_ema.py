"""The moving average of the weights is torch's AveragedModel, once per update, in any cut and after any resume."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adl_dist.errors import ConfigError
from tests.support.commands import assert_same, in_process, words
from tests.support.equations import assert_close, plain_loop
from tests.support.runs import nan_inputs, sgd, toy_trainer, trained
from tests.support.tied import SHARED, TIED_BALANCE, tied_net
from tests.support.toys import FixedImages, batch_norm_net

DECAY, M = 0.9, 2


def by_torch():
    """A plain loop with torch's AveragedModel: its state under the model's own names."""
    model = batch_norm_net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    step = partial(average.update_parameters, model)
    plain_loop(model, sgd(model.parameters()), M=M, dtype=torch.float32, after_step=step)
    return average.module.state_dict()


def averaged(K, *, method="adl", **options):
    """The averages, and the weights, of a run."""
    trainer, _ = trained(K, M, torch.float32, method=method, ema=DECAY, **options)
    return trainer.full_state_dict(ema=True), trainer.full_state_dict()


@pytest.mark.parametrize("K", [1, 3])
def test_the_average_is_that_of_torchs_averaged_model(K):
    average, weights = averaged(K, method="bp" if K == 1 else "1f1b")
    assert_same(average, by_torch())
    without, _ = trained(K, M, torch.float32, method="bp" if K == 1 else "1f1b")
    assert_same(weights, without.full_state_dict())
    assert not torch.equal(average["6.2.weight"], weights["6.2.weight"])
    assert torch.equal(average["0.1.running_mean"], weights["0.1.running_mean"])


def test_the_average_is_evaluated_and_the_weights_are_kept():
    trainer, _ = trained(3, M, torch.float32, ema=DECAY)
    data, weights = FixedImages(10, seed=1, dtype=torch.float32), trainer.full_state_dict()
    found = trainer.evaluate(data, ema=True)["validation_loss"]
    model = batch_norm_net().eval()
    model.load_state_dict(trainer.full_state_dict(ema=True))
    with torch.no_grad():
        losses = [cross_entropy(model(x[None]), torch.tensor([y])) for x, y in map(data.__getitem__, range(10))]
    assert found == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    assert found != pytest.approx(trainer.evaluate(data)["validation_loss"], rel=1e-6)
    assert_same(trainer.full_state_dict(), weights)


def test_an_average_that_was_not_made_is_refused_at_once():
    """Before the model is cut or data is read."""
    for call in (lambda trainer: trainer.evaluate(None, batch_size=2, ema=True), lambda t: t.full_state_dict(ema=True)):
        with pytest.raises(ConfigError, match="ema=True: there is no average of these weights; give Trainer"):
            call(toy_trainer(2))


def test_weights_of_a_checkpoint_have_no_average_of_a_run(tmp_path):
    trainer = toy_trainer(2, ema=DECAY)
    trainer.fit(FixedImages(12), epochs=1, batch_size=4, run_dir=tmp_path)
    average = trainer.full_state_dict(ema=True)
    trainer.load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"or load it by load_checkpoint\(path, ema=True\) and omit"):
        trainer.full_state_dict(ema=True)
    trainer.load_checkpoint(tmp_path, ema=True)
    assert_same(trainer.full_state_dict(), average)


def test_an_update_that_is_skipped_is_not_averaged():
    steps = []

    def watched(parameters):
        optimizer = sgd(parameters)
        weight = optimizer.param_groups[0]["params"][-2]
        optimizer.register_step_post_hook(lambda *_: steps.append(weight.detach().clone()))
        return optimizer

    options = {"optimizer": watched, "non_finite": "skip", "plant": nan_inputs, "ema": DECAY}
    trainer, summary = trained(1, M, torch.float32, method="bp", **options)
    assert summary["skipped_updates"] > 0
    expected = steps[0]
    for weight in steps[1:]:
        expected = expected.lerp(weight, 1 - DECAY)
    assert torch.equal(trainer.full_state_dict(ema=True)["6.2.weight"], expected)


def test_the_commands_evaluate_and_export_the_average(tmp_path):
    run, out = tmp_path / "run", tmp_path / "average.pt"
    given = ["partition.num_stages=1", "method=bp", "optimizer.lr=0.3"]
    assert in_process(*words(run, "train.ema=0.5", "train.epochs=2", *given)).code == 0
    plain, average = (in_process("evaluate", f"{run}", *more) for more in ([], ["ema=true"]))
    assert (plain.code, average.code) == (0, 0)
    assert plain.out != average.out
    assert in_process("export", f"{run}", f"out={out}", "ema=true").code == 0
    (file,) = run.glob("checkpoints/update-00000004/ema-*")
    exported, averages = torch.load(out), load_file(file)
    assert averages.keys() == {name for name in exported if name.endswith(("weight", "bias"))}
    assert all(torch.equal(exported[name], tensor) for name, tensor in averages.items())
    assert "ema=yes: expected true or false" in in_process("evaluate", f"{run}", "ema=yes").refusal()


def averaged_tied(K, method):
    """The averages of a net with tied weights."""
    options = {"model": tied_net, "balance": TIED_BALANCE[K], "epochs": 2, "method": method, "ema": DECAY}
    return trained(K, M, torch.float64, **options)[0].full_state_dict(ema=True)


def test_tied_weights_of_several_stages_are_averaged_as_one():
    assert_close(averaged_tied(3, "1f1b"), averaged_tied(1, "bp"))


def test_copies_have_equal_averages_that_are_saved_once(tmp_path):
    options = {"model": tied_net, "balance": TIED_BALANCE[3], "ema": DECAY, "run_dir": tmp_path}
    average = trained(3, M, torch.float64, epochs=1, **options)[0].full_state_dict(ema=True)
    for first, *others in SHARED:
        for name in others:
            assert torch.equal(average[first], average[name]), name
    saved = [name for file in tmp_path.glob("checkpoints/*/ema-*") for name in load_file(file)]
    assert sorted(saved) == sorted(name for name, _ in tied_net().named_parameters())
    out = tmp_path / "average.pt"
    assert in_process("export", str(tmp_path), f"out={out}", "ema=true").code == 0
    assert_same(torch.load(out), average)

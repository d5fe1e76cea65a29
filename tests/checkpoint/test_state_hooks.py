"""Models whose ``state_dict()`` does not return their own memory: weights could not be put back, and are refused."""

import pytest
import torch
from torch import nn

from adl_dist.errors import ConfigError
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

COPIES = "returns another tensor than the module's own"


def copies(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()


def transposes(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0)


def drops(module, state, prefix, _):
    del state[f"{prefix}bias"]


class SavesACopy(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 1


def net(hook=None):
    model = batch_norm_net()
    if isinstance(hook, type):
        model[6][2] = hook(4, 5)
    elif hook is not None:
        model[6][2].register_state_dict_post_hook(hook)
    return model


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (copies, rf"6\.2\.weight of the model cannot be put back: state_dict\(\) {COPIES}"),
        (transposes, rf"6\.2\.weight of the model cannot be put back: state_dict\(\) {COPIES}"),
        (SavesACopy, rf"6\.2\.weight of the model cannot be put back: state_dict\(\) {COPIES}"),
        (drops, r"6\.2\.bias of the model cannot be put back: state_dict\(\) leaves out this trained parameter"),
    ],
)
def test_a_state_dict_that_is_not_the_model_s_memory_is_refused(hook, told, K):
    with pytest.raises(ConfigError, match=told):
        toy_trainer(K, model=net(hook))


def detaches(module, state, prefix, _):
    state.update({name: tensor.detach() for name, tensor in state.items()})


def test_a_hook_that_keeps_the_memory_is_harmless(tmp_path):
    for hook, folder in ((detaches, "one"), (None, "other")):
        for epochs in (1, 2):
            trainer = toy_trainer(2, model=net(hook))
            trainer.fit(FixedImages(8), epochs=epochs, batch_size=4, run_dir=tmp_path / folder, monitoring=QUIET)
        if hook is not None:
            found = trainer.full_state_dict()
    assert_same(found, trainer.full_state_dict())


def test_frozen_weights_may_be_left_out():
    model = net(drops)
    model[6][2].requires_grad_(False)
    assert "6.2.bias" not in toy_trainer(2, model=model).full_state_dict()
    assert torch.equal(model[6][2].bias, net()[6][2].bias)

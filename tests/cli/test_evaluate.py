"""``adl-dist evaluate`` on other data than those of the run."""

import torch
from torch import nn

from tests.support.commands import in_process

RUN = ["data._target_=tests.cli.test_evaluate.datasets", "model._target_=tests.cli.test_evaluate.net"]
ONE = ["partition.num_stages=1", "train.epochs=1", "train.batch_size=8", "runtime.tensorboard=false"]


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def datasets(num_samples=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_samples, 4, generator=generator)
    data = torch.utils.data.TensorDataset(images, torch.randint(3, (num_samples,), generator=generator))
    return data, data


def test_data_of_other_settings_are_evaluated_and_no_others(tmp_path):
    folder = str(tmp_path / "run")
    assert in_process("train", f"run_dir={folder}", *RUN, *ONE).code == 0
    own, fewer, others = (in_process("evaluate", folder, *w) for w in ([], ["data.num_samples=5"], ["data.seed=1"]))
    assert [", 24 samples" in own.out, ", 5 samples" in fewer.out, ", 24 samples" in others.out] == [True] * 3
    assert own.out != others.out
    unknown = in_process("evaluate", folder, "data.size=5")
    expected = "there is no key 'data.size' in the data of this run, which takes num_samples, seed"
    assert (unknown.code, expected in unknown.err) == (2, True)

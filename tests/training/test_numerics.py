"""What torch keeps for a whole process is set while we compute, and only then."""

import pytest
import torch
from torch import nn

import adl_dist
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET, values

cuda, cudnn = torch.backends.cuda, torch.backends.cudnn


def flags():
    precisions = (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    return [p == "tf32" for p in precisions], cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


class Witness(nn.Module):
    """Notes the flags that its forward meets."""

    def forward(self, x):
        self.seen = flags()
        return x


def seen_and_left(**options):
    model = nn.Sequential(*batch_norm_net(), Witness())
    trainer = adl_dist.Trainer(
        model, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, num_stages=2, **values(**options)
    )
    trainer.fit(FixedImages(8), epochs=1, batch_size=8, monitoring=QUIET)
    return model[-1].seen, flags()


@pytest.mark.parametrize(("tf32", "benchmark"), [(False, False), (True, False), (False, True)])
def test_tf32_and_kernels_are_as_said_while_stages_compute(tf32, benchmark):
    """TF32 and the choice of kernels are as said while stages compute and as before afterwards."""
    before = flags()
    seen, left = seen_and_left(tf32=tf32, cudnn_benchmark=benchmark)
    assert seen == ([tf32] * 3, tf32, tf32, benchmark)
    assert left == before


def test_full_precision_is_the_default():
    assert cudnn.allow_tf32
    assert seen_and_left()[0] == ([False] * 3, False, False, False)

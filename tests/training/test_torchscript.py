"""Modules of TorchScript as units: their weights move on with every version, as those of plain modules do."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.equations import assert_close
from tests.support.runs import toy_trainer
from tests.support.values import SILENT

WIDTH, CLASSES = 6, 5

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")


def block():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def net(as_script):
    torch.manual_seed(0)
    return nn.Sequential(as_script(block()), block(), as_script(block()), nn.Linear(WIDTH, CLASSES)).double()


def traced(module):
    return torch.jit.trace(module.double(), torch.ones(2, WIDTH, dtype=torch.float64))


def trained(as_script, method):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, WIDTH, generator=generator).double(), torch.randint(CLASSES, (32,), generator=generator)
    )
    trainer = toy_trainer(2, 2, method, model=net(as_script), balance="even", granularity="block", dtype=torch.float64)
    trainer.fit(data, val_dataset=data, epochs=2, batch_size=4, monitoring=SILENT)
    return trainer.full_state_dict()


@pytest.mark.parametrize("method", ["adl", "2bw", "bp"])
@pytest.mark.parametrize("as_script", [torch.jit.script, traced])
def test_torchscript_trains_as_the_same_blocks_in_python(as_script, method):
    """But for rounding: TorchScript has formulas of its own for some gradients."""
    assert_close(trained(as_script, method), trained(lambda module: module, method))

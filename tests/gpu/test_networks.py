"""Networks of libraries, cut into three stages on one GPU, train as on the CPU.

`make test-gpu`; skipped without a GPU.
"""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import cifar_resnet
from tests.support.equations import assert_close, differ
from tests.support.runs import toy_trainer
from tests.support.values import SILENT

pytest.importorskip("transformers")
from tests.support.hf_models import CLASSES, FAMILIES, hf_input, hf_net

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM = 12
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def resnet():
    torch.manual_seed(0)
    return cifar_resnet(20)


def network(name):
    """Return the network, its loss and its data."""
    x = torch.randn(NUM, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(NUM) % CLASSES
    if name == "resnet20":
        return resnet(), nn.CrossEntropyLoss(), TensorDataset(x, y)
    x = hf_input(name, NUM, masked=False)
    if FAMILIES[name][1] == "causal-lm":
        return hf_net(name), TokenCrossEntropy(), TensorDataset(x, x)
    return hf_net(name), nn.CrossEntropyLoss(), TensorDataset(x.double() if x.is_floating_point() else x, y)


def trained(name, device):
    model, loss_fn, data = network(name)
    # The default cut follows the work of the kernels, which another device counts otherwise.
    of_trainer = {"device": device, "dtype": torch.float64, "deterministic": True, "balance": "even"}
    trainer = toy_trainer(3, 2, model=model, loss_fn=loss_fn, optimizer=sgd, timeout_seconds=60, **of_trainer)
    trainer.fit(data, epochs=2, batch_size=4, monitoring=SILENT)
    return trainer.full_state_dict()


IN_FLOAT32 = ("llama", "gemma3")  # norms and rotary tables, whatever the weights are


@pytest.mark.parametrize("name", ["resnet20", "gpt2", "bert", "vit", "swin", "convnext", *IN_FLOAT32])
def test_a_network_on_the_gpu_trains_as_on_the_cpu(name):
    on_cpu = trained(name, "cpu")
    assert_close(trained(name, "cuda"), on_cpu, tolerance=1e-5 if name in IN_FLOAT32 else 1e-9)
    assert differ(on_cpu, network(name)[0].double().state_dict()) > 1e-3

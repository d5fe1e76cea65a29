"""What torch.fx, or a cut, would get wrong without a word: done right, or refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.models import torchvision_model
from adl_dist.partition import linearise
from tests.support.values import QUIET

NUM_CLASSES = 3
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % NUM_CLASSES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.calls = 0


class ComplexNumbers(Net):
    def forward(self, x):
        h = self.a(x)
        return self.c(torch.relu(self.b(torch.fft.fft(torch.complex(h, 2 * h)).abs())))


class WrittenAfterItIsRead(Net):
    def forward(self, x):
        h, old = self.a(x), 2 * self.scale + 1
        self.scale.add_(1)
        return self.c(torch.relu(self.b(h)) * old)


class WrittenByOut(Net):
    def forward(self, x):
        h = self.a(x)
        torch.add(self.scale, 1.0, out=self.scale)
        return self.c(torch.relu(self.b(h)) * self.scale)


class WrittenByPlusEquals(Net):
    def forward(self, x):
        h, scale = self.a(x), self.scale
        scale += 1.0
        return self.c(torch.relu(self.b(h)) * scale)


class TwoNamesOfOneTensor(Net):
    def forward(self, x):
        x = self.a(x)
        h = x
        h += 1.0
        return self.c(torch.relu(self.b(x) + h))


class AsksForGradients(Net):
    def forward(self, x):
        h = self.a(x)
        if torch.is_grad_enabled():
            h = 2 * h
        return self.c(torch.relu(self.b(h)))


class MadeFromShapes(Net):
    def forward(self, x):
        h = self.a(x)
        places = torch.arange(x.shape[0], dtype=x.dtype)
        return self.c(torch.relu(self.b(h)) + torch.zeros(h.shape[0], 8, dtype=h.dtype) + places[:, None])


class CountsPlusEquals(Net):
    def forward(self, x):
        n = x.shape[0]
        n += 1
        return self.c(torch.relu(self.b(self.a(x))) / n)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def plain_loop(make):
    model = make().double()
    optimizer = sgd(model.parameters())
    for start in (0, 4):
        nn.functional.cross_entropy(model(X[start : start + 4]), Y[start : start + 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # a forward may write to it
    with torch.no_grad():
        evaluated = nn.functional.cross_entropy(model.eval()(X), Y).item()
    return state, evaluated


def trained(make, sizes):
    trainer = adl_dist.Trainer(
        make(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        method=adl_dist.method("bp", accumulation_steps=1),
        num_stages=2,
        partition=adl_dist.PartitionSpec(balance=sizes, granularity="layer"),
        precision=adl_dist.Precision(dtype=torch.float64),
    )
    data = TensorDataset(X, Y)
    trainer.fit(data, epochs=1, batch_size=4, shuffle=False, monitoring=QUIET)
    state = trainer.full_state_dict()
    return state, trainer.evaluate(data, batch_size=8)["validation_loss"]


@pytest.mark.parametrize(
    "make",
    [
        *(ComplexNumbers, WrittenAfterItIsRead, WrittenByOut, WrittenByPlusEquals, TwoNamesOfOneTensor),
        *(AsksForGradients, MadeFromShapes, CountsPlusEquals),
    ],
    ids=lambda make: make.__name__,
)
def test_cut_anywhere_training_is_that_of_the_plain_loop(make):
    """Wherever it can be cut training and evaluation are those of the plain loop."""
    chain, (expected, evaluated) = linearise(make().double(), granularity="layer"), plain_loop(make)
    places = [cut for cut in range(len(chain.units) - 1) if cut not in chain.forbidden]
    assert places
    for cut in places:
        state, loss = trained(make, [cut + 1, len(chain.units) - cut - 1])
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-13, msg=f"{name}, cut behind unit {cut}")
        assert loss == pytest.approx(evaluated, abs=1e-12)


class Counter(Net):
    def forward(self, x):
        self.calls += 1
        return self.c(self.b(self.a(x)) / self.calls)


class NumpyDraws(Net):
    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(torch.relu(h) if np.random.rand() < 0.5 else h))


class Autocast(Net):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(h)
        return self.c(h)


class NamedByPython(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"for": nn.Linear(8, 8)})

    def forward(self, x):
        return self.c(self.layers["for"](self.a(x)))


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.b = nn.LazyLinear(8)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class SharedMemory(Net):
    def forward(self, x):
        x = self.a(x)
        halves = x.view(-1, 2, 4)
        halves *= 2.0
        return self.c(self.b(x) + x)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (Counter, [1, 3], "assigns to calls, which a cut model would not"),
        (NumpyDraws, [1, 2], "draws random numbers that do not depend on its input"),
        (Autocast, [1, 2], r"torch.autocast would not be read.*torch.fx.wrap"),
        (NamedByPython, [1, 2], "has a name that Python keeps for itself, like 'for'; rename it"),
        (Lazy, [1, 2], r"b.weight of the model has no shape yet; run the model on one batch"),
        (SharedMemory, [1, 4], r"writes in place to one that shares its memory with another.*cut elsewhere"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_go_wrong_is_refused(make, sizes, message):
    random = np.random.get_state()[1].copy()
    with pytest.raises(AdlError, match=message) as refused:
        trained(make, sizes)
    assert isinstance(refused.value, (ConfigError, PartitionError))
    assert (np.random.get_state()[1] == random).all()


class FirstIfSeveral(nn.Module):
    """Of a model with auxiliary heads the main output; in evaluation it is the only one."""

    def forward(self, out, target):
        return nn.functional.cross_entropy(out if isinstance(out, torch.Tensor) else out.logits, target)


def test_a_stage_that_overwrites_one_tensor_evaluates():
    """GoogLeNet's heads cross this cut in training only, and the stage behind it begins with a ReLU in place."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4, 3, 64, 64), torch.arange(4))
    trainer = adl_dist.Trainer(
        torchvision_model("googlenet", num_classes=5, aux_logits=True),
        loss_fn=FirstIfSeveral(),
        optimizer=sgd,
        method=adl_dist.method("adl", accumulation_steps=2),
        num_stages=2,
        partition=adl_dist.PartitionSpec(balance=["inception4b.branch1.relu"]),
    )
    summary = trainer.fit(data, epochs=1, batch_size=4, val_dataset=data, monitoring=QUIET)
    assert summary["updates"] == 1
    assert summary["validation_loss"] > 0

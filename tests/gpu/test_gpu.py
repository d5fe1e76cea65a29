"""The same values on a GPU. Skipped without one: `make test ARGS='-m gpu'` runs only these."""

import pytest
import torch

from adl_dist.schedule import METHODS
from tests.support.ranks import run_ranks
from tests.support.toys import FixedImages, batch_norm_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# float64 on both sides: the sums of a GPU kernel come in another order, which costs a few last digits per update.
TOLERANCE = 1e-9


def train(K, device, dropout=0.0, name="adl", **options):
    import adl_dist

    trainer = adl_dist.Trainer(
        batch_norm_net(dropout=dropout),
        loss_fn=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        method=adl_dist.method(name, accumulation_steps=2, **options),
        num_stages=K,
        device=device,
        dtype=torch.float64,
        timeout_seconds=60,
    )
    data = FixedImages(32, dtype=torch.float64)
    trainer.fit(data, epochs=2, batch_size=6, val_dataset=data, quiet=True)
    return trainer.full_state_dict()


@pytest.mark.parametrize("K", [1, 2, 4])
def test_all_stages_on_one_gpu_equal_the_cpu(K):
    expected = train(K, "cpu")
    for name, tensor in train(K, "cuda").items():
        torch.testing.assert_close(tensor, expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


# dgl's MLP heads normalise over samples, which turns rounding into more than rounding on micro-batches of 3.
VARIANTS = [
    *((name, {}) for name in METHODS if name not in ("adl", "dgl")),
    ("dgl", {"head": "cnn"}),
    ("dgl", {"head": "linear", "buffer_size": 3}),
    ("adl", {"weights": "latest"}),
    ("adl", {"weights": "recompute"}),
    ("gpipe", {"recompute": "except_last"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[" ".join([n, *map(str, o.values())]) for n, o in VARIANTS])
def test_every_method_on_one_gpu_equals_the_cpu(name, options):
    expected = train(3, "cpu", name=name, **options)
    for tensor_name, tensor in train(3, "cuda", name=name, **options).items():
        torch.testing.assert_close(tensor, expected[tensor_name], rtol=TOLERANCE, atol=TOLERANCE, msg=tensor_name)


def test_recomputation_on_the_gpu_replays_dropout():
    plain = train(3, "cuda", dropout=0.3, name="gpipe")
    replayed = train(3, "cuda", dropout=0.3, name="gpipe", recompute="always")
    assert all(torch.equal(plain[n], replayed[n]) for n in plain)


def test_dropout_on_the_gpu_is_repeated_bit_for_bit():
    first, second = train(2, "cuda", dropout=0.3), train(2, "cuda", dropout=0.3)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_two_processes_equal_one_on_the_gpu():
    """With one GPU the processes share it and messages go through pinned host memory; with two, through NCCL."""
    expected = train(2, "cuda")
    for state in run_ranks(2, train, 2, "cuda", timeout_seconds=110):
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)

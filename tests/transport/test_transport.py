"""What travels on an edge: several tensors, their memory format, and what is refused."""

import datetime
import functools
import os
import time

import pytest
import torch
from torch import nn

from adl_dist.distributed.world import connect
from adl_dist.errors import ChannelError, PartitionError
from adl_dist.transport.process import ProcessReceiver, ProcessSender, connect_edges
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.wire import LocalChannel, Wire
from tests.support.oracle import train_by_the_equations
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.slices import cut
from tests.support.toys import FixedImages, tuple_net
from tests.support.values import QUIET

IMAGE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
plain_sgd = functools.partial(torch.optim.SGD, lr=0.1)
in_both_formats = pytest.mark.parametrize("channels_last", [False, True])


def image(channels_last):
    return IMAGE.to(memory_format=torch.channels_last) if channels_last else IMAGE


def train_tuples():
    options = {"balance": EVEN, "optimizer": plain_sgd, "dtype": torch.float64, "timeout_seconds": 30}
    trainer = toy_trainer(K, 2, model=tuple_net(), **options)
    data = FixedImages(13, dtype=torch.float64)
    trainer.fit(data, epochs=2, batch_size=6, val_dataset=data, shuffle=False, monitoring=QUIET)
    return trainer.full_state_dict()


NUM_UNITS = len(tuple_net())
K = 3
EVEN = [NUM_UNITS * (k + 1) // K - NUM_UNITS * k // K for k in range(K)]


def test_several_tensors_per_edge_follow_the_equations():
    data = FixedImages(13, dtype=torch.float64)
    batches = [(data.images[i : i + 3], torch.tensor(data.labels[i : i + 3])) for i in range(0, 13, 3)]
    expected = train_by_the_equations(
        cut(tuple_net().double(), num_stages=K, balance=EVEN),
        [batches] * 2,
        M=2,
        loss_fn=nn.CrossEntropyLoss(),
        lr=[0.1] * 6,
    )
    in_one = train_tuples()
    for name in expected:
        torch.testing.assert_close(in_one[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
    for state in run_ranks(K, train_tuples):
        assert all(torch.equal(state[name], in_one[name]) for name in in_one)


@in_both_formats
def test_a_spec_describes_a_tensor_and_makes_others_of_its_kind(channels_last):
    """A tensor in the agreed format is sent without a copy and any other is converted."""
    tensor, other = image(channels_last), image(not channels_last)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec((3, 4, 5), "float32", (0, 2, 3, 1) if channels_last else ())
    made = spec.empty(2, torch.device("cpu"))
    assert (made.shape, made.dtype, made.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert spec.as_wire(made).is_contiguous()
    assert spec.fit(tensor, 2, str).data_ptr() == tensor.data_ptr()
    converted = spec.fit(other, 2, str)
    assert converted.stride() == tensor.stride()
    assert torch.equal(converted, IMAGE)


def test_a_transposed_tensor_keeps_its_layout_in_memory():
    tokens = torch.arange(24.0).reshape(2, 3, 4)
    spec = TensorSpec.of(tokens.transpose(1, 2))
    assert (spec.shape, spec.order) == ((4, 3), (0, 2, 1))
    assert spec.fit(tokens.transpose(1, 2), 2, str).data_ptr() == tokens.data_ptr()
    assert torch.equal(spec.as_wire(tokens.transpose(1, 2)), tokens)
    assert spec.empty(5, torch.device("cpu")).stride() == torch.empty(5, 3, 4).transpose(1, 2).stride()
    for other in (tokens.transpose(0, 1), tokens[:, :, ::2], tokens[:, :1].expand(2, 3, 4)):
        assert TensorSpec.of(other).order == ()


def test_free_strides_of_size_1_arrive_as_a_fresh_tensors():
    """Kernels are chosen by strides, so in one process a peer must see what a peer in another process sees."""
    spec = TensorSpec((3, 1, 1), "float32", (0, 2, 3, 1))
    odd = torch.arange(3.0).as_strided((1, 3, 1, 1), (3, 1, 1, 1))
    fresh = spec.empty(1, torch.device("cpu"))
    assert odd.stride() != fresh.stride()
    assert spec.fit(odd, 1, str).stride() == fresh.stride()


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ((IMAGE[:, :2],), r"is float32\[2, 2, 4, 5\], expected float32\[2, 3, 4, 5\]"),
        ((IMAGE[:1],), r"is float32\[1, 3, 4, 5\], expected float32\[2, 3, 4, 5\]"),
        ((IMAGE.double(),), r"is float64\[2, 3, 4, 5\], expected float32\[2, 3, 4, 5\]"),
        ((IMAGE, IMAGE), "are 2 tensors, expected 1"),
    ],
)
def test_other_tensors_than_agreed_name_the_edge(tensors, found):
    wire = Wire(Specs.always([TensorSpec((3, 4, 5), "float32")]), "act")
    channel = LocalChannel(wire, edge="stage 0 -> stage 1")
    channel.open([2] * 8, training=True)
    with pytest.raises(PartitionError, match=f"stage 0 -> stage 1: act of micro-batch 7 {found}"):
        channel.send(7, tensors)


def test_a_micro_batch_out_of_order_is_refused():
    channel = LocalChannel(Wire(Specs.always([TensorSpec((3,), "float32")]), "grad"), edge="stage 1 -> stage 0")
    channel.open([1, 1], training=True)
    channel.send(1, (torch.zeros(1, 3),))
    with pytest.raises(ChannelError, match="expected the grad of micro-batch 0, got 1"):
        channel.recv(0)


def wait_long(seconds):
    """One rank of two: the first message of an edge comes after more than the limit with which it was connected."""
    connect(2, device_type="cpu", timeout_seconds=30)
    device = torch.device("cpu")
    edges = connect_edges([("act", 0, 1)], backend="gloo", device=device, timeout=datetime.timedelta(seconds=seconds))
    wire = Wire(Specs.always([TensorSpec((3,), "float32")]), "act")
    if os.environ["RANK"] == "0":
        sender = ProcessSender(edges["act", 0], wire, max_pending=1, max_pending_in_evaluation=1)
        sender.open([2], training=True)
        time.sleep(2 * seconds)
        sender.send(0, (torch.ones(2, 3),))
        sender.drain()
        return 6.0
    receiver = ProcessReceiver(edges["act", 0], wire, device=device)
    receiver.open([2], [0], training=True)
    return float(receiver.recv(0)[0].sum())


def test_a_message_may_take_longer_than_the_start():
    """As where all processes were stopped by Ctrl-Z; a job without progress is the watchdog's."""
    assert run_ranks(2, wait_long, 1.0) == [6.0, 6.0]

"""Sends from a GPU over gloo: they begin when a copy is complete, whatever the thread that trains does meanwhile."""

import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from adl_dist.errors import ChannelError
from adl_dist.transport import process
from adl_dist.transport.process import Edge, ProcessSender
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.staging import send_from_gpu
from adl_dist.transport.wire import Wire
from tests.support.commands import assert_same
from tests.support.gpu_stand_in import Event, on_gpu
from tests.support.ranks import run_ranks
from tests.support.runs import train

SPECS = Specs.always([TensorSpec((3,), "float32")])
CPU = torch.device("cpu")


class Copy(Event):
    """The event of a copy, which fills its buffer when the GPU comes to it."""

    def __init__(self, tensor, host):
        super().__init__()
        self._tensor, self._host = tensor, host

    def finish(self):
        self._host.copy_(self._tensor.as_subclass(torch.Tensor))
        super().finish()


def copying_out(tensor):
    host = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    return host, Copy(tensor, host)


def sender_over(backend, max_pending=1):
    edge = Edge(0, 1, (0, 1), None, backend)
    return ProcessSender(edge, Wire(SPECS, "act"), max_pending=max_pending, max_pending_in_evaluation=max_pending)


def test_a_send_begins_when_its_copy_ends_and_waits_for_nothing(monkeypatch):
    """A sender that waited for the copy could not receive the message that the GPU waits for."""
    copies, sent = [], []
    monkeypatch.setattr(process, "to_host", lambda tensor: copies.append(copying_out(tensor)) or copies[-1])
    monkeypatch.setattr(process, "SEND", lambda host, *_, **__: sent.append(host) or SimpleNamespace(wait=lambda _: 0))
    sender = sender_over("gloo", max_pending=2)
    sender.open([2] * 2, training=True)
    for number in range(2):
        sender.send(number, (on_gpu(torch.full((2, 3), float(number + 1))),))
    assert sent == []
    for _, copy in copies:
        copy.finish()
    sender.drain()
    assert [host.unique().tolist() for host in sent] == [[1.0], [2.0]]


def train_staged(method):
    """Train with all activations and gradients on a stand-in for a GPU, whose copies take some time."""
    plain, delays, num_copies = TensorSpec.as_wire, random.Random(int(os.environ["RANK"])), []
    TensorSpec.as_wire = lambda spec, tensor: on_gpu(plain(spec, tensor)) if spec.is_floating_point else tensor

    def copied_after_a_while(tensor):
        host, copy = copying_out(tensor)
        threading.Timer(delays.uniform(0, 0.003), copy.finish).start()
        num_copies.append(1)
        return host, copy

    process.to_host = copied_after_a_while
    state, _ = train(3, 2, torch.float64, method=method, one_per_stage=True)
    return len(num_copies), state


@pytest.mark.parametrize("method", ["adl", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_ranks_that_send_from_a_gpu_equal_one_process(method):
    expected, _ = train(3, 2, torch.float64, method=method)
    for num_copies, state in run_ranks(3, train_staged, method):
        assert num_copies > 0
        assert_same(state, expected)


def test_a_send_that_fails_raises_its_own_error():
    def lost(host):
        raise ChannelError("gone")

    copy = Event()
    copy.finish()
    wait = send_from_gpu(torch.ones(1), torch.ones(1), copy, lost)
    with pytest.raises(ChannelError, match="gone"):
        wait()

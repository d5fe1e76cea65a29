"""Sends from a GPU over gloo: they begin when a copy is complete, whatever the thread that trains does meanwhile."""

import os
import random
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.errors import ChannelError
from adl_dist.transport import process
from adl_dist.transport.process import Edge, Pending, ProcessReceiver, ProcessSender
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.staging import SendFromGpu
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


def edge_pair(what, sender, receiver):
    """Return the end of this rank of an edge between two ranks."""
    edge = Edge(sender, receiver, (sender, receiver), dist.new_group([0, 1], backend="gloo"), "gloo")
    if dist.get_rank() == sender:
        return ProcessSender(edge, Wire(SPECS, what), max_pending=8, max_pending_in_evaluation=8)
    return ProcessReceiver(edge, Wire(SPECS, what), device=CPU)


def two_ends():
    """Make two edges between two ranks; return the ends of this one, opened: its sender and its receiver."""
    rank, folder = int(os.environ["RANK"]), os.environ[RENDEZVOUS_FOLDER]
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2, timeout=limit)
    ends = [edge_pair("act", 0, 1), edge_pair("grad", 1, 0)]
    for end in ends:
        if isinstance(end, ProcessSender):
            end.open([2] * 4, training=True)
        else:
            end.open([2] * 4, range(4), training=True)
    return ends[rank], ends[1 - rank]


def ask_and_answer():
    """Rank 0 asks with what is computed only while it waits for the answer."""
    sender, receiver = two_ends()
    if dist.get_rank() == 1:
        for number in range(4):
            sender.send(number, tuple(2 * tensor for tensor in receiver.recv(number)))
        sender.drain()
        return []
    copies = []
    process.to_host = lambda tensor: copies.append(copying_out(tensor)) or copies[-1]
    answers = []
    for number in range(4):
        sender.send(number, (on_gpu(torch.full((2, 3), float(number + 1))),))
        assert not copies[-1][1].query(), "send has waited"
        threading.Timer(0.05, copies[-1][1].finish).start()
        answers.append(receiver.recv(number)[0])
    sender.drain()
    return answers


def test_what_leaves_a_gpu_does_so_while_its_sender_waits():
    answers, _ = run_ranks(2, ask_and_answer)
    assert [answer.unique().tolist() for answer in answers] == [[2.0], [4.0], [6.0], [8.0]]


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


def test_a_peer_that_is_gone_is_told_by_the_send_that_finds_out():
    def lost(host):
        raise ChannelError("gone")

    copy = Event()
    copy.finish()
    send = SendFromGpu(torch.ones(1), torch.ones(1), copy, lost)
    with pytest.raises(ChannelError, match="gone"):
        send.wait()


class Broken(Event):
    """The event of a copy from a GPU on which a kernel has failed."""

    def synchronize(self):
        raise torch.AcceleratorError("device-side assert triggered")


def sender_over(backend):
    return ProcessSender(
        Edge(0, 1, (0, 1), None, backend), Wire(SPECS, "act"), max_pending=1, max_pending_in_evaluation=1
    )


def test_a_fault_of_its_own_gpu_is_not_blamed_on_the_peer():
    sender, tensor = sender_over("gloo"), torch.ones(1)
    sender._pending.append(Pending(0, (), [(SendFromGpu(tensor, tensor, Broken(), lambda host: None), tensor)]))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        sender.drain()


def test_nor_is_one_that_shows_where_a_send_begins(monkeypatch):
    """Over NCCL a send is a kernel, and to launch one may tell of another that has failed."""

    def send(*_, **__):
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(process, "SEND", send)
    sender = sender_over("nccl")
    sender.open([2], training=True)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        sender.send(0, (torch.ones(2, 3),))


@pytest.mark.parametrize("pinned", [False, True])
def test_targets_that_are_read_before_a_gpu_gets_them_are_pinned(pinned, monkeypatch):
    """From other memory a copy would wait for all work that the GPU has been given."""
    made = []
    monkeypatch.setattr(TensorSpec, "empty", lambda *_, pinned=False, **__: made.append(pinned) or torch.zeros(2, 3))
    monkeypatch.setattr(process, "RECEIVE", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    edge = Edge(0, 1, (0, 1), None, "gloo")
    receiver = ProcessReceiver(edge, Wire(SPECS, "target"), device=CPU, pinned=pinned)
    receiver.open([2], [0], training=True)
    receiver.recv(0)
    assert made == [pinned]

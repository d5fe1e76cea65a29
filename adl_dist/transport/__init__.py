"""Directed edges between stages: in-process and torch.distributed. Knows no module."""

from adl_dist.transport.channel import LocalChannel, Receiver, Sender
from adl_dist.transport.process import ProcessReceiver, ProcessSender, connect_edges
from adl_dist.transport.spec import TensorSpec

__all__ = [
    "LocalChannel",
    "ProcessReceiver",
    "ProcessSender",
    "Receiver",
    "Sender",
    "TensorSpec",
    "connect_edges",
]

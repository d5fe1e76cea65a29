"""Directed edges between stages: in-process and torch.distributed. Knows no module."""

from adl_dist.transport.channel import LocalChannel, Receiver, Sender
from adl_dist.transport.process import ProcessReceiver, ProcessSender, connect_edges
from adl_dist.transport.spec import Specs, TensorSpec

__all__ = [
    "LocalChannel",
    "ProcessReceiver",
    "ProcessSender",
    "Receiver",
    "Sender",
    "Specs",
    "TensorSpec",
    "connect_edges",
]

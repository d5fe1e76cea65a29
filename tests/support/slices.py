"""Stages of an nn.Sequential, cut by hand: slices of it, with the names of the uncut model."""

from collections import OrderedDict
from itertools import accumulate, pairwise

from torch import nn


def cut(model, *, num_stages, balance):
    assert len(balance) == num_stages
    assert sum(balance) == len(model)
    children = [*model.named_children()]
    return [nn.Sequential(OrderedDict(children[a:b])) for a, b in pairwise(accumulate(balance, initial=0))]

"""A model against its pieces, called one after the other, in training and in evaluation."""

import copy
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adl_dist.partition import linearise

SIZES = (2, 4)  # of the two batches that a forward is read with
OTHER_SIZE = 5


def read(model, make_input, *, granularity="layer"):
    """The chain of ``model``, read with two batches that ``make_input`` makes for a number of samples."""
    return linearise(model, granularity=granularity, samples=tuple(map(make_input, SIZES)))


def places_of(chain):
    return [unit + 1 for unit in range(len(chain.units) - 1) if unit not in chain.forbidden]


def pieces_everywhere(chain):
    """Cut wherever it can be cut."""
    return chain.pieces([stop - start for start, stop in pairwise([0, *places_of(chain), len(chain.units)])])


def assert_pieces_equal(model, chain, x):
    """Outputs, gradients and buffers to the bit but for sums of more than two gradients. Returns the pieces."""
    uncut, pieces = copy.deepcopy(model), pieces_everywhere(chain)
    assert sorted(name for piece in pieces for name in piece.state_dict()) == sorted(model.state_dict())
    for mode in (True, False):
        expected, got = uncut.train(mode)(x), x
        for piece in pieces:
            got = piece.train(mode)(got)
        assert_same(got, expected)
        if mode:
            loss_of(expected).backward()
            loss_of(got).backward()
    theirs = dict(uncut.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12, msg=name)
    assert_same(dict(model.named_buffers()), dict(uncut.named_buffers()))
    return pieces


def assert_same(got, expected):
    assert type(got) is type(expected)
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def loss_of(out):
    return sum(leaf.square().mean() for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad)

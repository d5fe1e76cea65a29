"""Heads: their averages on a GPU, and similarity matching (PredSim): its values, and that it asks a GPU for none."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.stage.heads import SIMILARITY_SHARE, Pool, build_head, similarities

CLASSES = 4
SHAPES = [(6,), (3, 5, 5), (3, 1, 1)]


def left_out(head, out, target, loss_fn):
    """Similarity matching as it is written: of the samples that have a class, and of no others."""
    features = head.project(out)
    if features.ndim == 4:
        features = features.flatten(2).std(dim=2) if features[0, 0].numel() > 1 else features.flatten(1)
    known = (target >= 0) & (target < CLASSES)
    wanted = F.one_hot(target[known], CLASSES).to(features.dtype)
    similar = F.mse_loss(similarities(features[known]), similarities(wanted))
    return torch.lerp(loss_fn(head.classifier(out), target), similar, SIMILARITY_SHARE)


def loss_and_gradients(function, head, out, target):
    leaf = out.clone().requires_grad_()
    loss = function(leaf, target, nn.CrossEntropyLoss(ignore_index=-1))
    return [loss, *torch.autograd.grad(loss, [leaf, *head.parameters()])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ignored", [[], [0, 5]], ids=["all known", "two ignored"])
def test_predsim_matches_the_samples_that_have_a_class(shape, ignored):
    head = build_head("predsim", shape, num_classes=CLASSES, seed=1)
    torch.manual_seed(0)
    out, target = torch.randn(9, *shape), torch.randint(CLASSES, (9,))
    target[ignored] = -1
    expected = loss_and_gradients(lambda *given: left_out(head, *given), head, out, target)
    for got, value in zip(loss_and_gradients(head, head, out, target), expected, strict=True):
        if ignored:  # sums over the same numbers, with zeros between them
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got, value)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_an_average_is_the_adaptive_one(size, number):
    results = []
    for pool in (Pool(number), nn.AdaptiveAvgPool2d(number)):
        x = torch.randn(2, 3, size, size + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        out = pool(x.requires_grad_())
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), x)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

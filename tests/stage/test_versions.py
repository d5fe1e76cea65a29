"""Other weights under the same Parameter objects, while graphs refer to those that were there."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import ConfigError
from adl_dist.stage.versions import Exchange, check_versions


class Marked(nn.Parameter):
    """A parameter of the user's own kind."""


def graph_over(p):
    """A loss that a backward can be asked of, whose gradient is 2 p."""
    return p.square().sum()


def test_a_parameter_keeps_type_attributes_and_format():
    p = Marked(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    p.lr_scale = 0.5
    aliases = [p]
    (older,) = Exchange([p]).start_version()
    assert aliases[0] is p
    assert type(p) is Marked
    assert p.lr_scale == 0.5
    assert p.is_contiguous(memory_format=torch.channels_last)
    assert p.data_ptr() != older.data_ptr()


def test_hooks_are_called_for_all_versions_until_removed():
    p, calls = nn.Parameter(torch.ones(2)), []
    handle = p.register_hook(lambda grad: calls.append("hook") or grad * 10)
    p.register_post_accumulate_grad_hook(lambda tensor: calls.append("accumulated"))
    first, second = graph_over(p), graph_over(p)
    (older,) = Exchange([p]).start_version()
    first.backward()
    assert older.grad.tolist() == [20, 20]
    graph_over(p).backward()
    assert calls == ["hook", "accumulated"] * 2
    handle.remove()
    second.backward()
    assert calls == ["hook", "accumulated"] * 2 + ["accumulated"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_weights_of_its_forward(reentrant):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    plain, x = copy.deepcopy(layer), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())
    out = checkpoint(layer, x, use_reentrant=reentrant)
    older = Exchange(parameters).start_version()
    with torch.no_grad():
        for p in parameters:
            p.mul_(3)
    with Exchange(parameters).swapped(older):
        out.sum().backward()
    plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(older, plain.parameters(), strict=True))
    assert all(p.grad is None for p in parameters)


def test_what_was_swapped_in_is_out_again_after_an_error():
    p = nn.Parameter(torch.ones(1))
    older = Exchange([p]).start_version()
    with torch.no_grad():
        p.fill_(2)

    def fail():
        with Exchange([p]).swapped(older):
            assert p.item() == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [p.item(), older[0].item()] == [2, 1]


def overlapping():
    """A frozen whole, frozen parts of it, and a trained part that begins behind the end of the first."""
    whole = torch.zeros(100)
    module = nn.Module()
    module.whole, module.first = nn.Parameter(whole, requires_grad=False), nn.Buffer(whole[10:20])
    module.last = nn.Parameter(whole[50:60])
    return module


def test_shared_memory_is_found_behind_a_tensor_in_between():
    with pytest.raises(ConfigError, match=r"stage 1: 'whole' and 'last' share memory"):
        check_versions(overlapping(), "stage 1")
    module = overlapping()
    module.last.requires_grad_(False)
    check_versions(module, "stage 1")


def test_parts_of_one_memory_that_do_not_overlap_have_versions():
    flat, module = torch.zeros(100), nn.Module()
    module.a, module.b = nn.Parameter(flat[:50]), nn.Parameter(flat[50:])
    check_versions(module, "stage 1")

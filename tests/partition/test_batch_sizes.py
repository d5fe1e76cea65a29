"""What is not the same for any number of samples decides nothing; what is computed with it is cut."""

import functools

import pytest
import torch
from torch import nn

from adl_dist.errors import PartitionError
from tests.support.cut_model import SIZES, assert_pieces_equal, read

SIZES_OF_RUNS = 5, 8, 24


def rows(num):
    return torch.randn(num, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


class Net(nn.Module):
    """float64[B, 4] to float64[B, 4], which asks between its two layers."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.register_buffer("table", torch.linspace(1, 2, 64))

    def forward(self, x):
        return torch.tanh(self.b(self.function(self, torch.tanh(self.a(x)))))


def net(forward):
    torch.manual_seed(0)
    return Net(forward).double()


@functools.lru_cache
def factors(width, device):
    return torch.arange(width, device=device, dtype=torch.float64)


class Decides:
    def above(self, h):
        return 2 * h if h.shape[0] > 4 else h

    def far_above(self, h):
        return 2 * h if len(h.flatten(1).t()[0]) > 3000 else h

    def equal_to_what_is_not_probed(self, h):
        return 2 * h if h.size(0) == 301 else h

    def shape_equal_to_what_is_not_probed(self, h):
        return 2 * h if h.shape == (301, 4) else h

    def whole_part(self, h):
        return 2 * h if h.shape[0] // 8 else h

    def loop(self, h):
        for _ in range(-(-h.shape[0] // 8)):
            h = 2 * h
        return h

    def slice_that_is_full(self, h):
        return 2 * h if h[:20].shape[0] == h.shape[0] else h

    def slice_that_is_empty(self, h):
        return 2 * h if h[8:].numel() else h

    def every_second(self, h):
        return 2 * h if 2 * h[::2].shape[0] == h.shape[0] else h

    def number_of_parts(self, h):
        return len(h.split(8)) * h

    def whether_a_part_is_there(self, h):
        return torch.cat([part * place for place, part in enumerate(h.split(8))])

    def chosen_by_values(self, h):
        return 2 * h if h[h[:, 0] > -2].shape[0] > 0 else h

    def after_a_layer(self, h):
        return 2 * h if self.a(h[:8]).shape[0] < 8 else h

    def key(self, h):
        return h * {8: 2.0}.get(h.shape[0], 1.0)

    def size_of_a_computed_dimension(self, h):
        return 2 * h if h.size(h.dim() - 2) > 4 else h

    def key_of_a_shape(self, h):
        return h * {(8, 4): 2.0}.get(h.shape, 1.0)

    def strides(self, h):
        return 2 * h if h.t().contiguous().stride(0) > 5 else h

    def bytes(self, h):
        return 2 * h if h.nbytes > 200 else h


@pytest.mark.parametrize("name", [name for name in vars(Decides) if not name.startswith("_")])
def test_what_another_number_of_samples_may_change_is_refused(name):
    with pytest.raises(PartitionError, match=r"another for batches of|not the same for every batch"):
        read(net(vars(Decides)[name]), rows)


class Computes:
    def with_the_number(self, h):
        return h * (h.shape[0] // 8 + 1) + h.shape[0] % 3 + (h.shape[0] > 4)

    def with_a_table(self, h):
        return h * self.table[h.shape[0]]

    def with_positions(self, h):
        return h + torch.arange(h.shape[0], device=h.device)[:, None] / h.size(0)

    def with_the_first(self, h):
        return h - h[:8].mean(0)

    def with_sizes_that_agree(self, h):
        B, width = h.shape
        assert self.a(h).view(B, -1).size(0) == B
        assert B * width == h.numel()
        assert B > 0
        assert h.shape != (0, 4)
        return self.a(h).reshape(B, width) if len(h.shape) == 2 and h[:, :2].shape[1] == 2 else h

    def with_parts_of_each(self, h):
        return torch.cat([torch.tanh(part) for part in h.split(2, dim=1)], dim=1)

    def with_a_cache_by_its_device(self, h):
        return h * factors(h.shape[1], h.device) * h.size(h.dim() - 1)

    def with_its_device(self, h):
        return h + torch.zeros(h.shape[0], 1, device=h.device, dtype=h.dtype).expand(-1, 4)


@pytest.mark.parametrize("name", [name for name in vars(Computes) if not name.startswith("_")])
def test_what_is_computed_with_the_number_of_samples_is_cut(name):
    for size in SIZES_OF_RUNS:
        model = net(vars(Computes)[name])
        assert len(assert_pieces_equal(model, read(model, rows), rows(size))) > 1


def halves(self, h):
    first, second = h.chunk(2)
    return torch.cat([first - first.mean(0), second - second.mean(0)])


def test_a_batch_may_be_halved():
    for size in (6, 8):
        model = net(halves)
        assert len(assert_pieces_equal(model, read(model, rows), rows(size))) > 1


def test_a_refusal_names_the_size_and_both_answers():
    with pytest.raises(PartitionError, match=r"h.shape\[0\] > 4.*another for batches of 5 \(False and True\)"):
        read(net(Decides.above), rows)


def test_other_sizes_are_not_run_and_take_no_memory():
    """Not by a layer of the user's; and a mask of so many samples would have no room."""

    class Alone(nn.Module):
        def forward(self, h):
            assert len(h) in SIZES
            return h

    model = net(lambda self, h: self.alone(h) + torch.zeros(h.shape[0], 1000, 1000, dtype=h.dtype)[:, 0, :4])
    model.alone = Alone()
    assert "alone" in read(model, rows).units

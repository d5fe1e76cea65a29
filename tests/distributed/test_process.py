"""What a process that trains sets for itself."""

import contextlib
import os

import pytest
import torch
from torch.utils.data import Dataset

from adl_dist.data import Loader
from adl_dist.distributed.affinity import bound_to, own_cores


@pytest.mark.parametrize(
    ("of_ranks", "shares"),
    [
        ([[0, 1]] * 2, [[0], [1]]),
        ([[0, 1, 2, 3, 4]] * 2, [[0, 1], [2, 3, 4]]),
        ([[4, 6]], [[4, 6]]),
        ([[0]] * 2, [None, None]),  # not one for each
        ([[0, 1], [2, 3]], [None, None]),  # SLURM or numactl has shared them out already
        ([[]] * 2, [None, None]),  # the system does not tell
    ],
)
def test_cores_are_shared_out_once(of_ranks, shares):
    assert [own_cores(of_ranks, rank) for rank in range(len(of_ranks))] == shares


def test_a_process_is_bound_until_its_work_ends_or_fails():
    before = os.sched_getaffinity(0)
    with contextlib.suppress(KeyError), bound_to([min(before)]):
        during = os.sched_getaffinity(0)
        raise KeyError
    assert during == {min(before)}
    assert os.sched_getaffinity(0) == before


class Cores(Dataset):
    """The number of cores that whoever loads it may use."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(1), len(os.sched_getaffinity(0))


def test_workers_load_on_all_cores_of_a_bound_process():
    before = os.sched_getaffinity(0)
    loader = Loader(Cores(), seed=0, shuffle=False, num_workers=1)
    with bound_to([min(before)]):
        assert [int(target) for _, target in loader.batches(0, [1, 1])] == [len(before)] * 2

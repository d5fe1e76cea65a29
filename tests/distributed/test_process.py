"""What a process that trains sets for itself."""

import contextlib
import os
import resource
import sys

import pytest
import torch
from torch.utils.data import Dataset

from adl_dist.data import Loader
from adl_dist.distributed import affinity
from adl_dist.distributed.affinity import bound_to, own_cores
from tests.support.ranks import run_ranks


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


def num_faults_of_a_round():
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        del os.environ[name]
    affinity.tune_malloc()
    counts = []
    for _ in range(3):
        kept = [torch.zeros(1 << 20) for _ in range(16)]  # 4 MiB each, of 1024 pages
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        del kept
    return counts[2] - counts[1]


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives freed memory back at once")
def test_what_is_freed_is_used_again_without_asking_the_kernel():
    assert run_ranks(1, num_faults_of_a_round)[0] < 16 * 1024 / 100


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")])
def test_a_user_who_has_chosen_how_memory_is_kept_is_left_alone(monkeypatch, name, value):
    monkeypatch.setattr(affinity.ctypes, "CDLL", None)  # which cannot be asked
    monkeypatch.setenv(name, value)
    affinity.tune_malloc.__wrapped__()

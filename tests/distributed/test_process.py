"""What a process that trains sets for itself."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset

from adl_dist.data import Loader
from adl_dist.distributed import affinity
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


FAULTS = """
import resource, torch
from adl_dist.distributed.affinity import tune_malloc
tune_malloc()
def round_of_activations():
    kept = [torch.zeros(1 << 20) for _ in range(16)]  # 4 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
round_of_activations()
before = round_of_activations()
print(round_of_activations() - before)
"""
PAGES = 16 * 1024  # of 4 KiB, of one round


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives freed memory back at once")
def test_what_is_freed_is_used_again_without_asking_the_kernel():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, timeout=60)
    assert int(told.stdout) < PAGES / 100, told.stderr


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")])
def test_a_user_who_has_chosen_how_memory_is_kept_is_left_alone(monkeypatch, name, value):
    def no_library(*_):
        raise AssertionError("the C library is asked")

    monkeypatch.setattr(affinity.ctypes, "CDLL", no_library)
    monkeypatch.setenv(name, value)
    affinity.tune_malloc.__wrapped__()

"""Processes that load data, on machines and in scripts where they cannot."""

import pathlib
import re
import sys
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

from adl_dist.data import Loader
from adl_dist.distributed.affinity import bound_to, cores_here
from adl_dist.errors import DataError
from tests.support.commands import as_command

DATA = TensorDataset(torch.arange(8.0), torch.arange(8))


def load(dataset=DATA, num_workers=1, num_batches=1):
    size = 8 // num_batches
    return [*Loader(dataset, seed=0, shuffle=False, num_workers=num_workers).batches(0, [size] * num_batches)]


class TwoArguments(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}, because of {why}")


class Raises(TensorDataset):
    def __init__(self, kind):
        super().__init__(torch.zeros(8))
        self.kind = kind

    def __getitem__(self, index):
        raise TwoArguments("no sample", "rain") if self.kind is TwoArguments else self.kind("no sample")


@pytest.mark.parametrize("kind", [TwoArguments, GeneratorExit])
def test_an_odd_exception_of_a_sample_is_told(kind):
    with pytest.raises(DataError, match=rf"sample 0: Raises raised {kind.__name__}: no sample.* at .*test_workers.py"):
        load(Raises(kind))


def test_bound_cores_cause_no_warning_but_too_few_do():
    cores = cores_here()
    if len(cores) < 2:
        pytest.skip("needs two cores")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = Loader(DATA, seed=0, shuffle=False, num_workers=2)
        with bound_to(cores[:1]):
            assert [y.tolist() for _, y in loader.batches(0, [4, 4])] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.warns(UserWarning, match="This DataLoader will create"):
        load(num_workers=len(cores) + 1, num_batches=8)


UNGUARDED = """
from torch.utils.data import TensorDataset
import torch
from adl_dist.data import Loader
list(Loader(TensorDataset(torch.zeros(8)), seed=0, shuffle=False, num_workers=1).batches(0, [8]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import multiprocessing; multiprocessing.set_start_method('fork')"])
def test_a_script_that_workers_cannot_import_is_named(first, tmp_path):
    """It loads, too, or sets the way of starting processes a second time."""
    pathlib.Path(tmp_path, "unguarded.py").write_text(first + UNGUARDED)
    done = as_command(sys.executable, "unguarded.py", cwd=tmp_path)
    last = done.err.strip().splitlines()[-1]
    assert re.search(r"DataError: a process that loads data has failed.* `if __name__ == '__main__':`", last), done

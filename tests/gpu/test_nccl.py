"""NCCL between several ranks on one GPU: they say that they are on different machines, and it goes through sockets.

All else is real: a communicator for each edge, receives posted ahead as kernels that wait, their order, how they end.
`make test-gpu`; skipped without a GPU.
"""

import functools
import os
import re
import signal
import time

import pytest
import torch

from adl_dist.distributed.world import world_of_process
from adl_dist.schedule import METHODS
from tests.gpu.test_gpu import TOLERANCE, assert_close, train
from tests.support import runs
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import nan_inputs

# No case may take the whole of the suite with it if ranks wait for each other for ever.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]
DEVICE = "cuda"
SECONDS = 120.0
ENDS_WITHIN = 45.0  # of an error, far below the timeout of a message


def as_a_node_of_its_own(**variables):
    """Have this rank pass for the only one on a machine with one GPU."""
    alone = {"NCCL_HOSTID": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    os.environ.update(alone, NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", **variables)


def train_over_nccl(K, options, variables):
    as_a_node_of_its_own(**variables)
    state = train(K, DEVICE, **options)
    world = world_of_process()
    assert world is not None
    return world.backend, state


def assert_equals_one_process(K, *, tolerance=TOLERANCE, variables=None, **options):
    expected = train(K, DEVICE, **options)
    for backend, state in run_ranks(K, train_over_nccl, K, options, variables or {}, timeout_seconds=SECONDS):
        assert backend == "nccl"
        assert_close(state, expected, tolerance=tolerance)


# dgl's MLP heads normalise over samples, which turns rounding into more than rounding on micro-batches of 3.
VARIANTS = [
    *((name, {}) for name in METHODS if name not in ("dgl", "interleaved")),
    ("dgl", {"head": "cnn"}),
    ("adl", {"delay": "minimal"}),
    ("adl", {"split_backward": True, "delay": "third", "mitigation": ("predict", "spike")}),
    ("adl", {"weights": "recompute"}),
]


@pytest.mark.parametrize("K", [2, 3])  # of three stages the one in the middle has four edges
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[" ".join([n, *map(str, o.values())]) for n, o in VARIANTS])
def test_every_method_over_nccl_equals_one_process(name, options, K):
    assert_equals_one_process(K, name=name, **options)


ENVIRONMENTS = [
    {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    {"CUDA_MODULE_LOADING": "LAZY"},
    {"CUDA_MODULE_LOADING": "EAGER"},
    {"TORCH_NCCL_HIGH_PRIORITY": "0"},
]


@pytest.mark.parametrize("name", ["1f1b", "adl"])
@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=["=".join(*v.items()) for v in ENVIRONMENTS])
def test_no_setting_of_the_user_makes_ranks_wait_for_each_other(variables, name):
    assert_equals_one_process(3, name=name, variables=variables)


@pytest.mark.parametrize("name", ["1f1b", "adl"])
def test_kernels_that_are_timed_do_not_make_ranks_wait(name):
    # Which kernel is the fastest differs between runs, and with it the last digits.
    options = {"of_trainer": {"cudnn_benchmark": True, "deterministic": False}}
    assert_equals_one_process(3, name=name, tolerance=1e-6, **options)


def train_on_nan():
    as_a_node_of_its_own()
    runs.train(3, 2, torch.float32, device=DEVICE, plant=nan_inputs, timeout_seconds=300)


def test_an_error_ends_all_ranks_at_once_and_is_named():
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, train_on_nan, timeout_seconds=SECONDS)
    assert time.monotonic() - begin < ENDS_WITHIN
    told = str(failed.value)
    assert "still ran" not in told, told
    assert re.search(r"is nan at update 0 \(epoch 1\)", told), told
    assert "SIGABRT" not in told
    assert "exit code -" not in told, told


def train_and_be_killed(victim):
    as_a_node_of_its_own()

    def plant(model, data):
        if int(os.environ["RANK"]) == victim:
            signal.setitimer(signal.ITIMER_REAL, 8.0)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    hardly = functools.partial(torch.optim.SGD, lr=1e-6)  # or it would diverge before
    runs.train(3, 2, torch.float32, device=DEVICE, plant=plant, timeout_seconds=300, epochs=10**6, optimizer=hardly)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_end_of_a_killed_rank_is_that_of_all(victim):
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, train_and_be_killed, victim, timeout_seconds=SECONDS)
    assert time.monotonic() - begin < ENDS_WITHIN
    told = str(failed.value)
    assert f"rank {victim}: exit code -9" in told
    assert "still ran" not in told, told


def train_twice():
    """Edges are made once, and evaluation in between leaves no receive posted."""
    as_a_node_of_its_own()
    return tuple(sum(float(t.double().sum()) for t in train(3, DEVICE, epochs=1).values()) for _ in range(2))


def test_a_second_job_in_the_same_processes_works():
    counts = run_ranks(3, train_twice, timeout_seconds=SECONDS)
    assert len(set(counts)) == 1

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
from tests.gpu.test_gpu import assert_close, train
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
SECONDS = 150.0
ENDS_WITHIN = 45.0  # of an error, far below the timeout of a message


def as_a_node_of_its_own(**variables):
    """Have this rank pass for the only one on a machine with one GPU."""
    alone = {"NCCL_HOSTID": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    os.environ.update(alone, NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", **variables)


def train_over_nccl(K, cases, variables):
    as_a_node_of_its_own(**variables)
    states = [train(K, DEVICE, **options) for options in cases]
    world = world_of_process()
    assert world is not None
    return world.backend, states


def over_nccl(K, cases, **variables):
    """Return the states after each case, of every rank; one process has all cases, because its start costs most."""
    by_rank = run_ranks(K, train_over_nccl, K, cases, variables, timeout_seconds=SECONDS)
    assert {backend for backend, _ in by_rank} == {"nccl"}
    return list(zip(*(states for _, states in by_rank), strict=True))


# dgl's MLP heads normalise over samples, which turns rounding into more than rounding on micro-batches of 3.
VARIANTS = [
    *({"name": name} for name in METHODS if name not in ("dgl", "interleaved")),
    {"name": "dgl", "head": "cnn"},
    {"name": "adl", "delay": "minimal"},
    {"name": "adl", "split_backward": True, "delay": "third", "mitigation": ("predict", "spike")},
    {"name": "adl", "weights": "recompute"},
]
# Which kernel is the fastest differs between runs, and with it the last digits.
TIMED = [{"name": name, "of_trainer": {"cudnn_benchmark": True, "deterministic": False}} for name in ("1f1b", "adl")]


@pytest.fixture(scope="module", params=[2, 3])  # of three stages the one in the middle has four edges
def all_cases(request):
    """Return the number of stages and the states after each case."""
    return request.param, over_nccl(request.param, [*VARIANTS, *TIMED])


@pytest.mark.parametrize("case", range(len(VARIANTS)), ids=[" ".join(map(str, v.values())) for v in VARIANTS])
def test_every_method_over_nccl_equals_one_process(case, all_cases):
    K, states = all_cases
    for state in states[case]:
        assert_close(state, train(K, DEVICE, **VARIANTS[case]))


@pytest.mark.parametrize("case", range(len(TIMED)), ids=[v["name"] for v in TIMED])
def test_kernels_that_are_timed_do_not_make_ranks_wait(case, all_cases):
    K, states = all_cases
    for state in states[len(VARIANTS) + case]:
        assert_close(state, train(K, DEVICE, **TIMED[case]), tolerance=1e-6)


ENVIRONMENTS = [
    {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    {"CUDA_MODULE_LOADING": "LAZY"},
    {"CUDA_MODULE_LOADING": "EAGER"},
    {"TORCH_NCCL_HIGH_PRIORITY": "0"},
]


@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=["=".join(*v.items()) for v in ENVIRONMENTS])
def test_no_setting_of_the_user_makes_ranks_wait_for_each_other(variables):
    cases = [{"name": "1f1b"}, {"name": "adl"}]
    for options, states in zip(cases, over_nccl(3, cases, **variables), strict=True):
        for state in states:
            assert_close(state, train(3, DEVICE, **options))


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

"""The trace of several processes: one clock, one file, written by one rank."""

import json
import time

import pytest

import adl_dist
from adl_dist.monitor import trace
from adl_dist.schedule import Segment
from tests.support import traces
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages

pytestmark = pytest.mark.ranks

M, MICRO_BATCH, NUM_SAMPLES = 2, 2, 24


def train_traced(run_dir, seconds_off):
    """As on two machines, if ``seconds_off``: rank 1's clock is so much ahead of rank 0's, and another's."""
    trainer = toy_trainer(2, M, timeout_seconds=30)
    if seconds_off and not trainer.needs_data:
        true = time.perf_counter
        time.perf_counter = lambda: true() + seconds_off
        trace.machine = lambda: "another machine"
    monitoring = adl_dist.Monitoring(quiet=True, tensorboard=False, trace=True)
    return trainer.fit(
        FixedImages(NUM_SAMPLES), epochs=1, batch_size=MICRO_BATCH * M, run_dir=run_dir, monitoring=monitoring
    )


@pytest.mark.parametrize("seconds_off", [0.0, 1000.0], ids=["one machine", "two machines"])
def test_two_processes_make_one_trace_on_one_clock(seconds_off, tmp_path):
    summary, same = run_ranks(2, train_traced, tmp_path, seconds_off)
    assert summary == same
    sizes = {"num_samples": NUM_SAMPLES, "micro_batch_size": MICRO_BATCH, "accumulation_steps": M}
    training, method = [Segment(epoch=0, first_update=0, **sizes)], adl_dist.method("adl", accumulation_steps=M)
    # Machines agree by their wall clocks, of which each process reads two in turn; a busy machine may part the two.
    slack_us = 20_000 if seconds_off else 0.0
    traces.assert_is_whole(tmp_path, summary, method, training=training, slack_us=slack_us)
    stages = json.loads((tmp_path / "trace.json").read_text())["otherData"]["stages"]
    assert stages[0]["seconds_to_rank_0"] == 0
    assert stages[1]["seconds_to_rank_0"] == pytest.approx(-seconds_off, abs=0.02)

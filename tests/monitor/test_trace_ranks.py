"""The trace of several processes: one clock, one file, written by one rank."""

import json
import time

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.monitor import trace
from adl_dist.schedule import Segment
from tests.support import traces
from tests.support.ranks import run_ranks
from tests.support.toys import FixedImages, batch_norm_net

pytestmark = pytest.mark.ranks

M, MICRO_BATCH, NUM_SAMPLES = 2, 2, 24


def train_traced(run_dir, seconds_off):
    """As on two machines, if ``seconds_off``: rank 1's clock is so much ahead of rank 0's, and another's."""
    trainer = adl_dist.Trainer(
        batch_norm_net(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        method=adl_dist.method("adl", accumulation_steps=M),
        num_stages=2,
        processes=adl_dist.ProcessOptions(threads=1, timeout_seconds=30),
    )
    if seconds_off and not trainer.needs_data:
        true = time.perf_counter
        time.perf_counter = lambda: true() + seconds_off
        trace.machine = lambda: "another machine"
    return trainer.fit(
        FixedImages(NUM_SAMPLES),
        epochs=1,
        batch_size=MICRO_BATCH * M,
        run_dir=run_dir,
        monitoring=adl_dist.Monitoring(quiet=True, tensorboard=False, trace=True),
    )


@pytest.mark.parametrize("seconds_off", [0.0, 1000.0], ids=["one machine", "two machines"])
def test_two_processes_make_one_trace_on_one_clock(seconds_off, tmp_path):
    summary, same = run_ranks(2, train_traced, tmp_path, seconds_off)
    assert summary == same
    events = traces.read_trace(tmp_path)
    segment = Segment(
        epoch=0, first_update=0, num_samples=NUM_SAMPLES, micro_batch_size=MICRO_BATCH, accumulation_steps=M
    )
    method = adl_dist.method("adl", accumulation_steps=M)
    traces.assert_every_action_is_one_event(events, method, training=[segment], validation=None)
    traces.assert_events_of_a_stage_do_not_overlap(events)
    # Machines agree by their wall clocks, of which each process reads two in turn; a busy machine may part the two.
    traces.assert_nothing_is_received_before_it_is_sent(events, slack_us=20_000 if seconds_off else 0.0)
    traces.assert_shares_are_all_of_the_time(summary, 2)
    stages = json.loads((tmp_path / "trace.json").read_text())["otherData"]["stages"]
    assert stages[0]["seconds_to_rank_0"] == 0
    assert stages[1]["seconds_to_rank_0"] == pytest.approx(-seconds_off, abs=0.02)
    assert not (tmp_path / "trace").exists()

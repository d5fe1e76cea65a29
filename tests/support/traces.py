"""What a trace must be, whichever process made it."""

import json
from itertools import pairwise

import pytest

from adl_dist.monitor.activity import SHARES
from adl_dist.schedule import Pipeline, evaluation_work, training_work


def read_trace(run_dir):
    """The events of each stage in the order of the file, which holds nothing else but their stages' names."""
    told = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in told if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {k: f"stage {k}" for k in names}
    assert {e["ph"] for e in told} == {"M", "X"}
    return {k: [e for e in told if e["ph"] == "X" and e["pid"] == k] for k in names}


def assert_is_whole(run_dir, summary, method, *, training, validation=None):
    """Every action is one event of its stage, no two overlap, and a wait ends after the peer has begun to send."""
    events, K = read_trace(run_dir), len(summary["stages"])
    assert len(events) == K
    for k, of_stage in events.items():
        expected = []
        for segment in training:
            expected += training_work(Pipeline(method, K), segment, stages=range(K))[k].actions
            if validation is not None:
                expected += evaluation_work(validation, num_stages=K, stages=range(K))[k].actions
        assert [e["args"]["action"] for e in of_stage] == list(map(str, expected))
        for action, event in zip(expected, of_stage, strict=True):
            named = next(v for n, v in event["args"].items() if n in ("micro_batch", "group", "updates_in_segment"))
            assert named == action.number
            assert event["name"].endswith(f" {action.number}")
        for one, other in pairwise(of_stage):
            assert min(one["ts"], one["dur"]) >= 0
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6, (one, other)  # microseconds, in float64
    assert_shares_are_all_of_the_time(summary, K)

    def times(stage, op, *, ends):
        actions = [(e["args"]["action"], e["ts"] + ends * e["dur"]) for e in events.get(stage, ())]
        return [(action.removeprefix(op), at) for action, at in actions if action.rstrip("0123456789") == op]

    seen = 0
    for k in events:
        for sent, received, peer in (("SA", "RA", k + 1), ("SG", "RG", k - 1), ("ST", "RT", max(events))):
            if begun := times(k, sent, ends=False):
                for (number, at), (same, there) in zip(begun, times(peer, received, ends=True), strict=True):
                    assert number == same
                    assert there > at, (k, sent, number)
                    seen += 1
    assert seen


def assert_shares_are_all_of_the_time(summary, K):
    assert len(summary["stages"]) == K
    for stage in summary["stages"]:
        assert tuple(stage["shares"]) == SHARES
        assert sum(stage["shares"].values()) == pytest.approx(1)
        assert all(share >= 0 for share in stage["shares"].values()), stage
        computing = sum(stage["shares"][name] for name in ("forward", "recompute", "backward", "update"))
        assert stage["busy_share"] == pytest.approx(computing), "both are views of one record"
        assert computing > 0

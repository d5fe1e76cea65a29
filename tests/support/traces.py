"""What a trace must be, whoever made it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from adl_dist.monitor.activity import SHARES
from adl_dist.schedule import Method, Pipeline, Segment, evaluation_work, training_work


def read_trace(run_dir: Path) -> dict[int, list[dict]]:
    """The events of each stage in the order of the file, which holds nothing else but their stages' names."""
    told = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in told if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {k: f"stage {k}" for k in names}
    assert {e["ph"] for e in told} == {"M", "X"}
    return {k: [e for e in told if e["ph"] == "X" and e["pid"] == k] for k in names}


def assert_every_action_is_one_event(
    events: dict[int, list[dict]], method: Method, *, training: list[Segment], validation: Segment | None
) -> None:
    K = len(events)
    for k, of_stage in events.items():
        expected = []
        for segment in training:
            expected += training_work(Pipeline(method, K), segment, stages=range(K), seed=0)[k].actions
            if validation is not None:
                expected += evaluation_work(validation, num_stages=K, stages=range(K))[k].actions
        assert " ".join(e["args"]["action"] for e in of_stage) == " ".join(map(str, expected))
        for action, event in zip(expected, of_stage, strict=True):
            named = next(v for n, v in event["args"].items() if n in ("micro_batch", "group", "updates_in_segment"))
            assert named == action.number
            assert event["name"].endswith(f" {action.number}")


def assert_events_of_a_stage_do_not_overlap(events: dict[int, list[dict]]) -> None:
    for of_stage in events.values():
        for one, other in pairwise(of_stage):
            assert one["ts"] >= 0
            assert one["dur"] >= 0
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6, (one, other)  # microseconds, in float64


def assert_nothing_is_received_before_it_is_sent(events: dict[int, list[dict]], *, slack_us: float = 0.0) -> None:
    """The one clock: a wait ends after the peer has begun to send."""
    last, seen = max(events), 0
    for sent, received, peer in (
        ("SA", "RA", lambda k: k + 1),
        ("SG", "RG", lambda k: k - 1),
        ("ST", "RT", lambda _: last),
    ):
        for k, of_stage in events.items():
            begun = [
                (e["args"]["action"], e["ts"]) for e in of_stage if e["args"]["action"].rstrip("0123456789") == sent
            ]
            if not begun:
                continue
            ended = [
                (e["args"]["action"], e["ts"] + e["dur"])
                for e in events[peer(k)]
                if e["args"]["action"].rstrip("0123456789") == received
            ]
            assert [a.removeprefix(sent) for a, _ in begun] == [a.removeprefix(received) for a, _ in ended]
            for (_, at), (action, there) in zip(begun, ended, strict=True):
                assert there > at - slack_us, (k, action)
                seen += 1
    assert seen


def assert_shares_are_all_of_the_time(summary: dict, K: int) -> None:
    assert len(summary["stages"]) == K
    for stage in summary["stages"]:
        assert tuple(stage["shares"]) == SHARES
        assert sum(stage["shares"].values()) == pytest.approx(1)
        assert all(share >= 0 for share in stage["shares"].values()), stage
        computing = sum(stage["shares"][name] for name in ("forward", "recompute", "backward", "update"))
        assert stage["busy_share"] == pytest.approx(computing), "both are views of one record"
        assert computing > 0

"""What a process says that fails because another one has: of one that waits for the cause, and of rank 0."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch

from adl_dist.control import reports, rpc
from adl_dist.control.reports import Reporter
from adl_dist.control.rpc import RpcWorkerGroup
from adl_dist.distributed.rpc_errors import translate_rpc_errors
from adl_dist.distributed.world import single_process
from adl_dist.errors import ChannelError, StageFailed

CAUSE = {"failed": "rank 2: boom", "exit_code": 1, "is_victim": False, "is_gone": False}
RANK_0_IS_GONE = "stage 0 (node, pid 7): the process is gone: killed, or it crashed"
RANK_1 = replace(single_process(torch.device("cpu")), rank=1, size=3)


class WaitsInVain:
    """A worker whose peer is gone."""

    def execute(self, do, arguments, emit):
        raise ChannelError("waited for the act of micro-batch 3")


@pytest.fixture
def victim(monkeypatch):
    """Serves on rank 1 as a victim; what it raises, and after how many seconds."""
    monkeypatch.setattr(rpc, "CAUSE_SECONDS", 0.02)
    monkeypatch.setattr(rpc, "HEARD_SECONDS", 0.1)
    monkeypatch.setattr(rpc, "LAST_SAVE_SECONDS", 20.0)

    def serve(*, reported, rank0_status=None, told_after=None, told=CAUSE):
        monkeypatch.setattr(Reporter, "report_failure", lambda self, error: reported)
        monkeypatch.setattr(rpc, "rank0_status", lambda: rank0_status)
        rpc._take_command(json.dumps({"do": "train", "arguments": {}}))
        if told_after is not None:
            message = json.dumps({"do": "stop", "arguments": told})
            threading.Timer(told_after, rpc._take_command, [message]).start()
        began = time.monotonic()
        with pytest.raises((ChannelError, StageFailed)) as error:
            rpc.serve(WaitsInVain(), RANK_1)
        assert rpc._commands.empty()
        return error.value, time.monotonic() - began

    return serve


def test_a_victim_waits_for_the_cause_while_rank_0_waits_for_a_save(victim):
    error, _ = victim(reported=True, told_after=0.5)
    assert (type(error), str(error)) == (StageFailed, "rank 2: boom")


def test_a_victim_does_not_wait_for_a_rank_0_that_is_gone_or_has_not_heard_of_it(victim):
    for state in ({"reported": True, "rank0_status": RANK_0_IS_GONE}, {"reported": False}):
        error, seconds = victim(**state)
        assert (type(error), str(error)) == (ChannelError, "waited for the act of micro-batch 3")
        assert seconds < 5


def test_rank_0_is_named_as_gone_only_by_a_victim_that_it_neither_heard_nor_told_anything(victim):
    error, _ = victim(reported=False, rank0_status=RANK_0_IS_GONE)
    assert str(error) == f"{RANK_0_IS_GONE}; waited for the act of micro-batch 3"
    error, _ = victim(reported=False, rank0_status=RANK_0_IS_GONE, told_after=0)
    assert str(error) == "rank 2: boom"
    error, _ = victim(reported=False, rank0_status=RANK_0_IS_GONE, told_after=0, told={**CAUSE, "is_victim": True})
    assert str(error) == "waited for the act of micro-batch 3"


def test_the_records_right_before_failures_are_handed_on(monkeypatch):
    monkeypatch.setattr(RpcWorkerGroup, "tell", lambda *args, **arguments: [])
    taken = []
    for rank, error in ((0, ChannelError("a victim")), (0, ValueError("boom"))):
        outbox = Reporter(replace(RANK_1, rank=rank))
        outbox._sent_at = time.monotonic()
        outbox.add({"name": type(error).__name__})
        assert outbox.report_failure(error)
    with pytest.raises(StageFailed, match="rank 0: ValueError: boom"):
        RpcWorkerGroup(RANK_1, taken.append, lambda: None).call("train")
    assert [record["name"] for record in taken] == ["ChannelError", "ValueError"]
    assert reports._reports.empty()


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("RPC ran for more than set timeout (5000 ms) and will now be marked with an error", "does not answer in time"),
        ("Error on pipe: ECONNRESET", "is gone"),
    ],
)
def test_a_process_that_answers_too_late_is_not_called_gone(said, what):
    with (
        pytest.raises(ChannelError, match=f"^control plane: rank 0 {what}: {said[:9]}"),
        translate_rpc_errors("rank 0"),
    ):
        raise RuntimeError(f"{said}\nand more")

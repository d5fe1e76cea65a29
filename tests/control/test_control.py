"""The control plane: what a process raises that fails because another one has, and how late and gone are told apart."""

import functools
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.futures

from adl_dist.control import serve as serving
from adl_dist.control.group import RpcWorkerGroup
from adl_dist.control.messages import Abort, Done, Failure, Load
from adl_dist.control.rpc import ControlPlane, JobEndpoint
from adl_dist.control.serve import RpcReporter, serve
from adl_dist.distributed.rpc_errors import Call, PeerError, PeerGoneError, PeerLateError
from adl_dist.distributed.world import single_process
from adl_dist.errors import ChannelError, StageFailed

CAUSE = Failure(rank=2, text="rank 2: boom")
COMMAND = Load("a checkpoint", 0)
RANK_0_IS_GONE = "stage 0 (node, pid 7): the process is gone: killed, or it crashed"


class Plane(ControlPlane):
    """A control plane whose other processes take everything, or are gone."""

    def __init__(self, rank, *, others_are_gone=False):
        super().__init__(replace(single_process(torch.device("cpu")), rank=rank, size=3), JobEndpoint())
        self._gone = others_are_gone

    def call(self, rank, method, *arguments, seconds=None, **options):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("closed")) if self._gone else future.set_result(None)
        return Call(f"rank {rank}", lambda limit: future, 1.0)


class WaitsInVain:
    """A worker whose peer is gone."""

    def execute(self, command, reporter):
        raise ChannelError("waited for the act of micro-batch 3")


class Listens:
    """A coordinator that keeps what is reported to it."""

    def __init__(self):
        self.records = []
        self.take_record = self.records.append

    def take_part(self, part):
        raise AssertionError("nothing is saved")


@pytest.fixture
def victim(monkeypatch):
    """Serves on rank 1 as a victim; what it raises, and after how many seconds."""
    monkeypatch.setattr(serving, "CAUSE_SECONDS", 0.02)
    monkeypatch.setattr(serving, "HEARD_SECONDS", 0.1)
    monkeypatch.setattr(serving, "LAST_SAVE_SECONDS", 20.0)

    def fail(*, reported, rank0_status=None, told_after=None, told=CAUSE):
        plane = Plane(1, others_are_gone=not reported)
        endpoint = plane.endpoint
        monkeypatch.setattr(endpoint.heartbeat, "rank0_status", lambda: rank0_status)
        endpoint.take_command(COMMAND)
        if told_after is not None:
            threading.Timer(told_after, endpoint.take_command, [Abort(told)]).start()
        began = time.monotonic()
        with pytest.raises((ChannelError, StageFailed)) as error:
            serve(WaitsInVain(), plane)
        assert endpoint.commands.empty()
        return error.value, time.monotonic() - began, plane.world.is_rank_0_informed

    return fail


def test_a_victim_waits_for_the_cause_while_rank_0_saves(victim):
    error, _, _ = victim(reported=True, told_after=0.5)
    assert (type(error), str(error)) == (StageFailed, "rank 2: boom")


def test_a_victim_does_not_wait_for_a_rank_0_that_is_gone(victim):
    """A victim does not wait for a rank 0 that is gone or has not heard of it."""
    for state in ({"reported": True, "rank0_status": RANK_0_IS_GONE}, {"reported": False}):
        error, seconds, is_informed = victim(**state)
        assert (type(error), str(error)) == (ChannelError, "waited for the act of micro-batch 3")
        assert is_informed == state["reported"]
        assert seconds < 5


def test_rank_0_is_gone_only_for_a_victim_it_never_talked_to(victim):
    """Rank 0 is named as gone only by a victim that it neither heard nor told anything."""
    error, _, _ = victim(reported=False, rank0_status=RANK_0_IS_GONE)
    assert str(error) == f"{RANK_0_IS_GONE}; waited for the act of micro-batch 3"
    error, _, is_informed = victim(reported=False, rank0_status=RANK_0_IS_GONE, told_after=0)
    assert (str(error), is_informed) == ("rank 2: boom", True)
    too = replace(CAUSE, is_victim=True)
    error, _, _ = victim(reported=False, rank0_status=RANK_0_IS_GONE, told_after=0, told=too)
    assert str(error) == "waited for the act of micro-batch 3"


def test_the_records_right_before_failures_are_handed_on():
    plane, policy = Plane(0), Listens()
    for error in (ChannelError("a victim"), ValueError("boom")):
        reporter = RpcReporter(plane)
        reporter._sent_at = time.monotonic()
        reporter.record({"name": type(error).__name__})
        assert reporter.failure(error)
    with pytest.raises(StageFailed, match="rank 0: unexpected ValueError: boom"):
        RpcWorkerGroup(plane, policy, lambda: None).call(COMMAND, Done)
    assert [record["name"] for record in policy.records] == ["ChannelError", "ValueError"]
    assert plane.endpoint.reports.empty()


def test_a_process_that_answers_late_is_not_taken_for_gone():
    late, gone, here = torch.futures.Future(), torch.futures.Future(), torch.futures.Future()
    limits = []
    call = functools.partial(Call, "rank 0")
    waiting = call(lambda limit: limits.append(limit) or late, 0.1)
    gone.set_exception(RuntimeError("any text\nand more"))
    here.set_result("an answer")
    with pytest.raises(PeerLateError, match=r"^control plane: rank 0 does not answer within 0.1 s$"):
        waiting.wait()
    with pytest.raises(PeerGoneError, match=r"^control plane: rank 0 is gone: any text$"):
        call(lambda limit: gone, 0.1).wait()
    assert call(lambda limit: here, 0.1).wait() == "an answer"
    assert limits[0] > 1, "RPC's own limit, of which only a text would tell, comes later"


def test_a_call_by_a_process_that_has_left_says_so():
    """A call by a process that has left says so and calls no other process gone."""

    def start(limit):
        raise RuntimeError("RPC has not been initialized\nand more")

    call = Call("rank 0", start, 0.1)
    with pytest.raises(PeerError, match=r"this process has left it: RPC has not been initialized$") as left:
        call.wait()
    assert type(left.value) is PeerError

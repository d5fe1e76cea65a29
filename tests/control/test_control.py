"""The control plane: the error of a process that fails because of another one, and how late differs from gone."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.futures

from adl_dist.control import group as serving
from adl_dist.control.group import serve
from adl_dist.control.job import Job
from adl_dist.control.messages import Abort, Failure, Load
from adl_dist.control.rpc import ControlPlane, JobEndpoint
from adl_dist.distributed.rpc_errors import Call, PeerError, PeerGoneError, PeerLateError
from adl_dist.distributed.world import single_process
from adl_dist.errors import ChannelError, StageFailed
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.schedule import Pipeline, Segment, method, training_work

CAUSE = Failure(rank=2, text="rank 2: boom")
COMMAND = Load("a checkpoint", 0)
RANK_0_IS_GONE = "stage 0 (node, pid 7): the process is gone: killed, or it crashed"


class Plane(ControlPlane):
    """A control plane whose other processes take everything, or are gone."""

    def __init__(self, rank, *, others_are_gone=False):
        super().__init__(replace(single_process(torch.device("cpu")), rank=rank, size=3), JobEndpoint())
        self._gone = others_are_gone

    def call(self, rank, method, *arguments, seconds=None, **options):
        if rank == self.world.rank:
            return super().call(rank, method, *arguments)
        future = torch.futures.Future()
        future.set_exception(RuntimeError("closed")) if self._gone else future.set_result(None)
        return Call(f"rank {rank}", lambda limit: future, 1.0)


class WaitsInVain:
    """A worker whose peer is gone."""

    def execute(self, command, *_):
        raise ChannelError("waited for the act of micro-batch 3")


WAITED, GONE = "waited for the act of micro-batch 3", {"rank0_status": RANK_0_IS_GONE}
VICTIMS = {  # how rank 0 is reached, and the error of a process whose peer is gone
    "the cause comes after a save": ({"is_reported": True, "cause_after": 0.5}, "rank 2: boom"),
    "rank 0 has heard and is gone": ({"is_reported": True, **GONE}, WAITED),
    "rank 0 has not heard": ({"is_reported": False}, WAITED),
    "rank 0 was gone before": ({"is_reported": False, **GONE}, f"{RANK_0_IS_GONE}; {WAITED}"),
    "the cause is under way": ({"is_reported": False, **GONE, "cause_after": 0.0}, "rank 2: boom"),
    "the cause is a victim": (
        {"is_reported": False, **GONE, "cause_after": 0.0, "cause": replace(CAUSE, is_victim=True)}, WAITED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), VICTIMS.values(), ids=VICTIMS)
def test_a_victim_raises_the_cause_if_rank_0_reports_it(case, expected, monkeypatch):
    monkeypatch.setattr(serving, "CAUSE_SECONDS", 0.02)
    monkeypatch.setattr(serving, "HEARD_SECONDS", 0.1)
    monkeypatch.setattr(serving, "LAST_SAVE_SECONDS", 20.0)
    plane = Plane(1, others_are_gone=not case["is_reported"])
    monkeypatch.setattr(plane.endpoint.heartbeat, "rank0_status", lambda: case.get("rank0_status"))
    plane.endpoint.take(COMMAND)
    if (seconds := case.get("cause_after")) is not None:
        threading.Timer(seconds, plane.endpoint.take, [Abort(case.get("cause", CAUSE))]).start()
    began = time.monotonic()
    with pytest.raises((ChannelError, StageFailed)) as error:
        serve(WaitsInVain(), plane)
    assert str(error.value) == expected
    assert plane.endpoint.commands.empty()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("backend", "said", "reason"), [
    ("nccl", None, RANK_0_IS_GONE), ("nccl", CAUSE, CAUSE.text), ("gloo", None, None)
])  # fmt: skip
def test_a_dead_rank_0_ends_waits_on_a_gpu(backend, said, reason):
    """Over gloo a message that does not come tells it; and what rank 0 has said before stays the cause."""
    world = replace(single_process(torch.device("cpu")), rank=1, backend=backend)
    job = Job(world, WatchdogTimeouts())
    stop = job._plane.endpoint.stop
    if said is not None:
        stop.take(Abort(said))
    job._end_without_rank_0(RANK_0_IS_GONE)
    assert (stop.failure.text if stop.failure is not None else None) == reason
    assert job._plane.endpoint.commands.qsize() == (reason == RANK_0_IS_GONE), "who waits for a command hears of it"
    assert world.is_aborted == (reason == RANK_0_IS_GONE)


def test_a_process_that_answers_late_is_not_taken_for_gone():
    """Nor is any by a process that has itself left the control plane."""
    late, gone, here = torch.futures.Future(), torch.futures.Future(), torch.futures.Future()
    gone.set_exception(RuntimeError("any text\nand more"))
    here.set_result("an answer")
    limits = []

    def has_left(limit):
        raise RuntimeError("RPC has not been initialized\nand more")

    for start, kind, text in (
        (lambda limit: limits.append(limit) or late, PeerLateError, "rank 0 does not answer within 0.1 s"),
        (lambda limit: gone, PeerGoneError, "rank 0 is gone: any text"),
        (has_left, PeerError, "this process has left it: RPC has not been initialized"),
    ):
        error = Call("rank 0", start, 0.1).answer_or_error()
        assert (type(error), str(error)) == (kind, f"control plane: {text}")
    assert Call("rank 0", lambda limit: here, 0.1).wait() == "an answer"
    assert limits[0] > 1, "RPC's own limit, of which only a text would tell, comes later"


def order_of(loop, news):
    """Hand out the actions of a segment; after the third one ``news`` arrives."""
    handed_out = []
    for _, action in loop:
        handed_out.append(action)
        if len(handed_out) == 3:
            news()
    return handed_out


def test_a_failure_elsewhere_ends_a_segment_between_two_actions():
    """Over NCCL nothing else would: what waits on a GPU waits for ever, and the host does not notice."""
    endpoint, aborted = JobEndpoint(), threading.Event()
    endpoint.on_abort = aborted.set
    segment = Segment(epoch=0, first_update=0, num_samples=8, micro_batch_size=1, accumulation_steps=2)
    pipeline = Pipeline(method("adl", accumulation_steps=2), 1)
    actions = training_work(pipeline, segment, stages=[0])[0].actions
    loop = endpoint.stop.applied(((0, a) for a in actions), segment, pipeline, {}, posted_ahead=2)
    with pytest.raises(StageFailed, match="rank 2: boom"):
        order_of(loop, lambda: endpoint.take(Abort(CAUSE)))
    assert aborted.wait(5)
    assert isinstance(endpoint.commands.get_nowait(), Abort), "who waits for the next command finds it, too"

"""Joins stages and channels into seats."""

from collections.abc import Mapping

from adl_dist.engine import Seat
from adl_dist.runtime.world import World
from adl_dist.schedule import Method
from adl_dist.stage import Stage
from adl_dist.transport import LocalChannel, ProcessReceiver, ProcessSender, Receiver, Sender, TensorSpec

Specs = list[TensorSpec]


def local_seats(stages: Mapping[int, Stage], acts: Mapping[int, Specs], target: Specs) -> dict[int, Seat]:
    """Seats of all K stages in one process.

    Args:
        stages: all of them, by k.
        acts: what arrives at each stage.
        target: what the loss takes beside the output.
    """
    last = max(stages)
    seats = {k: Seat(stage, receivers={}, senders={}) for k, stage in stages.items()}

    def join(what: str, source: int, to: int, specs: Specs) -> None:
        channel = LocalChannel(specs, what=what, edge=f"stage {source} -> stage {to}")
        seats[source].senders[what] = seats[to].receivers[what] = channel  # type: ignore[index]

    for k in range(last):
        join("act", k, k + 1, acts[k + 1])
        join("grad", k + 1, k, _with_gradient(acts[k + 1]))
    if last > 0:
        join("target", 0, last, target)
    return seats


def process_seat(
    world: World, stage: Stage, acts: Mapping[int, Specs], target: Specs, *, method: Method, num_stages: int
) -> dict[int, Seat]:
    """The seat of the one stage of this process, connected to its neighbours'."""
    k, last = world.rank, num_stages - 1
    receivers: dict[str, Receiver] = {}
    senders: dict[str, Sender] = {}

    def send(what: str, specs: Specs) -> None:
        # In training no more than d + 1 micro-batches are in flight, so a send never waits; in evaluation the bound
        # keeps stage 0 from running away.
        most = method.delay(0, num_stages=num_stages) + 2
        senders[what] = ProcessSender(world.edges[what, k], specs, what=what, max_pending=most)

    def receive(what: str, source: int, specs: Specs) -> None:
        receivers[what] = ProcessReceiver(world.edges[what, source], specs, what=what, device=world.device)

    if k < last:
        send("act", acts[k + 1])
        receive("grad", k + 1, _with_gradient(acts[k + 1]))
    if k > 0:
        receive("act", k - 1, acts[k])
        send("grad", _with_gradient(acts[k]))
    if k == 0 and last > 0:
        send("target", target)
    if k == last and last > 0:
        receive("target", 0, target)
    return {k: Seat(stage, receivers=receivers, senders=senders)}


def _with_gradient(specs: Specs) -> Specs:
    return [spec for spec in specs if spec.is_floating_point]

"""From what all processes told of themselves to one picture and the likely cause of a stall. Pure: no clock, no I/O."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adl_dist.checkpoint.async_save import COMMITTING, SAVING
from adl_dist.monitor.activity import FAILED, IDLE
from adl_dist.monitor.status import COORDINATOR, CoordinatorStatus, ProcessStatus, RankStatus, StageStatus
from adl_dist.schedule.actions import LINKS, RECEIVES, Op

GONE = "gone"

# Of a silent process on rank 0's machine, by the kernel's letter for its state.
SILENT = {
    GONE: "the process is gone: killed, or it crashed",
    "Z": "the process is gone: killed, or it crashed",
    "T": "the process is stopped (SIGSTOP); kill -CONT {pid} lets it continue",
    "t": "the process is held by a debugger",
    "D": "the process does not answer: it is held in the kernel, by a disk or a network file system",
    "": "it neither answers nor refuses: its host is down or cut off (link, firewall), or the process is stopped there",
}
ALIVE = "the process runs but does not answer: one long call does not let other threads run, or the link is down"
# The most telling first.
WORST_FIRST = (GONE, "Z", "T", "t", "D", "")


class Cause(NamedTuple):
    """What holds up all others.

    Attributes:
        rank: of the process; None: it is not one process.
        text: with its name.
    """

    rank: int | None
    text: str


def picture(statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> str:
    """One line per stage: where, what it is at and for how long, what it sent and received last."""
    lines = []
    for member in statuses:
        seen, told = member.seen, []
        for stage in seen.stages if seen else [StageStatus(stage=member.rank, doing="has told nothing yet")]:
            what = f"{stage.doing} since {stage.seconds:.1f} s"
            if seen and seen.at and stage.doing != "wait for its turn":
                what += f", at {seen.at}"
            if member.silent_seconds:
                what = f"no answer since {member.silent_seconds:.1f} s; before: {what}"
            told.append((stage.stage, "; ".join([what, *_beside(seen), *_last(stage)])))
        where = f"{seen.host}, pid {seen.pid}" if seen else "-"
        lines += [f"  stage {k}  ({where})  {what}" for k, what in told]
    lines.append(f"  coordinator  {coordination.doing} since {coordination.seconds:.1f} s")
    return "\n".join(lines)


def cause_of(statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> Cause:
    """The likely cause: the process that cannot answer, else the end of the chain of who waits for whom."""
    silent = [m for m in statuses if m.state == GONE or m.silent_seconds > 0]
    if silent:
        worst = min(silent, key=lambda m: WORST_FIRST.index(m.state) if m.state in WORST_FIRST else len(WORST_FIRST))
        return Cause(worst.rank, f"{worst.name}: {_why_silent(worst)}")
    homes = {stage.stage: member for member in statuses if member.seen for stage in member.seen.stages}
    stages = {stage.stage: stage for member in statuses if member.seen for stage in member.seen.stages}
    if lost := _lost_message(homes, stages):
        return lost
    waits_for = {k: _waits_for(k, homes, stages) for k in stages}
    waits_for[COORDINATOR] = _coordinator_waits_for(statuses, coordination)
    waits_for |= {node: [] for node in waits_for[COORDINATOR] if node < COORDINATOR}
    ends = [node for node, peers in waits_for.items() if not peers]
    if not ends:
        return Cause(None, _cycle(waits_for))
    held_up = {end: sum(end in _reached(node, waits_for) for node in waits_for) for end in ends}
    end = max(ends, key=lambda node: (held_up[node], stages[node].seconds if node in stages else 0.0))
    if end == COORDINATOR:
        where = f" ({statuses[0].seen.host}, pid {statuses[0].seen.pid})" if statuses[0].seen else ""
        at = f", at {coordination.at}" if coordination.at else ""
        return Cause(
            0, f"the coordinator on rank 0{where}: {coordination.doing} since {coordination.seconds:.0f} s{at}"
        )
    if end < COORDINATOR:
        return _slow_save(next(member for member in statuses if _saver_of(member) == end))
    return Cause(homes[end].rank, _why_busy(homes[end], stages[end]))


def _why_silent(member: RankStatus) -> str:
    said = SILENT.get(member.state, ALIVE)
    return said.format(pid=member.seen.pid if member.seen else "PID")


def _why_busy(member: RankStatus, stage: StageStatus) -> str:
    seen = member.seen
    assert seen is not None, "a process that has told nothing is no end of a chain"
    name = f"stage {stage.stage} ({seen.host}, pid {seen.pid})"
    at = f", at {seen.at}" if seen.at else ""
    since = f"since {stage.seconds:.0f} s"
    if stage.op == Op.LOAD.value:
        by = ""
        if seen.loaders:
            shown = ", ".join(f"pid {pid}{' is stopped' * (state in ('T', 't'))}" for pid, state in seen.loaders)
            by = f", by its {len(seen.loaders)} worker processes ({shown})"
        return f"{name}: the data loader is stuck: it loads micro-batch {stage.number} {since}{by}{at}"
    if seen.phase in ("save", "load"):
        return f"{name}: takes long to {seen.phase} its part of a checkpoint, {since}{at}"
    return f"{name}: still at work: {stage.doing} {since}{at}"


def _waits_for(k: int, homes: Mapping[int, RankStatus], stages: Mapping[int, StageStatus]) -> list[int]:
    seen = homes[k].seen
    assert seen is not None, "stages come from what processes told"
    if seen.phase == FAILED:
        return [COORDINATOR]
    # A neighbour that has done its part takes what is sent to it without doing anything.
    return [n for n in stages[k].waits_for if n == COORDINATOR or n in stages]


def _coordinator_waits_for(statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> list[int]:
    if not coordination.is_waiting:  # unless it works itself, it waits for a save that runs alongside training
        for what in (SAVING, COMMITTING):
            if savers := [_saver_of(m) for m in statuses if m.seen and m.seen.saving == what]:
                return savers
        return []
    at_work = [m for m in statuses if m.seen and m.seen.phase not in (IDLE, FAILED)]
    return [stage.stage for m in at_work if m.seen for stage in m.seen.stages] or [m.rank for m in statuses]


def _saver_of(member: RankStatus) -> int:
    """The thread of a process that saves, among those that wait for each other."""
    return COORDINATOR - 1 - member.rank


def _slow_save(member: RankStatus) -> Cause:
    seen = member.seen
    assert seen is not None, "it has told that it saves"
    what = "write its part of a checkpoint" if seen.saving == SAVING else "complete a checkpoint"
    at = f", at {seen.saving_at}" if seen.saving_at else ""
    return Cause(member.rank, f"{member.name}: takes long to {what}, alongside training{at}")


def _beside(seen: ProcessStatus | None) -> list[str]:
    told = []
    if seen and seen.saving:
        told.append(f"{seen.saving} a checkpoint alongside{f', at {seen.saving_at}' if seen.saving_at else ''}")
    if seen and seen.is_debugged:
        told.append("in a debugger, so the job is not ended")
    return told


def _lost_message(homes: Mapping[int, RankStatus], stages: Mapping[int, StageStatus]) -> Cause | None:
    """A message that one stage has sent and another still waits for."""
    for k, stage in stages.items():
        home = homes[k].seen
        if home is not None and home.runs_ahead:
            continue
        op = next((op for op in RECEIVES if op.value == stage.op), None)
        if op is None:
            continue
        sender = stages.get(stage.waits_for[0])
        send = next(send for send, link in LINKS.items() if link.recv is op)
        if sender is None or sender.segment != stage.segment:
            continue
        # By their counts, since an edge keeps its order: numbers may go down, as GPipe's gradients do.
        if sender.counts.get(send.value, 0) > stage.counts.get(op.value, 0):
            return Cause(
                None,
                f"the link from stage {sender.stage} to stage {k}: {RECEIVES[op].what} {stage.number} was sent and has "
                f"not arrived in {stage.seconds:.0f} s; both processes answer, so look at the network between them",
            )
    return None


def _reached(node: int, waits_for: Mapping[int, Sequence[int]]) -> set[int]:
    reached: set[int] = set()
    ahead = [node]
    while ahead:
        for peer in waits_for[ahead.pop()]:
            if peer not in reached:
                reached.add(peer)
                ahead.append(peer)
    return reached


def _cycle(waits_for: Mapping[int, Sequence[int]]) -> str:
    walked: list[int] = []
    node = min(waits_for)
    while node not in walked:
        walked.append(node)
        node = waits_for[node][0]
    ring = [*walked[walked.index(node) :], node]
    shown = " waits for ".join("the coordinator" if n == COORDINATOR else f"stage {n}" for n in ring)
    return f"a cycle: {shown}; that is a bug of adl_dist, and this picture is what a report of it needs"


def _last(stage: StageStatus) -> list[str]:
    """The last message on each edge."""
    sent = [f"{link.what} {stage.last[op.value]}" for op, link in LINKS.items() if op.value in stage.last]
    got = [f"{link.what} {stage.last[op.value]}" for op, link in RECEIVES.items() if op.value in stage.last]
    return [f"last {how} {', '.join(which)}" for how, which in (("sent", sent), ("got", got)) if which]

"""The picture and likely cause of a stall, derived from all statuses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adl_dist.checkpoint.async_save import COMMITTING, SAVING
from adl_dist.monitor.activity import FAILED, IDLE
from adl_dist.monitor.status import COORDINATOR, CoordinatorStatus, ProcessStatus, RankStatus, StageStatus
from adl_dist.schedule.actions import LINKS, RECEIVES, TIED, Op

GONE = "gone"

# The text for a silent process on rank 0's machine, by the kernel's letter for its state; the most telling first.
SILENT = {
    GONE: "the process is gone: killed, or it crashed",
    "Z": "the process is gone: killed, or it crashed",
    "T": "the process is stopped (SIGSTOP); kill -CONT {pid} lets it continue",
    "t": "the process is held by a debugger",
    "D": "the process does not answer: it is held in the kernel, by a disk or a network file system",
    "": "it neither answers nor refuses: its host is down or cut off (link, firewall), or the process is stopped there",
}
ALIVE = "the process runs but does not answer: one long call does not let other threads run, or the link is down"


class Cause(NamedTuple):
    """The cause of a stall."""

    rank: int | None  # of the process, if it is one process
    text: str


class _Stage(NamedTuple):
    rank: int
    process: ProcessStatus
    status: StageStatus


def picture(statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> str:
    """Return one line per stage: process, action, last messages."""
    lines = []
    for known in statuses:
        seen, where = known.seen, known.seen.where if known.seen else "(-)"
        for stage in seen.stages if seen else [StageStatus(stage=known.rank, doing="no answer yet")]:
            parts = [f"{stage.doing} since {stage.seconds:.1f} s"]
            if seen and stage.doing != "wait for its turn":
                parts[0] += _at(seen.at)
            if known.silent_seconds:
                parts[0] = f"no answer since {known.silent_seconds:.1f} s; before: {parts[0]}"
            if seen and seen.saving:
                parts.append(f"{seen.saving} a checkpoint alongside{_at(seen.saving_at)}")
            if seen and seen.is_debugged:
                parts.append("in a debugger, so the job is not ended")
            for how, links in (("sent", LINKS), ("got", RECEIVES)):
                if messages := [f"{link.what} {stage.last[op]}" for op, link in links.items() if op in stage.last]:
                    parts.append(f"last {how} {', '.join(messages)}")
            lines.append(f"  stage {stage.stage}  {where}  {'; '.join(parts)}")
    return "\n".join([*lines, f"  coordinator  {coordination.doing} since {coordination.seconds:.1f} s"])


def describe_silence(known: RankStatus) -> str:
    """Return the name of a silent process and the likely reason."""
    pid = known.seen.pid if known.seen else "PID"
    return f"{known.name}: {SILENT.get(known.state, ALIVE).format(pid=pid)}"


def cause_of(statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> Cause:
    """Return the likely cause: a silent process, or where all waits end."""
    if silent := [known for known in statuses if known.state == GONE or known.silent_seconds > 0]:
        order = [*SILENT]
        worst = min(silent, key=lambda known: order.index(known.state) if known.state in order else len(order))
        return Cause(worst.rank, describe_silence(worst))
    stages = {s.stage: _Stage(known.rank, known.seen, s) for known in statuses if known.seen for s in known.seen.stages}
    if lost := _lost_message(stages):
        return lost
    # Of stages that still wait: a neighbour that has finished receives without any action.
    waits_for = {k: [n for n in s.status.waits_for if n == COORDINATOR or n in stages] for k, s in stages.items()}
    waits_for |= {k: [COORDINATOR] for k, stage in stages.items() if stage.process.phase == FAILED}
    savers = {} if coordination.is_waiting else _savers(statuses)
    waits_for[COORDINATOR] = [*savers]
    if coordination.is_waiting:
        at_work = [k for k, stage in stages.items() if stage.process.phase not in (IDLE, FAILED)]
        waits_for[COORDINATOR] = at_work or [known.rank for known in statuses]
    waits_for |= {saver: [] for saver in savers}
    nodes = [node for node in waits_for if node != COORDINATOR]  # which waits for several
    held_up = Counter(end for node in nodes if (end := _end_of_waits(node, waits_for)) is not None)
    if not held_up:
        return Cause(None, "a cycle of waits, which is a bug of adl_dist; this picture is what a report of it needs")
    end = max(held_up, key=lambda node: (held_up[node], stages[node].status.seconds if node in stages else 0.0))
    if end == COORDINATOR:
        where = f" {statuses[0].seen.where}" if statuses[0].seen else ""
        since = f"since {coordination.seconds:.0f} s{_at(coordination.at)}"
        return Cause(0, f"the coordinator on rank 0{where}: {coordination.doing} {since}")
    return savers[end] if end in savers else Cause(stages[end].rank, _why_busy(stages[end]))


def _at(place: str) -> str:
    return f", at {place}" if place else ""


def _why_busy(stage: _Stage) -> str:
    seen, status = stage.process, stage.status
    name, since = f"stage {status.stage} {seen.where}", f"since {status.seconds:.0f} s"
    if status.op is Op.LOAD:
        by = ""
        if seen.loaders:
            shown = ", ".join(f"pid {pid}{' is stopped' * (state in ('T', 't'))}" for pid, state in seen.loaders)
            by = f", by its {len(seen.loaders)} worker processes ({shown})"
        why = f"the data loader is stuck: it loads micro-batch {status.number} {since}{by}"
    elif seen.phase in ("save", "load"):
        why = f"takes long to {seen.phase} its part of a checkpoint, {since}"
    else:
        why = f"still at work: {status.doing} {since}"
    return f"{name}: {why}{_at(seen.at)}"


def _savers(statuses: Sequence[RankStatus]) -> dict[int, Cause]:
    """Return the saving threads that an idle coordinator waits for.

    Keys are nodes in the graph of waits, values the causes to report.
    """
    for what, doing in ((SAVING, "write its part of a checkpoint"), (COMMITTING, "complete a checkpoint")):
        savers = {
            COORDINATOR - 1 - known.rank: Cause(
                known.rank, f"{known.name}: takes long to {doing}, alongside training{_at(known.seen.saving_at)}"
            )
            for known in statuses
            if known.seen and known.seen.saving == what
        }
        if savers:
            return savers
    return {}


def _lost_message(stages: Mapping[int, _Stage]) -> Cause | None:
    """Return a link as the cause if a sent message is missing, or None."""
    for k, (_, process, status) in stages.items():
        if status.op not in RECEIVES or process.runs_ahead:
            continue
        sender = stages.get(status.waits_for[0])
        send = next(send for send, link in LINKS.items() if link.recv is status.op)
        if send in TIED:  # their counts are sums over all ties and all stages that share them
            continue
        if sender is None or sender.status.segment != status.segment:
            continue
        # By counts, since an edge keeps its order: numbers may go down, as for GPipe's gradients.
        if sender.status.counts.get(send, 0) > status.counts.get(status.op, 0):
            return Cause(
                None,
                f"the link from stage {sender.status.stage} to stage {k}: {LINKS[send].what} {status.number} was sent "
                f"and has not arrived in {status.seconds:.0f} s; both processes answer, so look at the network between "
                "them",
            )
    return None


def _end_of_waits(node: int, waits_for: Mapping[int, Sequence[int]]) -> int | None:
    """Return the node for which ``node`` waits in the end, or None in a cycle."""
    for _ in waits_for:
        if not waits_for[node]:
            return node
        node = waits_for[node][0]
    return None

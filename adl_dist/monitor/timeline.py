"""What each stage hands rank 0 of the window of a segment, and how rank 0 puts it on one clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.trace import Instant
from adl_dist.report.timeline import Timed, Timeline
from adl_dist.schedule.actions import BACKWARDS


@dataclass(frozen=True, kw_only=True)
class StageWindow:
    """The events of one stage, in seconds of ``clock``."""

    epoch: int
    device: str
    is_steady: bool
    clock: Instant  # read by the stage's process after the last of them
    events: Sequence[Timed]


def window_of(log: ActivityLog, stage: int) -> StageWindow | None:
    """Return what ``stage`` did in the window of the present segment; None: it had none, or no action was in it."""
    events = log.in_window.get(stage)
    if log.window is None or not events:
        return None
    timed = []
    for event in events:
        op, number = event.action
        stale = None
        if op in BACKWARDS and event.forward_version is not None:
            stale = event.version - event.forward_version
        timed.append(Timed(op.value, number, event.begin, event.end, stale))
    return StageWindow(
        epoch=events[0].segment.segment.epoch,
        device=log.device.type,
        is_steady=log.window.is_steady and stage not in log.windowed,  # else it was ended within the window
        clock=Instant.now(),
        events=timed,
    )


def timeline_of(windows: Sequence[StageWindow]) -> Timeline:
    """Return the timeline of all stages, in their order; called on rank 0."""
    shifts = [window.clock.on_this_clock() - window.clock.seconds for window in windows]
    origin = min(window.events[0].begin + shift for window, shift in zip(windows, shifts, strict=True))
    return Timeline(
        epoch=windows[0].epoch,
        device=windows[0].device,
        is_steady=all(window.is_steady for window in windows),
        stages=[
            [
                each._replace(begin=round(each.begin + shift - origin, 7), end=round(each.end + shift - origin, 7))
                for each in window.events
            ]
            for window, shift in zip(windows, shifts, strict=True)
        ],
    )

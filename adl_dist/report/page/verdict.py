"""One sentence about a run's stages: the idlest, its cause, and the next step."""

from collections.abc import Sequence

from adl_dist.report.runs import Run
from adl_dist.report.timeline import Timeline
from adl_dist.schedule import Costs, Method, speed

LEAST = 0.1  # share of the time; less is not worth a change


def verdict(run: Run, timeline: Timeline | None) -> str | None:
    """Return the sentence, or None for one stage or unknown ones."""
    busy = [float(stage["busy_share"]) for stage in run.summary.get("stages", ())]
    if len(busy) < 2 or run.pipeline is None or min(busy) <= 0:
        return None
    if "processes" in run.summary:
        return f"Each process ran several of the {len(busy)} stages, which took turns: its stages were busy in turn."
    stage = min(range(len(busy)), key=lambda k: busy[k])
    idle = 1 - busy[stage]
    if idle < LEAST:
        return f"All stages were busy for at least {min(busy):.0%} of the time."
    causes = idle_by_cause(run.pipeline.method, busy, stage)
    loading = 0.0 if timeline is None else timeline.shares(stage)["load, send"]
    if loading > max(causes.values()):
        causes = {"load": loading}
    cause = max(causes, key=lambda name: causes[name])
    return f"Stage {stage} was idle for {idle:.0%} of the time{_advice(cause, busy, run)}."


def idle_by_cause(method: Method, busy: Sequence[float], stage: int) -> dict[str, float]:
    """Return the parts of a stage's idle time, in shares of the time.

    ``schedule``: also with an even cut; ``cut``: with stages of this work; ``rest``: messages, other processes, and the
    begins and ends of segments.
    """
    expected = []
    for work in ([1.0] * len(busy), busy):  # all stages run the same micro-batches: the busy share tells their work
        costs = Costs(forward=[each / 3 for each in work], backward=[2 * each / 3 for each in work])
        expected.append(speed(method, costs).busy[stage])
    even, cut = expected
    return {"schedule": 1 - even, "cut": even - cut, "rest": cut - busy[stage]}


def _advice(cause: str, busy: Sequence[float], run: Run) -> str:
    if cause == "schedule":
        return f", as {run.method['name']} leaves it: try method=adl, or a larger method.accumulation_steps"
    if cause == "cut":
        most = max(range(len(busy)), key=lambda k: busy[k])
        text = f", because the cut is uneven (stage {most} was busy for {busy[most]:.0%})"
        is_measured = run.config.get("partition", run.config).get("balance") == "auto"
        return f"{text}: try {'fewer stages' if is_measured else 'partition.balance=auto'}"
    if cause == "load":
        return ", loading data or sending: try data.num_workers=2, or runtime.codec=int8"
    return (
        ", more than its schedule and cut explain: it waited for messages or for a free core; try larger "
        "micro-batches, fewer stages, or runtime.codec=int8 over a slow link"
    )

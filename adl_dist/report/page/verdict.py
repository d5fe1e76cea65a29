"""One sentence about a run's stages: the idlest, its likely cause, and the next step."""

from adl_dist.report.runs import Run

LEAST = 0.1  # share of the time; less is not worth a change


def verdict(run: Run) -> str | None:
    """Return the sentence, or None for one stage or unknown ones."""
    busy = [float(stage["busy_share"]) for stage in run.summary.get("stages", ())]
    if len(busy) < 2 or min(busy) <= 0:
        return None
    if "processes" in run.summary:
        return f"Each process ran several of the {len(busy)} stages, which took turns: its stages were busy in turn."
    stage, most = busy.index(min(busy)), busy.index(max(busy))
    idle = 1 - busy[stage]
    if idle < LEAST:
        return f"All stages were busy for at least {min(busy):.0%} of the time."
    if run.timeline is not None and run.timeline.shares(stage)["load, send"] > idle / 2:
        why = "loading data or sending: try data.num_workers=2, or runtime.codec=int8"
    elif busy[most] - busy[stage] > idle / 2:
        is_measured = run.config.get("partition", run.config).get("balance") == "auto"
        way_out = "fewer stages" if is_measured else "partition.balance=auto"
        why = f"because the cut is uneven (stage {most} was busy for {busy[most]:.0%}): try {way_out}"
    elif run.pipeline is not None and run.pipeline.spec.flush:
        why = "as its schedule leaves it, or waiting: try method=adl, or a larger method.accumulation_steps"
    else:
        why = (
            "waiting for messages or for a free core: try larger micro-batches, fewer stages, or runtime.codec=int8 "
            "over a slow link"
        )
    return f"Stage {stage} was idle for {idle:.0%} of the time, {why}."

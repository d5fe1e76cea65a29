"""Decide whether a run may continue from a checkpoint, and what it must report when it does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adl_dist.errors import CheckpointError
from adl_dist.schedule.run_plan import Plan


def identity_of(plan: Plan, optimizer: str) -> dict[str, Any]:
    """Return what must be the same where a run continues, except for ``total_updates``."""
    return {
        "num_samples": plan.num_samples,
        "micro_batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "optimizer": optimizer,
        "total_updates": plan.total_updates,
    }


def check_identity(path: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """Compare the identity of a checkpoint with that of this run; see :func:`identity_of`.

    Args:
        path: the checkpoint.
        theirs: the identity in its manifest.
        mine: the identity of this run.

    Returns:
        A note for the user; None: there is nothing to say.

    Raises:
        CheckpointError: the checkpoint belongs to another run.
    """
    for name, value in mine.items():
        if name != "total_updates" and theirs.get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: {name} is {theirs.get(name)} there and {value} here; give the run's own "
                "data, batch size and optimizer, or start a new run in another run_dir (init_from= takes its weights)"
            )
    if theirs.get("total_updates") == mine["total_updates"]:
        return None
    return (
        f"the run is now {mine['total_updates']} updates long, not {theirs.get('total_updates')}; a learning rate "
        "schedule that depends on the length (cosine) follows the new one"
    )


def partition_change_note(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """Return a note for the user of a run that continues with another cut; None: the cut is the same."""
    differing = [name for name in mine if name in theirs and theirs[name] != mine[name]]
    if not differing:
        return None
    shown = ", ".join(f"{name} was {theirs[name]} and is {mine[name]}" for name in differing)
    return (
        f"the run continues with another cut ({shown}); weights and optimizer state are carried over exactly, but "
        "staleness and dropout streams are now those of the new cut, and values follow them"
    )

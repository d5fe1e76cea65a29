"""A figure of the costs of each unit of a model."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from adl_dist.errors import ConfigError
from adl_dist.partition.costs import Profile
from adl_dist.report.files import write_atomically

FORWARD, BACKWARD, CUT, MEMORY = "#56B4E9", "#E69F00", "#333333", "#009E73"
MOST_LABELS = 60


def draw_costs(path: Path, profile: Profile, *, sizes: Sequence[int], model: str) -> None:
    """Draw the time, memory and cut bytes of each unit as bars.

    ``sizes`` are the units of each stage, or none; a file that is there already is replaced.

    Raises:
        ConfigError: If the file cannot be written.
    """
    units = profile.costs(1)
    places = range(len(units))
    figure = Figure(figsize=(max(6.5, min(0.16 * len(units) + 1.5, 40.0)), 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    forward, backward = [1000 * unit.forward for unit in units], [1000 * unit.backward for unit in units]
    upper.bar(places, forward, color=FORWARD, label="forward")
    upper.bar(places, backward, bottom=forward, color=BACKWARD, label="backward")
    upper.set_ylabel("ms per micro-batch")
    title = f"{model}, micro-batches of {profile.of['micro_batch_size']}, {profile.of['device']}"
    upper.set_title(title, loc="left", fontsize="medium")
    lower.bar(places, [unit.activation_bytes / 1e6 for unit in units], color=MEMORY, label="activations kept")
    crossing = [unit.act_bytes / 1e6 for unit in units]
    lower.step(places, crossing, where="mid", color=CUT, linewidth=1, label="crosses a cut after")
    lower.set_ylabel("MB per micro-batch")
    for axes in (upper, lower):
        for k in range(1, len(sizes)):
            label = "end of a stage" if k == 1 else ""
            axes.axvline(sum(sizes[:k]) - 0.5, color=CUT, linestyle="--", linewidth=1, label=label)
        axes.legend(fontsize="small", frameon=False)
        axes.margins(x=0.01)
    step = -(-len(units) // MOST_LABELS)
    lower.set_xticks(list(places)[::step], [unit.name for unit in units][::step], rotation=90, fontsize="x-small")
    try:
        with write_atomically(path) as unfinished:
            figure.savefig(unfinished)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error

"""A figure of the costs of each unit of a model."""

from collections.abc import Sequence
from pathlib import Path

from adl_dist.errors import ConfigError

FORWARD, BACKWARD, CUT, MEMORY = "#56B4E9", "#E69F00", "#333333", "#009E73"
SUFFIXES = (".svg", ".png", ".pdf")
MOST_LABELS = 60


def check_suffix(path: Path) -> None:
    """Refuse a file name whose suffix is not one of ``SUFFIXES`` by a ConfigError."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--out {path}: expected a name that ends in {', '.join(SUFFIXES)}")


def draw_costs(
    path: Path,
    *,
    names: Sequence[str],
    forward: Sequence[float],
    backward: Sequence[float],
    activation_bytes: Sequence[int],
    crossing_bytes: Sequence[int],
    cuts: Sequence[int],
    title: str,
) -> None:
    """Draw a bar for each unit: its time above, its memory and the bytes that would cross a cut after it below.

    ``forward`` and ``backward`` are seconds; ``cuts`` are the units after which a stage ends. A file that is there
    already is replaced.

    Raises:
        ConfigError: the suffix is unknown, or the file cannot be written.
    """
    check_suffix(path)
    from matplotlib.figure import Figure

    places = range(len(names))
    figure = Figure(figsize=(max(6.5, min(0.16 * len(names) + 1.5, 40.0)), 6.0), layout="constrained")
    times, sizes = figure.subplots(2, 1, sharex=True)
    first, second = ([1000 * seconds for seconds in each] for each in (forward, backward))
    times.bar(places, first, color=FORWARD, label="forward")
    times.bar(places, second, bottom=first, color=BACKWARD, label="backward")
    times.set_ylabel("ms per micro-batch")
    times.set_title(title, loc="left", fontsize="medium")
    sizes.bar(places, [b / 1e6 for b in activation_bytes], color=MEMORY, label="activations kept")
    crossing = [b / 1e6 for b in crossing_bytes]
    sizes.step(places, crossing, where="mid", color=CUT, linewidth=1, label="crosses a cut after")
    sizes.set_ylabel("MB per micro-batch")
    for axes in (times, sizes):
        for place, cut in enumerate(cuts):
            axes.axvline(cut + 0.5, color=CUT, linestyle="--", linewidth=1, label="" if place else "end of a stage")
        axes.legend(fontsize="small", frameon=False)
        axes.margins(x=0.01)
    step = -(-len(names) // MOST_LABELS)
    sizes.set_xticks(list(places)[::step], list(names)[::step], rotation=90, fontsize="x-small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error

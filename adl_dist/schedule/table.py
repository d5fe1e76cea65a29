"""A schedule as a person reads it: who does what in which tick, and what each stage holds for it."""

from dataclasses import dataclass

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.methods import Method
from adl_dist.schedule.streams import forward_version, steady_staleness
from adl_dist.schedule.timing import streams_of, ticks


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """What a schedule means for one stage.

    Attributes:
        stage: k.
        delay: micro-batches forwarded between a micro-batch's forward and its backward.
        staleness_by_offset: updates between forward and update, for each place in a full group in steady state.
        staleness_mean: their mean.
        staleness_max: the largest.
        graphs: most micro-batches held with all activations.
        inputs: most micro-batches held with nothing but what came in, in flight or in a replay buffer.
        weight_copies: most weight versions held beside the newest.
    """

    stage: int
    delay: int
    staleness_by_offset: list[int]
    staleness_mean: float
    staleness_max: int
    graphs: int
    inputs: int
    weight_copies: int


def figures(method: Method, *, num_stages: int, num_micro_batches: int | None = None) -> list[StageFigures]:
    """Delay, staleness and what is held, of each stage.

    Args:
        method: whose schedule.
        num_stages: K.
        num_micro_batches: of the segment in which it is counted; None: enough to reach the steady state.
    """
    M = method.micro_batches_per_update
    delays = method.delays(num_stages)
    if num_micro_batches is None:
        num_micro_batches = M * (2 * (delays[0] // M) + 6) + method.buffer_size
    streams = streams_of(method, num_stages=num_stages, num_micro_batches=num_micro_batches)
    told = []
    for k, delay in enumerate(delays):
        by_offset = steady_staleness(method, delay=delay)
        graphs, inputs, copies = _held(method, streams[k], delay)
        told.append(
            StageFigures(
                stage=k,
                delay=delay,
                staleness_by_offset=by_offset,
                staleness_mean=sum(by_offset) / M,
                staleness_max=max(by_offset),
                graphs=graphs,
                inputs=inputs,
                weight_copies=copies,
            )
        )
    return told


def _held(method: Method, stream: list[Action], delay: int) -> tuple[int, int, int]:
    """The most graphs, inputs without a graph, and weight copies at any moment of ``stream``."""
    graphs: set[int] = set()
    inputs: set[int] = set()
    buffer: set[int] = set()
    version, most = 0, (0, 0, 0)
    for op, number in stream:
        if op is Op.FORWARD:
            graphs.add(number)
        elif op is Op.FORWARD_ONLY:
            inputs.add(number)
        elif op is Op.RECOMPUTE:
            inputs.discard(number)
            graphs.add(number)
        elif op is Op.BACKWARD:
            graphs.discard(number)
        elif op is Op.UPDATE:
            version += 1
        elif op is Op.KEEP:
            buffer.add(number)
        elif op is Op.DROP:
            buffer.discard(number)
        copies = 0
        if method.weights == "2bw":
            copies = int(version > 0)
        elif method.weights == "stash":
            copies = len({v for b in graphs if (v := forward_version(method, b, delay=delay)) < version})
        most = max(most[0], len(graphs)), max(most[1], len(inputs) + len(buffer)), max(most[2], copies)
    return most


def describe(method: Method, *, num_stages: int, num_micro_batches: int) -> str:
    """The tick table of all stages and each stage's figures.

    A message takes one tick. Processes keep the order of a row, not its columns: nothing in a run waits for a tick.
    """
    streams = streams_of(method, num_stages=num_stages, num_micro_batches=num_micro_batches)
    rows = [
        [" ".join(str(a) for a in row.get(tick, ())) for tick in range(max(row, default=-1) + 1)]
        for row in ticks(streams)
    ]
    width = max(len(cell) for row in rows for cell in row)
    header = [str(tick) for tick in range(max(map(len, rows)))]
    M, weights = method.micro_batches_per_update, method.weights if "weights" in method.row.options else "present"
    lines = [
        f"{method.row.summary}: K = {num_stages} stages, M = {M}, {weights} weights, {num_micro_batches} micro-batches",
        "",
        "tick     " + "  ".join(cell.ljust(width) for cell in header).rstrip(),
        *(f"stage {k}".ljust(9) + "  ".join(cell.ljust(width) for cell in row).rstrip() for k, row in enumerate(rows)),
        "",
        _legend(streams),
        "",
        "stage  delay  graphs  inputs  weight copies  staleness mean  max  by offset (updates)",
    ]
    for f in figures(method, num_stages=num_stages):
        lines.append(
            f"{f.stage:<7}{f.delay:<7}{f.graphs:<8}{f.inputs:<8}{f.weight_copies:<15}{f.staleness_mean:<16.3g}"
            f"{f.staleness_max:<5}{' '.join(map(str, f.staleness_by_offset))}"
        )
    return "\n".join(lines)


def _legend(streams: list[list[Action]]) -> str:
    ops = {action.op for stream in streams for action in stream}
    words = {
        Op.FORWARD: "F forward",
        Op.FORWARD_ONLY: "N forward that keeps its input only",
        Op.RECOMPUTE: "R forward again, with the present weights",
        Op.BACKWARD: "B backward",
        Op.UPDATE: "U update",
    }
    told = ", ".join(text for op, text in words.items() if op in ops)
    return f"{told}; the number is the micro-batch, of U the group"

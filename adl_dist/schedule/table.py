"""The printed table of a schedule: actions by tick, and figures."""

from dataclasses import dataclass
from itertools import accumulate

from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.timing import FORWARDS, actions_of_all, in_processes, ticks


@dataclass(frozen=True)
class StageFigures:
    """The figures of one stage."""

    stage: int
    delay: int  # micro-batches forwarded between a micro-batch's forward and its backward
    staleness_by_offset: list[int]  # in updates, for each place in a full group, steady state
    staleness_mean: float
    staleness_max: int
    graphs: int  # most micro-batches held with all activations
    inputs: int  # most micro-batches held with only their inputs
    weight_copies: int  # most weight versions held besides the newest
    history_copies: int  # copies of the weights' size that a mitigation remembers
    deferred: int  # most micro-batches with deferred gradients of weights, while it holds the most graphs
    outputs: int  # most outputs that a head keeps until their gradients come back

    @property
    def copies_per_update(self) -> int:
        """The weight copies made per update: one to keep, one to remember."""
        return (self.weight_copies > 0) + (self.history_copies > 0)


def figures(pipeline: Pipeline) -> list[StageFigures]:
    """Return delay, staleness and held tensors of each stage.

    They are counted in a segment long enough to reach the steady state.
    """
    M = pipeline.micro_batches_per_update
    num_micro_batches = M * (2 * (pipeline.delays[0] // M) + 6)
    rows = []
    for k, actions in enumerate(actions_of_all(pipeline, num_micro_batches=num_micro_batches)):
        by_offset = pipeline.steady_staleness(k)
        graphs, inputs, copies, deferred = _held(pipeline, k, actions)
        rows.append(
            StageFigures(
                stage=k,
                delay=pipeline.delays[k],
                staleness_by_offset=by_offset,
                staleness_mean=pipeline.mean_staleness(k),
                staleness_max=max(by_offset),
                graphs=graphs,
                inputs=inputs,
                weight_copies=copies,
                history_copies=pipeline.remembers_displacement(k) + pipeline.feedback_lag(k),
                deferred=deferred,
                outputs=max(accumulate((op is Op.PREDICT_GRADIENT) - (op is Op.LEARN) for op, *_ in actions)),
            )
        )
    return rows


def _held(pipeline: Pipeline, stage: int, actions: list[Action]) -> tuple[int, int, int, int]:
    """Return the most (graphs, inputs, weight copies, deferred parts) held."""
    graphs: dict[int, int] = {}  # with their weight versions
    inputs: set[int] = set()
    deferred: dict[int, int] = {}  # with their weight versions
    version, most, most_deferred = 0, (0, 0, 0), dict[int, int]()  # most_deferred: by the number of graphs
    is_ahead, last_seen = pipeline.forwards_ahead(stage), -1  # the version of the last forward
    for op, number, *_ in actions:
        if op in FORWARDS:
            last_seen = version
        if op in (Op.FORWARD, Op.RECOMPUTE):
            graphs[number] = pipeline.forward_version(stage, number)
            inputs.discard(number)
        elif op is Op.FORWARD_ONLY:
            inputs.add(number)
        elif op in BACKWARDS:
            used = graphs.pop(number)
            if op is Op.BACKWARD_INPUT:
                deferred[number] = used
        elif op is Op.BACKWARD_WEIGHT:
            del deferred[number]
        elif op is Op.UPDATE:
            version += 1
        copies = 0
        if pipeline.method.weights == "2bw":
            copies = int(version > 0)
        elif pipeline.method.weights == "stash":
            # Predicted weights ahead of the newest version are a copy as well.
            older = {*graphs.values(), *deferred.values()} - {version}
            copies = len(older) + (is_ahead and last_seen == version)
        elif is_ahead:
            copies = 2
        most = max(most[0], len(graphs)), max(most[1], len(inputs)), max(most[2], copies)
        most_deferred[len(graphs)] = max(most_deferred.get(len(graphs), 0), len(deferred))
    return *most, most_deferred.get(most[0], 0)


def title(pipeline: Pipeline, *, num_micro_batches: int) -> str:
    """Return the method's name and settings in one line."""
    weights = pipeline.method.weights if "weights" in pipeline.spec.options else "present"
    K, P = pipeline.num_stages, pipeline.num_processes
    where = f"K = {K} stages" + (f" in {P} processes" if pipeline.stages_per_process > 1 else "")
    return (
        f"{pipeline.spec.summary}: {where}, M = {pipeline.micro_batches_per_update}, "
        f"{weights} weights, {num_micro_batches} micro-batches"
    )


def tick_words(pipeline: Pipeline, *, num_micro_batches: int) -> list[dict[int, list[str]]]:
    """Return the printed actions of each tick, like ``{4: ["F4", "B0"]}``."""
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    return [{tick: list(map(str, row[tick])) for tick in sorted(row)} for row in ticks(lists, turns=turns)]


def describe(pipeline: Pipeline, *, num_micro_batches: int, width: int | None = None) -> str:
    """Return the tick table of all stages and each stage's figures.

    A message takes one tick. A run keeps the order of each row, but nothing in it waits for a tick. A table of more
    than ``width`` columns is cut into blocks of ticks.
    """
    rows, has_heads = tick_words(pipeline, num_micro_batches=num_micro_batches), pipeline.spec.predicts_gradients
    outputs = "outputs  " if has_heads else ""
    lines = [
        title(pipeline, num_micro_batches=num_micro_batches),
        "",
        *_tick_table(rows, width),
        _legend(rows),
        "",
        f"stage  delay  graphs  inputs  {outputs}weight copies  staleness mean  max  by offset (updates)",
    ]
    for f in figures(pipeline):
        outputs = f"{f.outputs:<9}" if has_heads else ""
        lines.append(
            f"{f.stage:<7}{f.delay:<7}{f.graphs:<8}{f.inputs:<8}{outputs}{f.weight_copies:<15}"
            f"{f.staleness_mean:<16.3g}{f.staleness_max:<5}{' '.join(map(str, f.staleness_by_offset))}"
        )
    return "\n".join(lines)


def _tick_table(rows: list[dict[int, list[str]]], width: int | None) -> list[str]:
    num_ticks = max((max(row) + 1 for row in rows if row), default=0)
    columns = [[str(tick), *(" ".join(row.get(tick, ())) for row in rows)] for tick in range(num_ticks)]
    heads = ["tick", *(f"stage {k}" for k in range(len(rows)))]
    head = max(map(len, heads)) + 2
    blocks: list[list[list[str]]] = [[]]
    used = head
    for column in columns:
        size = max(map(len, column)) + 2
        if blocks[-1] and width is not None and used + size - 2 > width:
            blocks.append([])
            used = head
        blocks[-1].append([cell.ljust(size) for cell in column])
        used += size
    lines = []
    if len(blocks) > 1:
        lines += [f"The table is wider than the screen ({width} columns): it continues in {len(blocks)} blocks.", ""]
    for block in blocks:
        lines += [(name.ljust(head) + "".join(column[i] for column in block)).rstrip() for i, name in enumerate(heads)]
        lines.append("")
    return lines


def _legend(rows: list[dict[int, list[str]]]) -> str:
    ops = {word.partition(".")[0].rstrip("0123456789") for row in rows for words in row.values() for word in words}
    words = {
        Op.FORWARD: "F forward",
        Op.FORWARD_ONLY: "N forward that keeps its input only",
        Op.RECOMPUTE: "R forward again, with the present weights",
        Op.BACKWARD: "B backward",
        Op.BACKWARD_INPUT: "I backward without the weights' gradients",
        Op.BACKWARD_WEIGHT: "WG the weights' gradients",
        Op.UPDATE: "U update",
        Op.UPDATE_TIED: "TU update of tied weights",
        Op.LEARN: "H the head learns",
        Op.UPDATE_HEAD: "HU its update",
    }
    letters = ", ".join(text for op, text in words.items() if op.value in ops)
    return f"{letters}; the number is the micro-batch, of updates the group"

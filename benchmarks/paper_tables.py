"""Print the ADL paper's measured speed-ups next to the timing model's, and what delays and caps are worth.

python -m benchmarks.paper_tables
"""

from collections.abc import Sequence

from adl_dist.schedule import Costs, Method, Pipeline, actions_of_all, method, simulate, speed
from adl_dist.schedule.timing import Slowdown, at_full_speed, makespan
from benchmarks.capped import Prefer, simulate_dataflow, simulate_synchronous, stragglers

# Table 3 of the ADL paper: measured speed-ups of RN-101 on ImageNet, V100, M = 4, for K = 2, 3, 4.
MEASURED: dict[str, tuple[float | None, ...]] = {
    "bp": (1, 1, 1),
    "ddg": (1.32, 1.57, 1.68),
    "fr": (1.19, 1.29, 1.45),
    "dgl": (1.82, 2.61, 3.39),
    "dsp": (None, None, 2.70),
    "gpipe": (1.41, 1.87, 2.23),
    "adl": (1.92, 2.69, 3.32),
}
LINKS = (0, 0.1, 0.25, 0.5, 1)  # seconds of a message, in units of F + B
DELAYS = {"K-k": (3, 2, 1, 0), "K-k+1": (4, 3, 2, 0), "2(K-k)": (6, 4, 2, 0), "4(K-k)": (12, 8, 4, 0)}
F_PLUS_B = 3  # of one stage, in the unit of Costs.balanced


def paper_tables(num: int = 600) -> str:
    """Return the three tables of docs/dev/results/timing.md; the last two run ``num`` micro-batches."""
    lines = [*speed_up_table(), "", *link_table(num), "", *straggler_table(num)]
    return "\n".join(line.rstrip() for line in lines)


def speed_up_table() -> list[str]:
    """Return the measured and the predicted speed-up of each method, as lines."""
    names = ("bp", "ddg", "fr", "dgl", "dsp", "gpipe", "adl", "fdg", "1f1b", "pipedream", "2bw", "paci")
    lines = [
        "Speed-up over backpropagation for K = 2, 3, 4 stages. Measured: Table 3 of the ADL paper (RN-101, ImageNet,",
        "M = 4). Model: the action lists of adl_dist with equal stages, backward = 2 forward, free links.",
        "",
        "method               measured          model",
    ]
    for name in names:
        lines.append(_speed_up_row(name, method(name), MEASURED.get(name, (None,) * 3)))
        if name == "gpipe":
            for recompute in ("except_last", "always"):
                row = f"gpipe ({recompute})"
                lines.append(_speed_up_row(row, method(name, recompute=recompute), (None,) * 3))
    return lines


def link_table(num: int) -> list[str]:
    """Return the time per micro-batch of each delay if messages take time, as lines."""
    lines = [
        "Time per micro-batch (1: all stages busy) if a message takes c, in units of F + B. K = 4, k = 1..K,",
        f"{num} micro-batches, stage K has delay 0. List: our processes, in the order of the tick table. Cap: a",
        "stage does what is ready, with up to delay + 1 in flight.",
        "",
        "delay         " + "".join(f"c = {c:<8}" for c in LINKS),
    ]
    for name, delays in DELAYS.items():
        for kind, time_of in (("list", list_time), ("cap", cap_time)):
            times = [time_of(delays, num=num, link=F_PLUS_B * c) for c in LINKS]
            lines.append(f"{name:<8}{kind:<6}" + "".join(f"{time:<12.3f}" for time in times))
    return lines


def straggler_table(num: int) -> list[str]:
    """Return the time per micro-batch of each delay if actions are slow at random, as lines."""
    together = simulate_synchronous(Costs.balanced(4), num_micro_batches=num, slowdown=stragglers(0)) / num / F_PLUS_B
    lines = [
        "The same with free links if one action of four, at random, takes twice as long (mean work 1.25). Cap BF takes",
        "the backward if it could do either, cap FB the forward. Stages that meet after each slot, as in the authors'",
        f"code: {together:.2f}.",
        "",
        "delay         list    cap BF  cap FB",
    ]
    for name, delays in DELAYS.items():
        times = [list_time(delays, num=num, slowdown=stragglers(0))]
        for prefer in ("backward", "forward"):
            times.append(cap_time(delays, num=num, slowdown=stragglers(0), prefer=prefer))
        lines.append(f"{name:<14}" + "".join(f"{time:<8.2f}" for time in times))
    return lines


def list_time(delays: Sequence[int], *, num: int, link: float = 0.0, slowdown: Slowdown = at_full_speed) -> float:
    """Return the time per micro-batch of stages that follow their lists, in units of F + B."""
    chosen = method("adl", accumulation_steps=1, delay=list(delays))
    actions = actions_of_all(Pipeline(chosen, len(delays)), num_micro_batches=num)
    spans = simulate(actions, Costs.balanced(len(delays), link=link), slowdown=slowdown)
    return makespan(spans) / num / F_PLUS_B


def cap_time(
    delays: Sequence[int],
    *,
    num: int,
    link: float = 0.0,
    slowdown: Slowdown = at_full_speed,
    prefer: Prefer = "backward",
) -> float:
    """Return the time per micro-batch of stages that do what is ready, in units of F + B."""
    costs, caps = Costs.balanced(len(delays), link=link), [delay + 1 for delay in delays]
    spans = simulate_dataflow(costs, caps, num_micro_batches=num, prefer=prefer, slowdown=slowdown)
    return makespan(spans) / num / F_PLUS_B


def _speed_up_row(title: str, chosen: Method, measured: Sequence[float | None]) -> str:
    model = [speed(chosen, Costs.balanced(K)).speed_up for K in (2, 3, 4)]
    return f"{title:<21}{_numbers(measured)}  {_numbers(model)}"


def _numbers(numbers: Sequence[float | None]) -> str:
    return "  ".join(f"{'-' if n is None else f'{n:.2f}':<4}" for n in numbers)


if __name__ == "__main__":
    print(paper_tables())

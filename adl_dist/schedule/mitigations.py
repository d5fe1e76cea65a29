"""Mitigations of staleness, one row for each.

A row acts at one or two of four hooks, and two rows of one hook exclude each other. A row depends on the mean staleness
of the stage, which follows from the schedule; a stage without staleness is not changed. The computations are in
:mod:`adl_dist.stage.mitigation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adl_dist.schedule.method_table import Weights

# The quantity that each hook decides, for update s of a stage.
HOOKS = {
    "rate": "the learning rate",
    "forward_weights": "the weights that a forward sees",
    "gradient": "the gradient of an older version",
    "applied": "the update that is applied",
}
Hook = Literal["rate", "forward_weights", "gradient", "applied"]
PredictFrom = Literal["displacement", "momentum"]
Horizon = Literal["linear", "geometric"]


@dataclass(frozen=True)
class MitigationSpec:
    """The facts of one mitigation."""

    summary: str  # name and source
    hooks: Sequence[Hook]
    options: Sequence[str] = ()  # the fields of ``Method`` that it uses
    weights: Sequence[Weights] = ("stash", "latest", "recompute", "2bw")  # policies that it is defined with


MITIGATIONS = {
    "discount": MitigationSpec(
        "Learning rates by staleness (PipeMare's T1, Yang et al., MLSys 2021)",
        ("rate",),
        ("discount_power", "discount_updates"),
    ),
    "spike": MitigationSpec("Spike compensation (Kosson et al., MLSys 2021)", ("applied",)),
    "predict": MitigationSpec(
        "Weight prediction (SpecTrain, Chen et al., 2018; Kosson et al., MLSys 2021; XPipe, Guan et al., 2019)",
        ("forward_weights",),
        ("predict_horizon", "predict_from"),
        ("stash", "latest", "recompute"),
    ),
    "nesterov": MitigationSpec(
        "Nesterov's method for pipelines (Ajanthan et al., ICML 2025)",
        ("forward_weights", "applied"),
        ("nesterov_gamma",),
        ("stash", "latest", "recompute"),
    ),
    "error_feedback": MitigationSpec(
        "Error feedback of whole updates (Zmushko et al., ICML 2026)",
        ("applied",),
        ("error_feedback_coefficient", "error_feedback_lag"),
    ),
    "delay_compensation": MitigationSpec(
        "Delay compensation (DC-ASGD, Zheng et al., ICML 2017)",
        ("gradient",),
        ("delay_compensation_lambda",),
        ("stash", "2bw"),
    ),
}


def mitigation_options(chosen: object) -> list[str]:
    """Return the options of the ``chosen`` rows; unknown names are ignored."""
    names = chosen if isinstance(chosen, list | tuple) else ()
    return [option for name, row in MITIGATIONS.items() if name in names for option in row.options]


def why_not(chosen: Sequence[str], weights: Weights) -> str | None:
    """Return why the chosen rows exclude each other or ``weights``, or None."""
    for place, name in enumerate(chosen):
        if name not in MITIGATIONS:
            return f"there is no '{name}'; choose of {', '.join(MITIGATIONS)}"
        if name in chosen[:place]:
            return f"{name} is named twice; name it once"
        row = MITIGATIONS[name]
        for other in chosen[:place]:
            for hook in row.hooks:
                if hook in MITIGATIONS[other].hooks:
                    return f"{other} and {name} both decide {HOOKS[hook]}; choose one of them"
        if weights not in row.weights:
            return f"{name} is not defined with method.weights={weights}; use one of {', '.join(row.weights)}"
    return None

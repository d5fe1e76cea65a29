"""All odd models and optimizers, by name."""

from tests.adversarial import (  # noqa: F401
    models_attention,
    models_autograd,
    models_containers,
    models_in_place,
    models_layers,
    models_sneaky,
    models_state,
)
from tests.adversarial.cases import CASES as MODELS
from tests.adversarial.optimizers import CASES as OPTIMIZERS

__all__ = ["DEFAULT_OPTIMIZERS", "MODELS", "OPTIMIZERS"]

DEFAULT_OPTIMIZERS = [
    "sgd_fused", "muon", "muon_for_matrices", "schedule_free", "lookahead", "split_by_shape",
    "filtering_factory",
]  # fmt: skip

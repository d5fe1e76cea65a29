"""All odd models, and which of them run by default."""

from tests.adversarial import (  # noqa: F401
    alias_models,
    attention_models,
    autograd_models,
    batch_size_models,
    checkpoint_models,
    container_models,
    hook_models,
    in_place_models,
    normed_models,
    odd_models,
    random_models,
    recurrent_models,
    sneaky_models,
    stateful_models,
)
from tests.adversarial.cases import CASES as MODELS
from tests.adversarial.optimizers import CASES as OPTIMIZERS

__all__ = ["DEFAULT", "DEFAULT_OPTIMIZERS", "MODELS", "OPTIMIZERS"]

# One of each kind, where it is most likely to go wrong.
DEFAULT = [
    ("alibi_attention", "block"), ("latent_queries", "layer"), ("lstm_out", "layer"),
    ("old_spectral_norm", "block"), ("pruned", "layer"), ("lora", "block"), ("frozen_norm", "block"),
    ("memory_bank", "block"), ("partly_frozen", "block"), ("hands_on_nested_tuple", "block"),
    ("hands_on_dictionary", "block"), ("hands_on_named_tuple", "block"), ("dictionary_out", "block"),
    ("head_for_training", "layer"), ("names_of_ours", "block"), ("own_generator", "layer"),
    ("counter_in_list", "block"),
    ("isinstance_tensor", "layer"), ("type_is_tensor", "layer"), ("dropout_path", "block"),
    ("checkpoint_by_hooks", "block"), ("reversible_block", "block"), ("argmax_in_the_middle", "block"),
    ("detached_branch", "layer"), ("gradient_mask", "block"), ("aliased_parameters", "block"), ("hidden_tie", "block"),
    ("root_asks_by_table", "block"), ("root_asks_in_fives", "block"), ("root_asks_eighths", "layer"),
    ("block_asks_more_than_four", "layer"), ("pairs_of_samples", "layer"),
    ("complex_parameters", "block"), ("residual_in_place", "layer"), ("embedding_with_max_norm", "block"),
]  # fmt: skip
DEFAULT_OPTIMIZERS = [
    "sgd_fused", "muon", "muon_for_matrices", "rotated_adam", "schedule_free", "lookahead", "split_by_shape",
    "filtering_factory",
]  # fmt: skip

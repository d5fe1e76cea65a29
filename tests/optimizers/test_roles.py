"""What each parameter is for is known of the uncut model, and so is the same in every cut."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from adl_dist.errors import ConfigError
from adl_dist.optimizers import Muon, mark_roles


class Sentence(nn.Module):
    """As a small language model: tables, attention, a convolution, and a head at the end."""

    def __init__(self, *, ties=False):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.pos_embed = nn.Parameter(torch.randn(7, 6))
        self.class_token = nn.Parameter(torch.randn(1, 6))
        self.rotation = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.attention = nn.MultiheadAttention(6, 2)
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.norm = nn.LayerNorm([7, 6])
        self.relative_bias = nn.Parameter(torch.randn(6, 6))
        self.mixing = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 11)
        if ties:
            self.head.weight = self.tokens.weight


def matrices_of(model, **options):
    """The names of the parameters in the first group."""
    names = {p: name for name, p in model.named_parameters()}
    optimizer = Muon(model.parameters(), **options)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    return sorted(names[p] for p in optimizer.param_groups[0]["params"])


def marked(model):
    mark_roles(model)
    return model


ATTENTION = ["attention.in_proj_weight", "attention.out_proj.weight"]


def test_matrices_are_neither_embeddings_nor_head_nor_vectors():
    found = matrices_of(marked(Sentence()))
    assert found == [*ATTENTION, "depthwise.weight", "mixing"]


def test_only_whole_words_of_a_name_make_it_a_table():
    tables = ["pos", "rel_pos_h", "positions", "positional_embedding", "emb1", "token_embeds", "posemb", "Pos_Embed"]
    tables += ["relative_position_bias_table", "biases", "attention_bias"]
    matrices = ["positive_proj", "posterior", "embedder_w", "unbiased", "biaser", "transpose", "compose_w", "member"]
    model = nn.Sequential(nn.ParameterDict({name: torch.randn(3, 3) for name in tables + matrices}), nn.Linear(3, 3))
    assert matrices_of(marked(model)) == sorted(f"0.{name}" for name in matrices)


def test_rest_names_name_more_of_the_rest():
    found = matrices_of(marked(Sentence()), rest_names=["*.in_proj_*", "mixing"])
    assert found == ["attention.out_proj.weight", "depthwise.weight"]


def test_parametrized_layers_have_the_roles_of_plain_ones():
    model = nn.Sequential(*(nn.Conv1d(2, 2, 2) for _ in range(3)), nn.Flatten(), nn.Linear(2, 2))
    parametrizations.weight_norm(model[0])
    prune.random_unstructured(model[1], "weight", 0.5)
    parametrizations.weight_norm(model[4])
    assert matrices_of(marked(model)) == ["0.parametrizations.weight.original1", "1.weight_orig", "2.weight"]


def test_a_tied_head_is_an_embedding_and_no_other_layer_the_head():
    found = matrices_of(marked(Sentence(ties=True)))
    assert found == [*ATTENTION, "depthwise.weight", "mixing"]


REFUSED = [
    ({"rest": "lion"}, "there is no 'lion'; choose one of adamw, sgd"),
    ({"rest_options": {"foo": 3}}, "torch's AdamW refuses .* 'foo'; its options are lr"),
    ({"rest_names": ["haed.*"]}, "no parameter of the model is called 'haed"),
    ({"params": [{"params": []}]}, "takes the parameters themselves .* got a dict among"),
    ({"params": [nn.Parameter(torch.zeros(2))]}, r"whether a parameter of shape \[2\] is of an embedding"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_an_option_that_muon_does_not_have_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Muon(**{"params": marked(Sentence()).parameters(), **options})

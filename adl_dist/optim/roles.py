"""What each parameter of a model is for, written on it while the model is whole.

A stage's optimizer sees the parameters of its own part only, and of a parameter its shape, but not whether it is an
embedding or makes the model's outputs. That is known of the uncut model, so that every cut of it trains alike.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from adl_dist.errors import ConfigError

ATTRIBUTE = "adl_role"  # of a parameter; a Parameter stays the same object for the whole training
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# A table of positions that a model registers as a plain parameter, like pos_embed or relative_position_bias_table.
TABLE = re.compile(r"(^|_)(pos|position|emb)", re.IGNORECASE)


@dataclass(frozen=True)
class Role:
    """What a parameter is for.

    Attributes:
        kind: ``embedding``: of an embedding, or a table by its name; ``head``: of the layer that makes the model's
            outputs; ``convolution``: a convolution's; ``other``: any other.
        name: the uncut model's name for it.
        names: all names of that model.
    """

    kind: str
    name: str
    names: frozenset[str]


def mark_roles(model: nn.Module) -> None:
    """Write on each parameter of the uncut ``model`` what it is for; :func:`split_by_role` reads it.

    The head is the last layer in the order of ``model.modules()`` that has a matrix of weights, if that is linear or a
    convolution. A parameter that several layers share is an embedding if it is one's, else the head's if it is.
    """
    names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    by_kind: dict[str, set[nn.Parameter]] = {"embedding": set(), "head": set(), "convolution": set()}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if issubclass(_class_of(layer), EMBEDDINGS) or TABLE.search(name):
                by_kind["embedding"].add(parameter)
            elif issubclass(_class_of(layer), CONVOLUTIONS) and name == "weight":
                by_kind["convolution"].add(parameter)
    layers = [layer for layer in model.modules() if any(_has_matrix(layer, by_kind["embedding"]))]
    if layers and issubclass(_class_of(layers[-1]), (nn.Linear, *CONVOLUTIONS)):
        by_kind["head"].update(layers[-1].parameters())
    for name, parameter in model.named_parameters():
        kind = next((kind for kind, members in by_kind.items() if parameter in members), "other")
        setattr(parameter, ATTRIBUTE, Role(kind, name, names))


def _class_of(layer: nn.Module) -> type:
    """Return the class of ``layer``, of a TorchScript one that of the layer it was made from, if that is torch's."""
    is_script = isinstance(layer, torch.jit.ScriptModule)
    return getattr(nn, str(layer.original_name), nn.Module) if is_script else type(layer)


def _has_matrix(layer: nn.Module, embeddings: set[nn.Parameter]) -> Iterator[bool]:
    """Yield for each parameter of ``layer`` itself whether it is a matrix of weights."""
    for parameter in layer.parameters(recurse=False):
        is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)  # has no shape yet
        yield parameter not in embeddings and (is_lazy or parameter.ndim > 1)


def split_by_role(
    parameters: Iterable[nn.Parameter], optimizer: str, rest_names: Sequence[str]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices among ``parameters``, and the rest.

    Matrices are what has two dimensions and the weights of convolutions, seen as (out, rest), if they have at least two
    rows and two columns and are neither complex, nor of an embedding, nor of the head, nor called by ``rest_names``,
    which are names of the uncut model with ``*`` and ``?``.

    Raises:
        ConfigError: a parameter does not say what it is for, or no name is like one of ``rest_names``; the text names
            the ``optimizer``.
    """
    matrices, rest, names = list[nn.Parameter](), list[nn.Parameter](), set[str]()
    for parameter in parameters:
        role = getattr(parameter, ATTRIBUTE, None)
        if role is None:
            raise ConfigError(
                f"optimizer: {optimizer} must know whether a parameter of shape {list(parameter.shape)} is of an "
                "embedding, of the head, or a matrix; call adl_dist.optim.mark_roles(model) on the uncut model first, "
                "as a Trainer does, and make no new parameters after it"
            )
        names |= role.names
        is_named = any(fnmatch.fnmatchcase(role.name, pattern) for pattern in rest_names)
        (rest if is_named or not _is_matrix(parameter, role.kind) else matrices).append(parameter)
    for pattern in rest_names:
        if names and not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"optimizer.rest_names: no parameter of the model is called '{pattern}'; expected names with * and ?, "
                f"like {min(names)}"
            )
    return matrices, rest


def _is_matrix(parameter: nn.Parameter, kind: str) -> bool:
    has_axes = parameter.ndim == 2 if kind == "other" else parameter.ndim > 2 and kind == "convolution"
    return has_axes and not parameter.is_complex() and 1 < len(parameter) < parameter.numel()

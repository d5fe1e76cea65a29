"""Roles of parameters, recorded on the uncut model.

A stage's optimizer sees only its own parameters and their shapes, not whether one belongs to an embedding or to the
head. Roles come from the uncut model, so every cut trains in the same way. They are not attributes of the parameters,
because those would be saved with a model, and could not be read without this package.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils.weak import WeakIdKeyDictionary

from adl_dist.errors import ConfigError

# Layers with weights that are no matrices, even with two dimensions.
TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Plain parameters that are tables or biases, like pos_embed or relative_position_bias_table, by whole words of their
# names: posterior and embedder_w do not match.
TABLE_NAME = re.compile(
    r"(?:^|_)(?:pos|positions?|positional|(?:pos)?emb(?:ed(?:ding)?)?s?|bias(?:es)?)\d*(?:_|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class Role:
    """The role of a parameter.

    Attributes:
        kind: ``table`` (of an embedding or a norm, or a table or bias by its name), ``head`` (of the output layer),
            ``convolution`` or ``other``.
        names: its names in the uncut model, several if layers share it.
        layers: names of the classes of its layers and of their bases.
        ndim: its number of dimensions, or None for the weight of a lazy layer.
        of_model: the roles of all parameters of the model, in its order.
    """

    kind: str
    names: tuple[str, ...]
    layers: frozenset[str]
    ndim: int | None
    of_model: "list[Role]" = field(repr=False, compare=False)

    @property
    def all_names(self) -> frozenset[str]:
        """The names of all parameters of the model."""
        return frozenset(name for role in self.of_model for name in role.names)


# A parameter stays the same object for the whole training; an entry lives as long as its parameter.
_ROLES: MutableMapping[nn.Parameter, Role] = WeakIdKeyDictionary()


def mark_roles(model: nn.Module, prefix: str = "") -> None:
    """Record the roles of parameters of the uncut ``model``.

    ``prefix`` is put before their names. The model does not change. Parameters of a copy of the model have no roles.

    The head is the last layer in ``model.modules()`` that has a matrix of weights, if it is linear or a convolution. A
    parameter that several layers share is a table if it is one for any of them; otherwise it belongs to the head if one
    of them is the head.
    """
    by_kind: dict[str, set[nn.Parameter]] = {"table": set(), "head": set(), "convolution": set()}
    layers: dict[nn.Parameter, set[str]] = {}
    last = None  # layer with a matrix
    for layer in model.modules():
        kind = _class_of(layer)
        for name, parameter in _parameters_of(layer):
            layers.setdefault(parameter, set()).update(_class_names(kind))
            if issubclass(kind, TABLES) or TABLE_NAME.search(name):
                by_kind["table"].add(parameter)
                continue
            if issubclass(kind, CONVOLUTIONS):
                by_kind["convolution"].add(parameter)
            # Without a shape yet it is the weight of a lazy layer.
            if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.ndim > 1:
                last = layer
    if last is not None and issubclass(_class_of(last), (nn.Linear, *CONVOLUTIONS)):
        by_kind["head"].update(parameter for _, parameter in _parameters_of(last))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(f"{prefix}{name}")
    of_model = list[Role]()
    for parameter, own in names.items():
        found = next((known for known, members in by_kind.items() if parameter in members), "other")
        is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        of_layers = frozenset(layers.get(parameter, ()))
        role = Role(found, tuple(own), of_layers, None if is_lazy else parameter.ndim, of_model)
        of_model.append(role)
        _ROLES[parameter] = role


def role_of(parameter: nn.Parameter, asking: str) -> Role:
    """Return the role of ``parameter``; ConfigError if it has none."""
    role = _ROLES.get(parameter)
    if role is None:
        raise ConfigError(
            f"optimizer: {asking} must know whether a parameter of shape {list(parameter.shape)} is of an "
            "embedding, of the head, or a matrix; call adl_dist.optimizers.mark_roles(model) on the uncut model "
            "first, as a Trainer does, and make no new parameters after it"
        )
    return role


def _class_names(kind: type) -> list[str]:
    """Return the class names of ``kind`` and of its bases below nn.Module."""
    return [one.__name__ for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module]


def keep_role(parameter: nn.Parameter, old: nn.Parameter) -> None:
    """Give ``parameter`` the role of ``old``, which it replaces."""
    if old in _ROLES:
        _ROLES[parameter] = _ROLES[old]


def take_role(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``parameter`` the role and attributes of ``other``, its original."""
    parameter.__dict__.update(other.__dict__)  # deepcopy leaves them out, and an optimizer may read them
    if (role := _ROLES.get(other)) is not None:
        _ROLES[parameter] = role


def _parameters_of(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of ``layer`` itself, parametrized or not."""
    if isinstance(layer, ParametrizationList):
        return
    yield from layer.named_parameters(recurse=False)
    if is_parametrized(layer):
        parts: nn.ModuleDict = layer.parametrizations  # type: ignore[assignment]
        yield from ((name, parameter) for name, part in parts.items() for parameter in part.parameters())


def _class_of(layer: nn.Module) -> type:
    """Return the class of ``layer``; of a TorchScript layer, torch's original."""
    is_script = isinstance(layer, torch.jit.ScriptModule)
    return getattr(nn, str(layer.original_name), nn.Module) if is_script else type(layer)


def split_by_role(
    parameters: Iterable[nn.Parameter], optimizer: str, rest_names: Sequence[str]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices among ``parameters``, and the rest.

    Matrices are real parameters of two dimensions, and weights of convolutions seen as (out, rest), with at least two
    rows and two columns. Tables, the head, and parameters called by ``rest_names`` are the rest.

    Args:
        parameters: of one stage.
        optimizer: its name, for errors.
        rest_names: names of the uncut model, with ``*`` and ``?``.

    Raises:
        ConfigError: If a parameter has no role, or one of ``rest_names`` matches no name.
    """
    matrices, rest, models = list[nn.Parameter](), list[nn.Parameter](), dict[int, Role]()
    patterns = [rest_names] if isinstance(rest_names, str) else rest_names
    for parameter in parameters:
        role = role_of(parameter, optimizer)
        models[id(role.of_model)] = role
        is_named = any(fnmatch.filter(role.names, pattern) for pattern in patterns)
        (rest if is_named or not _is_matrix(parameter, role.kind) else matrices).append(parameter)
    names = {name for role in models.values() for name in role.all_names}
    for pattern in patterns:
        if names and not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"optimizer.rest_names: no parameter of the model is called '{pattern}'; expected names with * and ?, "
                f"like {min(names)}"
            )
    return matrices, rest


def _is_matrix(parameter: nn.Parameter, kind: str) -> bool:
    has_axes = parameter.ndim == 2 if kind == "other" else parameter.ndim > 2 and kind == "convolution"
    return has_axes and not parameter.is_complex() and 1 < len(parameter) < parameter.numel()

"""Models on ``torch.device("meta")``: shapes with weights made on demand.

Weights come from files, or each is made where it is needed, by a random stream of its own. So no process holds more
than its stages, and values depend neither on K nor on which process makes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.checkpoint.weight_files import WeightFiles
from adl_dist.errors import CheckpointError, ConfigError, in_one_line
from adl_dist.optimizers.roles import keep_role
from adl_dist.partition.stage_module import StageModule
from adl_dist.seeds import weights_seed
from adl_dist.stage.versions import like_parameter
from adl_dist.streams import streams_kept

# What a model may define: from the name of a parameter and a tensor, which it fills; from a layer, of which it fills
# what is in no file; the folder that its weights are in; from names of tensors there to names of its own.
DRAW, RESET_LAYER, WEIGHTS_IN, NAMES_HERE = "draw_parameter", "reset_layer", "weights_in", "names_here"
RESETS = "reset_parameters", "_reset_parameters"  # of a layer; the second is what torch's own attention has
# Each byte of a tensor that is to be filled, which is no number that is drawn: NaN, or a large whole number.
UNSET, UNSET_WHOLE = 0xFF, 0x7F


class LazyWeights:
    """The tensors of a model on meta, or of a part of it, made on demand.

    A tensor that ``files`` hold is read. A parameter that they do not hold is filled by the model's ``draw_parameter``,
    if it has one. Any other tensor is made by ``reset_parameters`` of its layer, as torch's own layers have it, which
    fills all parameters and buffers of the layer.
    """

    def __init__(
        self, model: nn.Module, *, files: WeightFiles | None, seed: int, untied: Mapping[str, str] | None = None
    ) -> None:
        """Check that all tensors can be made.

        ``model`` is as built, before any conversion of its dtype. ``untied`` maps the name of each untied parameter to
        the one whose initial values it copies.

        Raises:
            ConfigError: If a tensor cannot be made; the text names it.
            CheckpointError: If ``files`` are those of a different model.
        """
        self.files, self._seed, self._untied = files, seed, untied or {}
        self._draw, self._reset_layer = getattr(model, DRAW, None), getattr(model, RESET_LAYER, None)
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in _registered(model):
            by_tensor.setdefault(id(tensor), []).append(name)
        self._names_of = {name: names for names in by_tensor.values() for name in names}  # of one tensor, if tied
        self._dtypes = {name: tensor.dtype for name, tensor in _registered(model)}
        if files is not None:
            files.check(model)
        for name, tensor in _registered(model):
            if not tensor.is_meta:
                raise ConfigError(
                    f"the model is on torch.device('meta') in part: '{name}' is on {tensor.device}; build all of it "
                    "within one `with torch.device('meta'):`, or nothing"
                )
        if self._reset_layer is not None and files is None:
            raise ConfigError(
                f"a {type(model).__name__} draws all its weights together, so on torch.device('meta') it takes them "
                "from files only: give init_from=, or build it with its weights (runtime.meta_init=false)"
            )
        for name, layer in _layers(model):
            needs = [full for key, tensor in _own(layer) if self._is_reset(full := _full(name, key), tensor)]
            if needs and self._reset(layer) is None:
                raise ConfigError(
                    f"'{needs[0]}' is on torch.device('meta') and cannot be made: {type(layer).__name__} has no "
                    "reset_parameters() that fills its parameters and buffers, as torch's layers have; give it one, "
                    "or build the model with its weights"
                )

    def make(self, module: nn.Module) -> None:
        """Make all tensors of the model or a stage, in their present dtypes."""
        made: dict[int, Tensor] = {}
        root, wanted = module, {name for name, _ in _registered(module)}
        if isinstance(module, StageModule):
            root, wanted = vars(module)["model"], wanted | module.plan.everywhere
        # Resets are first: that of a layer may reset the layers in it, too, so what is read has no values yet. What
        # holds others is the last to reset, as when built.
        for make in (self._reset_values, self._read_or_drawn):
            for name, layer in reversed(list(_layers(root))):
                own = {_full(name, key): (key, t) for key, t in _own(layer) if t.is_meta and _full(name, key) in wanted}
                new = {full: made[id(t)] for full, (_, t) in own.items() if id(t) in made}
                new |= make(name, layer, {full: t for full, (_, t) in own.items() if full not in new})
                for full, value in new.items():
                    key, old = own[full]
                    if value.shape != old.shape:
                        raise ConfigError(f"'{full}' should have shape {list(old.shape)}, found {list(value.shape)}")
                    made[id(old)] = _put(layer, key, old, value)
                    if isinstance(module, StageModule):
                        module.replace(full, old, made[id(old)])

    def _read_or_drawn(self, name: str, layer: nn.Module, todo: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return values by name for the tensors in ``todo``, read or drawn."""
        values: dict[str, Tensor] = {}
        for full, old in todo.items():
            if self.files is not None and (found := self._in_files(full)) is not None:
                ((_, value),) = self.files.read([found])
                values[full] = value.to(self._dtypes[full])
            else:
                assert self._draw is not None
                first = self._names_of[full][0]
                values[full] = _unset(old, self._dtypes[full])
                self._draw(self._untied.get(first, first), values[full])
                _check_set(full, values[full], "the model's draw_parameter")
        return values

    def _in_files(self, full: str) -> str | None:
        """Return the name of a tensor in the files, or None."""
        files = () if self.files is None else self.files.tensors
        return next((name for name in self._names_of[full] if name in files), None)

    def _is_reset(self, full: str, tensor: Tensor) -> bool:
        """Return whether ``reset_parameters`` has to make a tensor."""
        is_drawn = isinstance(tensor, nn.Parameter) and (self._draw is not None or self.files is not None)
        return not is_drawn and self._in_files(full) is None

    def _reset(self, layer: nn.Module) -> Any:
        """Return the function that fills the tensors of ``layer``, or None."""
        if self._reset_layer is not None:
            return partial(self._reset_layer, layer)
        return next((method for name in RESETS if callable(method := getattr(layer, name, None))), None)

    def _reset_values(self, name: str, layer: nn.Module, todo: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return values by name for the tensors in ``todo`` that need a reset."""
        needed = [full for full, tensor in todo.items() if self._is_reset(full, tensor)]
        if not needed:
            return {}
        before = dict(_own(layer))
        for key, old in before.items():
            if old.is_meta:  # as it was built, whatever dtype it has got since
                empty = _unset(old, self._dtypes[_full(name, key)])
                _hold(layer, key, nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty)
        where = f"{type(layer).__name__}.reset_parameters()"
        with streams_kept():
            torch.default_generator.manual_seed(weights_seed(self._seed, name))
            try:
                self._reset(layer)()
            except Exception as error:
                raise ConfigError(f"'{name}' cannot be made: {where} fails with {in_one_line(error)}") from error
        made = {full: tensor.detach() for key, tensor in _own(layer) if (full := _full(name, key)) in needed}
        for key, old in before.items():
            _hold(layer, key, old)
        for full, value in made.items():
            _check_set(full, value, where)
        return made


def is_lazy_model(model: nn.Module) -> bool:
    """Return whether a tensor of ``model`` is on meta."""
    return any(tensor.is_meta for _, tensor in _registered(model))


def prepare_weights(
    model: nn.Module,
    init_from: PurePath | None,
    seed: int,
    untied: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
) -> LazyWeights | None:
    """Return LazyWeights for a model on meta, otherwise load ``init_from``.

    After loading, or without ``init_from``, return None. ``untied`` maps the name of each untied parameter to the one
    that it was tied to.

    Raises:
        ConfigError: If the model is on meta and cannot be made, or the folder of its weights lacks some.
        CheckpointError: If ``init_from`` is missing, damaged, or of a different model.
    """
    if skip and (init_from is None or is_lazy_model(model)):
        raise ConfigError("init_skip leaves out tensors of init_from; it needs that, and a model that is not on meta")
    if is_lazy_model(model):
        of_model = init_from is None
        init_from = init_from or getattr(model, WEIGHTS_IN, None)
        files = WeightFiles.at(init_from) if init_from is not None else None
        if files is not None and of_model and (names_here := getattr(model, NAMES_HERE, None)) is not None:
            files.rename(names_here(files.tensors))
        try:
            return LazyWeights(model, files=files, seed=seed, untied=untied)
        except CheckpointError as error:
            if not of_model:
                raise
            raise ConfigError(
                "runtime.meta_init=true reads all tensors of this model from the folder of its weights, and draws none "
                f"that is not there ({error}); use runtime.meta_init=false, or a folder that has all of them"
            ) from error
    if init_from is not None:
        load_initial(model, init_from, skip)
    return None


def load_initial(model: nn.Module, path: PurePath, skip: Sequence[str] = ()) -> None:
    """Load the weights in ``path`` into ``model``.

    Tensors of ``model`` with names that match a pattern in ``skip`` keep their values; those of the file are left out.

    Raises:
        CheckpointError: If the weights are missing, damaged, or of a different model.
        ConfigError: If a pattern matches no tensor of either.
    """
    WeightFiles.at(path).load_into(model, skip)


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have tensors of their own on meta."""
    return ((name, m) for name, m in module.named_modules() if any(t.is_meta for _, t in _own(m)))


def _full(name: str, key: str) -> str:
    """Return the name of tensor ``key`` of layer ``name``."""
    return f"{name}.{key}".lstrip(".")


def _own(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held in (layer._parameters, layer._buffers):
        yield from ((key, tensor) for key, tensor in held.items() if tensor is not None)


def _put(layer: nn.Module, key: str, old: Tensor, new: Tensor) -> Tensor:
    """Replace ``old`` by ``new`` in the same dtype, and return it."""
    if isinstance(old, nn.Parameter):
        if not isinstance(new, nn.Parameter):
            new = like_parameter(old, new.to(old.dtype))
            new.__dict__.update(old.__dict__)
            keep_role(new, old)
    else:
        new = new.to(old.dtype)
    _hold(layer, key, new)
    return new


def _hold(layer: nn.Module, key: str, tensor: Tensor) -> None:
    """Register ``tensor`` as ``key``, without ``__setattr__``."""
    if isinstance(tensor, nn.Parameter):
        layer._parameters[key] = tensor
    else:
        layer._buffers[key] = tensor


def _unset(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape with all elements marked as unset."""
    made = torch.empty(tensor.shape, dtype=dtype)
    _bytes(made).fill_(_unset_byte(made))
    return made


def _check_set(name: str, tensor: Tensor, by: str) -> None:
    """Raise ConfigError if an element of ``tensor`` is still marked as unset."""
    if tensor.is_meta or bool((_bytes(tensor) == _unset_byte(tensor)).all(dim=1).any()):
        raise ConfigError(f"'{name}' was on torch.device('meta'), and {by} does not fill it, or not all of it")


def _unset_byte(tensor: Tensor) -> int:
    return UNSET if tensor.is_floating_point() or tensor.is_complex() else UNSET_WHOLE


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes [elements, itemsize] of ``tensor``."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)

"""Networks of transformers, from a folder or a name of the hub."""

import inspect
import re
import types
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError, did_you_mean, in_one_line

_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# For each task the class that finds the network of a configuration, and the possible inputs of the network.
TASKS = {
    "causal-lm": ("AutoModelForCausalLM", _TEXT),
    "sequence-classification": ("AutoModelForSequenceClassification", _TEXT),
    "image-classification": ("AutoModelForImageClassification", ("pixel_values",)),
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # a folder with weights has one of these


def hf_model(
    config: str, task: str, *, weights: bool | None = None, download: bool = False, **options: Any
) -> nn.Module:
    """Build a network of transformers with a forward that returns logits.

    Nothing is downloaded without ``download``.

    Args:
        config: a folder with a config.json, or a name of the hub.
        task: one of :data:`TASKS`.
        weights: whether to load weights from ``config``; by default if it has any.
        download: whether to look up a name on the hub; otherwise it must be in the local cache.
        options: replacements of entries of the configuration, like ``num_hidden_layers``.

    Returns:
        The library's model of this task, with its parameter names. ``causal-lm``: int[B, T] -> float[B, T, V];
        ``sequence-classification``: int[B, T] -> float[B, classes]; ``image-classification``: float[B, 3, H, W] ->
        float[B, classes].

    Raises:
        ConfigError: If the library is missing, or there is no such folder, task, option or network.
    """
    transformers = _library()
    if task not in TASKS:
        raise ConfigError(f"model.task: there is no '{task}'; choose one of {', '.join(TASKS)}")
    found = read_config(config, download=download, options=options)
    kind = f"model.config: a network of type {found.model_type}"
    if getattr(found, "is_encoder_decoder", False):
        raise ConfigError(
            f"{kind} has an encoder and a decoder, and no task of model=hf gives both inputs; only one of both is "
            "taken, or hand the model to adl_dist.Trainer"
        )
    if getattr(found, "output_router_logits", False):
        raise ConfigError(
            f"{kind} adds a loss of its routers (output_router_logits=true), which would be left out; with "
            "model.output_router_logits=false it is trained without that loss, as transformers does then"
        )
    weights_in = _weights_of(config, weights, transformers, download=download)
    if torch.get_default_device().type != "meta":
        return build(found, task, weights=weights_in, download=download)
    if weights_in is not None and not Path(weights_in).is_dir():
        raise ConfigError(
            f"runtime.meta_init=true reads the weights from files, but model.config={config} is no folder; give the "
            "folder that has them"
        )
    model: Any = build(found, task)
    if weights_in is not None:
        model.weights_in = Path(weights_in)
    return model  # type: ignore[no-any-return]


def build(config: Any, task: str, *, weights: str | None = None, download: bool = False) -> nn.Module:
    """Build the network of a ``config`` for a ``task``; see :func:`hf_model`.

    ``weights`` is the folder, or name of the hub, to load the weights from; if None, they are drawn.

    Raises:
        ConfigError: If the library has no such network, or refuses the configuration or the weights.
    """
    transformers = _library()
    auto = getattr(transformers, TASKS[task][0])
    kind = auto._model_mapping.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    if kind is None:
        raise ConfigError(
            f"model.task={task}: transformers has no such network of type {config.model_type}; another is one of "
            f"{', '.join(TASKS)}"
        )
    how: dict[str, Any] = {"attn_implementation": "sdpa" if kind._supports_sdpa else "eager", "dtype": torch.float32}
    try:
        if weights is None:
            model = kind._from_config(config, **how)
        else:
            how |= {"local_files_only": not download, "output_loading_info": True}
            model, found = kind.from_pretrained(weights, config=config, **how)
            if names := sorted(found["missing_keys"]):
                shown = f"{', '.join(names[:3])}{' ..' * (len(names) > 3)}"
                lacking = f"{weights} lacks the weights of {len(names)} tensors, newly drawn: {shown}"
                warnings.warn(lacking, stacklevel=2)
    except Exception as error:  # the library's own code can raise anything
        where = f"weights of {weights}" if weights is not None else "configuration"
        raise ConfigError(f"{kind.__name__} refuses the {where}: {in_one_line(error)[:200]}") from error
    return _logits_only(model.train(), TASKS[task][1])


def _names_here(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return names of tensors in ``model`` by their names in files.

    Tensors that the library ignores are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    changes: list[Any] = get_model_conversion_mapping(model)
    state, here = model.state_dict(), {}
    made = [one for one in changes if isinstance(one, WeightConverter)]
    renamed = [one for one in changes if not isinstance(one, WeightConverter)]
    for name in names:
        found, made_of = rename_source_key(name, renamed, made, model.base_model_prefix, state)
        unwanted = any(re.search(pattern, found) for pattern in model._keys_to_ignore_on_load_unexpected or ())
        if found in state or not unwanted:
            # A tensor that the library merges with others keeps its name, by which it is refused later.
            here[name] = name if made_of is not None else str(found)
    return here


def read_config(config: str, *, download: bool = False, options: dict[str, Any] | None = None) -> Any:
    """Read a configuration, and replace entries by ``options``.

    ``config`` is a folder, or a name of the hub.

    Raises:
        ConfigError: If there is no configuration, the library does not know its type, or it has no such entries.
    """
    transformers = _library()
    try:
        entries, _ = transformers.PreTrainedConfig.get_config_dict(config, local_files_only=not download)
        kind = entries.pop("model_type", None)
        known = transformers.AutoConfig.for_model(kind, **entries)
    except Exception as error:  # the library's own code can raise anything
        raise ConfigError(
            f"model.config={config}: expected a folder with the config.json of a network that transformers "
            f"{transformers.__version__} knows, or a name in the local cache of the hub (model.download=true looks it "
            f"up there): {in_one_line(error)[:200]}"
        ) from error
    for option in options or {}:
        if not hasattr(known, option):
            hint = did_you_mean(option, dir(known), "'model.{}'")
            raise ConfigError(f"there is no key 'model.{option}'{hint}; a configuration of {kind} has no such entry")
    return transformers.AutoConfig.for_model(kind, **{**entries, **options}) if options else known


def _library() -> Any:
    try:
        import transformers  # late: it takes seconds
    except ImportError as error:
        raise ConfigError(f"model=hf needs the package transformers ({error}): pip install transformers") from None
    return transformers


def _weights_of(config: str, weights: bool | None, transformers: Any, *, download: bool) -> str | None:
    """Return ``config`` if weights are to be loaded from it, otherwise None."""
    if weights is False:
        return None
    if Path(config).is_dir():
        is_there = any((Path(config) / name).is_file() for name in WEIGHTS)
    else:
        silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        cached = partial(transformers.utils.cached_file, config, local_files_only=True, **silent)
        is_there = download or any(isinstance(cached(name), str) for name in WEIGHTS)
    if weights and not is_there:
        raise ConfigError(f"model.weights=true, but {config} has no {' or '.join(WEIGHTS)}")
    return config if is_there else None


def _logits_only(model: Any, inputs: tuple[str, ...]) -> nn.Module:
    """Let the forward of ``model`` accept ``inputs`` and return the logits."""
    kind = type(model)
    taken = inspect.signature(kind.forward).parameters
    names = [name for name in inputs if name in taken]
    always = {"use_cache": False} if "use_cache" in taken else {}
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > len(names) or not kwargs.keys() <= {*names}:
            raise TypeError(
                f"{kind.__name__} takes {', '.join(names)}, got {len(args)} by place and {[*kwargs]} by name"
            )
        logits: Tensor = own(self, **dict(zip(names, args, strict=False)), **kwargs, **always).logits
        return logits

    def reset_layer(self: Any, layer: nn.Module) -> None:
        self._init_weights(layer)

    body: dict[str, Any] = {"forward": forward, "reset_layer": reset_layer, "names_here": _names_here}
    body |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    model.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda held: held.update(body))
    return model  # type: ignore[no-any-return]

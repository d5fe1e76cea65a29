"""The state of the stages as tensors of a checkpoint, for any cut.

model-*        the model's ``state_dict()``, by the uncut model's names
loss-*         the ``state_dict()`` of the loss, if it has one
ema-*          the moving average of the trained weights, if there is one, by the same names
optimizer-*    the state of the optimizers: :mod:`.optimizer_state`
data-*         the position of an iterable dataset, if the run trains on one
heads-*        local heads of stages, by prefixed names; the metadata names the unit that each follows

Only the names of the files depend on the cut, which the manifest records. Learning rates are not stored: a schedule is
a function of the update index and of the cut in use.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adl_dist.checkpoint import layout, nested, optimizer_state, tensor_files
from adl_dist.checkpoint.nested import Unstorable, is_extra_state
from adl_dist.checkpoint.tensor_files import EMA, HEADS, LOSS, MODEL, OPTIMIZER, Shard, Stored
from adl_dist.data.stream import Place
from adl_dist.errors import CheckpointError, ConfigError, UnusableError, in_one_line
from adl_dist.stage import Stage
from adl_dist.stage.tied import TiedWeights

Signature = dict[str, list[int]]
OLD_BUFFERS = "buffers"  # files of version 0.3.8, which are not read
DATA, PLACE = "data", "place"  # the files of a dataset's position, and the key of everything but tensors


def signature(model: nn.Module) -> Signature:
    """Return tensor shapes by name; raise ConfigError if one cannot be saved."""
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise ConfigError(f"{lazy[0]} of the model has no shape yet; run the model on one batch before handing it over")
    state = model.state_dict()
    _packed("model", state)
    plain = [name for name, value in state.items() if not (is_extra_state(name) or isinstance(value, Tensor))]
    if plain:
        raise ConfigError(f"state_dict() of the model has '{plain[0]}', which is no tensor; keep it in an extra state")
    return {name: list(value.shape) for name, value in state.items() if not is_extra_state(name)}


def state_of(stages: Iterable[Stage], num_stages: int) -> dict[str, Shard]:
    """Return the content of ``stages`` by file name, or raise ConfigError."""
    shards = {}
    for stage in stages:
        # Of a tied copy the first stage that holds one saves it.
        learners = [one for one in stage.learners if not isinstance(one, TiedWeights) or one.is_first]
        optimizers = [optimizer_state.shard_of(learner) for learner in learners]
        loss_fn, heads = _loss_with_state(stage), _head_tensors(stage)
        parts = {
            MODEL: _packed("model", stage.module.state_dict()),
            OPTIMIZER: Shard(
                {name: tensor for shard in optimizers for name, tensor in shard.tensors.items()},
                {name: text for shard in optimizers for name, text in shard.metadata.items()},
            ),
            LOSS: _packed("loss", {} if loss_fn is None else loss_fn.state_dict()),
            EMA: Shard({name: tensor for one in stage.averages_to_save for name, tensor in one.tensors.items()}),
            HEADS: Shard(heads, {stage.head_prefix: _end_of(stage)} if heads else {}),
        }
        for kind, shard in parts.items():
            if shard.tensors or shard.metadata or kind == MODEL:
                shards[tensor_files.file_name(kind, stage.index, num_stages)] = shard
    return shards


def shard_of_place(place: Place) -> dict[str, Shard]:
    """Return the position of a dataset, by file name, or raise ConfigError."""
    packer = nested.Packer()
    with _storable("training dataset"):
        text = json.dumps([place.epoch, place.sample, packer.packed("state_dict", place.state)])
    return {tensor_files.file_name(DATA, 0, 1): Shard(packer.tensors, {PLACE: text})}


def read_place(path: PurePath) -> Place | None:
    """Return the dataset's position at a checkpoint, or None if it has none."""
    stored, texts = tensor_files.scan(path, DATA, layout.read_manifest(path)["files"])
    with _explained(path):
        values = nested.unpacked({PLACE: texts[PLACE]}, stored) if PLACE in texts else {}
        return Place(*values[PLACE]) if values else None


def load(path: PurePath, stages: Sequence[Stage]) -> None:
    """Restore the stages of this process from a checkpoint of any cut."""
    manifest = layout.read_manifest(path)
    found = {kind: tensor_files.scan(path, kind, manifest["files"]) for kind in (MODEL, LOSS, OPTIMIZER, HEADS, EMA)}
    heads, averages = found[HEADS][0], found[EMA][0]
    _check_heads(path, stages, *found[HEADS])
    cut = ", ".join(f"{name} {value}" for name, value in manifest["identity"].get("cut", {}).items())
    where = f"{path} ({cut})" if cut else str(path)
    with _explained(path):
        for stage in stages:
            _fill(stage.module, *found[MODEL])
            for average in stage.averages:
                own = {name: averages[name] for name in averages.keys() & average.names}
                average.restore(dict(tensor_files.read(own)))
            if stage.head is not None:
                head = tensor_files.read({name: heads[name] for name in _head_tensors(stage)})
                stage.head.load_state_dict({name.removeprefix(stage.head_prefix): tensor for name, tensor in head})
            if (loss_fn := _loss_with_state(stage)) is not None and (state := nested.unpacked_state(*found[LOSS])):
                loss_fn.load_state_dict(state)
            for learner in stage.learners:
                optimizer_state.restore(where, learner, *found[OPTIMIZER])


def load_weights(path: PurePath, module: nn.Module, *, ema: bool = False) -> None:
    """Load parameters and buffers of a model or a part from a checkpoint.

    With ``ema`` load the moving averages of trained parameters. Raise CheckpointError if a tensor is missing or
    unreadable.
    """
    stored, extra = tensor_files.scan(path, MODEL, layout.read_manifest(path)["files"])
    with _explained(path):
        _fill(module, averaged(path, stored, module) if ema else stored, extra)


def loss_state(path: PurePath) -> dict[str, Any]:
    """Return the loss's ``state_dict()`` in a checkpoint, or an empty dict."""
    with _explained(path):
        return nested.unpacked_state(*tensor_files.scan(path, LOSS, layout.read_manifest(path)["files"]))


def dropped_note(path: PurePath, manifest: Mapping[str, Any]) -> str | None:
    """Return a note on ignored entries of version 0.3.8, or None."""
    stored, texts = tensor_files.scan(path, OLD_BUFFERS, manifest["files"])
    names = {name.removeprefix("attribute:") for name in (*stored, *texts) if name != "format"}
    names = {"state of the loss" if name.startswith("loss:") else name for name in names}
    names |= {*manifest["identity"].get("constants", ())}
    of_optimizers = tensor_files.scan(path, OPTIMIZER, manifest["files"])[1]
    for text in (text for name, text in of_optimizers.items() if name.startswith(optimizer_state.OF_STAGE)):
        names |= {*optimizer_state.names_of_values(text, ignored=True)}
    if not names:
        return None
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{path} is of an older version; it holds values that no state_dict() returns, and these are not restored: "
        f"{shown}; they begin as the script makes them"
    )


def averaged(path: PurePath, stored: Mapping[str, Stored], module: nn.Module | None) -> dict[str, Stored]:
    """Replace ``stored`` tensors of ``module`` by their moving averages.

    Without a module, equal weights show which names share a parameter. Raise CheckpointError without averages.
    """
    averages = tensor_files.scan(path, EMA, layout.read_manifest(path)["files"])[0]
    if not averages:
        raise CheckpointError(
            f"{path} holds no moving average of the weights: its run had none, or no update yet; omit ema=true, or "
            "train with train.ema=0.999"
        )
    names_of: dict[int, list[str]] = {}  # a parameter of several names is averaged under one of them
    for name, tensor in module.state_dict(keep_vars=True).items() if module is not None else ():
        names_of.setdefault(id(tensor), []).append(name)
    found = dict(stored)
    for names in names_of.values() if module is not None else _names_of_equal(stored, averages):
        average = next((averages[name] for name in names if name in averages), None)
        if average is not None:
            found |= dict.fromkeys(names, average)
    return found


def _names_of_equal(stored: Mapping[str, Stored], averages: Iterable[str]) -> Iterator[list[str]]:
    """Yield, for each average, all names of the weight that it averages.

    A stored tensor with equal values and no average counts as the same weight.
    """
    for name in averages:
        alike = {n: at for n, at in stored.items() if n not in averages and at.shape == stored[name].shape}
        own = dict(tensor_files.read({name: stored[name]}))[name] if alike else None
        yield [name, *(other for other, value in tensor_files.read(alike) if own is not None and value.equal(own))]


def verify(path: PurePath, expected: Signature) -> dict[str, Any]:
    """Verify checksums and signature of a checkpoint; return its manifest."""
    manifest = layout.verify(path)
    stored = tensor_files.scan(path, MODEL, manifest["files"])[0]
    saved = {name: at.shape for name, at in stored.items() if not name.startswith(nested.ENTRY)}
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            raise UnusableError(
                f"{path} is of another model: {name} is {expected.get(name, 'missing')} in this model and "
                f"{saved.get(name, 'missing')} in the checkpoint; use the run's own model= and data=, or another "
                "run_dir"
            )
    return manifest


def _loss_with_state(stage: Stage) -> Any:
    """Return the user's loss on ``stage`` if it has a ``state_dict()``."""
    loss_fn = stage.loss.users_loss if stage.is_last and stage.loss is not None else None
    return loss_fn if hasattr(loss_fn, "load_state_dict") else None


@contextmanager
def _storable(whose: str) -> Iterator[None]:
    """Turn an Unstorable into a ConfigError about a ``state_dict()``."""
    try:
        yield
    except Unstorable as error:
        raise ConfigError(
            f"state_dict() of the {whose} cannot be saved: {error}; let it return tensors, numbers and text"
            f"{', or train without run_dir' if whose != 'model' else ''}"  # that of a model is looked at in any case
        ) from None


def _packed(whose: str, state: Mapping[str, Any]) -> Shard:
    with _storable(whose):
        return nested.packed_state(state)


def _fill(module: nn.Module, stored: Mapping[str, Stored], texts: Mapping[str, str]) -> None:
    """Load the ``state_dict()`` of ``module``, with its extra state."""
    state = module.state_dict()
    entries = {f"{nested.ENTRY}{name}" for name in state if is_extra_state(name)}
    wanted = {name: at for name, at in stored.items() if name in state or (entries and name.startswith(nested.ENTRY))}
    found = nested.unpacked_state(wanted, {entry: texts[entry] for entry in entries & texts.keys()})
    if missing := [name for name in state if name not in found]:
        raise ValueError(f"{missing[0]} is missing")
    # Not strictly: a part of a module has its extra state, but is of another class.
    module.load_state_dict(nested.of_this_version(found, state), strict=False)


@contextmanager
def _explained(path: PurePath) -> Iterator[None]:
    """Turn any error while tensors are restored into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a file that was changed meanwhile, state that an optimizer refuses
        raise CheckpointError(
            f"{path} cannot be read: {in_one_line(error)}; an older checkpoint next "
            "to it, if there is one, is untouched"
        ) from error


def _check_heads(
    path: PurePath, stages: Sequence[Stage], heads: Mapping[str, Stored], places: Mapping[str, str]
) -> None:
    """Raise CheckpointError if saved heads have other shapes or places.

    ``places`` are the units that the heads in the checkpoint follow.
    """
    for stage in (stage for stage in stages if stage.head is not None):
        here = _end_of(stage)
        there = places.get(stage.head_prefix, here)
        shapes = {name: [*tensor.shape] for name, tensor in _head_tensors(stage).items()}
        misfits = [f"{n} does not fit" for n, shape in shapes.items() if n not in heads or heads[n].shape != shape]
        if there != here:
            misfits.append(f"{stage.head_prefix} stood after {there}, and would now stand after {here}")
        if misfits:
            raise CheckpointError(
                f"{path} holds heads of another cut or kind ({misfits[0]}); continue with the partition and "
                "options of method.head that it was made with, or start a new run with init_from= in another run_dir"
            )


def _head_tensors(stage: Stage) -> dict[str, Tensor]:
    state = stage.head.state_dict() if stage.head is not None else {}
    return {f"{stage.head_prefix}{name}": tensor for name, tensor in state.items()}


def _end_of(stage: Stage) -> str:
    """Return the unit of the uncut model that the head of ``stage`` follows."""
    return str(stage.module.units[-1])  # type: ignore[index]

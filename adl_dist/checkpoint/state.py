"""The state of the stages as tensors of a checkpoint, for any cut.

model-*        the model's ``state_dict()``, by the uncut model's names
loss-*         the ``state_dict()`` of the loss, if it has one
ema-*          the moving average of the weights that are trained, by the same names, if there is one
optimizer-*    what the optimizers remember: :mod:`.optimizer_state`
data-*         the position of an iterable dataset, if the run trains on one
heads-*        heads that stages learn from, by their prefixed names; the metadata says behind which unit each stands

Only the names of the files depend on the cut, and the manifest says what it was. Learning rates are not stored: a
schedule is a function of the update index and of the cut in use.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adl_dist.checkpoint import layout, nested, optimizer_state, tensor_files
from adl_dist.checkpoint.nested import Packer, Unstorable, is_extra_state
from adl_dist.checkpoint.tensor_files import EMA, HEADS, LOSS, MODEL, OPTIMIZER, Shard, Stored
from adl_dist.data.stream import Place
from adl_dist.errors import CheckpointError, ConfigError, UnusableError, in_one_line
from adl_dist.stage import Stage
from adl_dist.stage.tied import TiedWeights

Signature = dict[str, list[int]]
OLD_BUFFERS = "buffers"  # files of version 0.3.8, which are not read
DATA, PLACE = "data", "place"  # the files of a dataset's position, and the key of everything but tensors


def signature(model: nn.Module) -> Signature:
    """Return names and shapes of tensors; refuse those that cannot be saved."""
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise ConfigError(f"{lazy[0]} of the model has no shape yet; run the model on one batch before handing it over")
    state = model.state_dict()
    _packed("model", state)
    plain = [name for name, value in state.items() if not (is_extra_state(name) or isinstance(value, Tensor))]
    if plain:
        raise ConfigError(f"state_dict() of the model has '{plain[0]}', which is no tensor; keep it in an extra state")
    return {name: list(value.shape) for name, value in state.items() if not is_extra_state(name)}


def state_of(stages: Iterable[Stage], num_stages: int) -> dict[str, Shard]:
    """Return the state of the stages to save, by file name.

    Raises:
        ConfigError: a part of it cannot be saved.
    """
    shards = {}
    for stage in stages:
        loss_fn = _loss_with_state(stage)
        parts = {
            MODEL: _packed("model", stage.module.state_dict()),
            OPTIMIZER: _of_optimizers(stage),
            LOSS: _packed("loss", {} if loss_fn is None else loss_fn.state_dict()),
        }
        if own := stage.averages_to_save:
            parts[EMA] = Shard({name: tensor for one in own for name, tensor in one.tensors.items()})
        if stage.head is not None:
            parts[HEADS] = Shard(_head_tensors(stage), {stage.head_prefix: _end_of(stage)})
        for kind, shard in parts.items():
            if shard.tensors or shard.metadata or kind == MODEL:
                shards[tensor_files.file_name(kind, stage.index, num_stages)] = shard
    return shards


def shard_of_place(place: Place) -> dict[str, Shard]:
    """Return the position of a dataset, by file name, or raise ConfigError."""
    packer = Packer()
    with _storable("training dataset"):
        packed = packer.packed("state_dict", place.state)
    text = json.dumps([place.epoch, place.sample, packed])
    return {tensor_files.file_name(DATA, 0, 1): Shard(packer.tensors, {PLACE: text})}


def read_place(path: PurePath) -> Place | None:
    """Return the dataset's position at a checkpoint, or None if it has none."""
    tensors, metadata = tensor_files.scan(path, DATA, layout.read_manifest(path)["files"])
    if PLACE not in metadata:
        return None
    with _explained(path):
        epoch, sample, packed = json.loads(metadata[PLACE])
        values = dict(tensor_files.read({name: tensors[name] for name in nested.tensor_names([packed])}))
        return Place(epoch, sample, nested.unpacked(packed, values))


def load(path: PurePath, stages: Sequence[Stage]) -> None:
    """Restore the stages of this process from a checkpoint of any cut."""
    manifest = layout.read_manifest(path)
    files = manifest["files"]
    model, extra = tensor_files.scan(path, MODEL, files)
    of_loss = tensor_files.scan(path, LOSS, files)
    optimizer, values = tensor_files.scan(path, OPTIMIZER, files)
    heads, places = tensor_files.scan(path, HEADS, files)
    averages, _ = tensor_files.scan(path, EMA, files)
    _check_heads(path, stages, heads, places)
    cut = ", ".join(f"{name} {value}" for name, value in manifest["identity"].get("cut", {}).items())
    where = f"{path} ({cut})" if cut else str(path)
    with _explained(path):
        for stage in stages:
            _fill(stage.module, model, extra)
            for average in stage.averages:
                own = {name: averages[name] for name in averages.keys() & average.names}
                average.restore(dict(tensor_files.read(own)))
            if stage.head is not None:
                head = {name: heads[name] for name in _head_tensors(stage)}
                named = ((name.removeprefix(stage.head_prefix), tensor) for name, tensor in tensor_files.read(head))
                stage.head.load_state_dict(dict(named))
            if (loss_fn := _loss_with_state(stage)) is not None and (state := nested.unpacked_state(*of_loss)):
                loss_fn.load_state_dict(state)
            for learner in stage.learners:
                optimizer_state.restore(where, learner, optimizer, values)


def load_weights(path: PurePath, module: nn.Module, *, ema: bool = False) -> None:
    """Load parameters and buffers of a model or a part from a checkpoint.

    Raise CheckpointError if that fails. With ``ema`` the trained parameters are their moving averages.
    """
    files = layout.read_manifest(path)["files"]
    with _explained(path):
        tensors, extra = tensor_files.scan(path, MODEL, files)
        _fill(module, averaged(path, tensors, module) if ema else tensors, extra)


def dropped_note(path: PurePath, manifest: Mapping[str, Any]) -> str | None:
    """Return a note on ignored entries of version 0.3.8, or None."""
    tensors, texts = tensor_files.scan(path, OLD_BUFFERS, manifest["files"])
    names = [name.removeprefix("attribute:") for name in (*tensors, *texts) if name != "format"]
    held = ["state of the loss" if name.startswith("loss:") else name for name in names]
    of_stages = optimizer_state.saved_values(tensor_files.scan(path, OPTIMIZER, manifest["files"])[1])
    held += [name for one in of_stages for name in one["ignored"]]
    held += manifest["identity"].get("constants", ())
    if not (names := sorted({*held})):
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{path} is of an older version; it holds values that no state_dict() returns, and these are not restored: "
        f"{shown}; they begin as the script makes them"
    )


def averaged(path: PurePath, tensors: Mapping[str, Stored], module: nn.Module | None) -> dict[str, Stored]:
    """Replace ``tensors`` by the moving averages of those of ``module``.

    Without a module, names of one parameter are told by their equal weights.

    Raises:
        CheckpointError: it holds none.
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
    found = dict(tensors)
    for names in names_of.values() if module is not None else _names_of_equal(tensors, averages):
        average = next((averages[name] for name in names if name in averages), None)
        if average is not None:
            found |= dict.fromkeys(names, average)
    return found


def _names_of_equal(tensors: Mapping[str, Stored], averages: Iterable[str]) -> Iterator[list[str]]:
    """Yield the name of each average, with those of equal tensors without one."""
    others = {name: stored for name, stored in tensors.items() if name not in averages}
    for name in averages:
        alike = {other: stored for other, stored in others.items() if stored.shape == tensors[name].shape}
        own = dict(tensor_files.read({name: tensors[name]}))[name] if alike else None
        yield [name, *(other for other, value in tensor_files.read(alike) if own is not None and value.equal(own))]


def verify(path: PurePath, expected: Signature) -> dict[str, Any]:
    """Verify checksums and signature of a checkpoint; return its manifest."""
    manifest = layout.verify(path)
    tensors = tensor_files.scan(path, MODEL, manifest["files"])[0]
    saved = {name: stored.shape for name, stored in tensors.items() if not name.startswith(nested.ENTRY)}
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            raise UnusableError(
                f"{path} is of another model: {name} is {expected.get(name, 'missing')} in this model and "
                f"{saved.get(name, 'missing')} in the checkpoint; use the run's own model= and data=, or another "
                "run_dir"
            )
    return manifest


def _loss_with_state(stage: Stage) -> Any:
    """Return the user's loss if it is on ``stage`` and has a ``state_dict()``, otherwise None."""
    loss_fn = stage.loss.users_loss if stage.is_last and stage.loss is not None else None
    return loss_fn if hasattr(loss_fn, "load_state_dict") else None


def _of_optimizers(stage: Stage) -> Shard:
    """Return the optimizer state of a stage and its head."""
    # Of a tied copy the first stage that holds one saves it.
    own = [one for one in stage.learners if not isinstance(one, TiedWeights) or one.is_first]
    shards = [optimizer_state.shard_of(one) for one in own]
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    return Shard(tensors, {name: text for shard in shards for name, text in shard.metadata.items()})


@contextmanager
def _storable(whose: str) -> Iterator[None]:
    """Turn an Unstorable inside into a ConfigError about a ``state_dict()``."""
    try:
        yield
    except Unstorable as error:
        raise ConfigError(
            f"state_dict() of the {whose} cannot be saved: {error}; let it return tensors, numbers and text, or train "
            "without run_dir"
        ) from None


def _packed(whose: str, state: Mapping[str, Any]) -> Shard:
    with _storable(whose):
        return nested.packed_state(state)


def _fill(module: nn.Module, stored: Mapping[str, Stored], texts: Mapping[str, str]) -> None:
    """Load the ``state_dict()`` of ``module``, with its extra state."""
    state = module.state_dict()
    names = state.keys()
    entries = [f"{nested.ENTRY}{name}" for name in names if is_extra_state(name)]
    tensors = {name: at for name, at in stored.items() if name in names or (entries and name.startswith(nested.ENTRY))}
    texts = {entry: texts[entry] for entry in entries if entry in texts}
    found = nested.unpacked_state(tensors, texts)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{missing[0]} is missing")
    # Not strictly: a part of a module has its extra state, but is of another class.
    module.load_state_dict(nested.of_this_version(found, state), strict=False)


@contextmanager
def _explained(path: PurePath) -> Iterator[None]:
    """Turn any error while tensors are restored into one readable error."""
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
    """Refuse heads of another kind or place, even if the shapes are the same."""
    shapes = {name: list(tensor.shape) for stage in stages for name, tensor in _head_tensors(stage).items()}
    misfits = [f"{n} does not fit" for n, shape in shapes.items() if n not in heads or heads[n].shape != shape]
    for stage in (stage for stage in stages if stage.head is not None):
        here = _end_of(stage)
        if (saved := places.get(stage.head_prefix, here)) != here:
            misfits.append(f"{stage.head_prefix} stood after {saved}, and would now stand after {here}")
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

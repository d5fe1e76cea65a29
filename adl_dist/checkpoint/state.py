"""The state of the stages as tensors of a checkpoint, for any cut.

model-*        the model's ``state_dict()``, by the uncut model's names
loss-*         the ``state_dict()`` of the loss, if it has one: :mod:`.loss_state`
ema-*          the moving average of the weights that are trained, by the same names, if there is one
optimizer-*    what the optimizers remember: :mod:`.optimizer_state`
heads-*        heads that stages learn from, by their prefixed names; the metadata says behind which unit each stands

Only the names of the files depend on the cut, and the manifest says what it was. Learning rates are not stored: a
schedule is a function of the update index and of the cut in use.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adl_dist.checkpoint import layout, loss_state, nested, optimizer_state, tensor_files
from adl_dist.checkpoint.nested import Unstorable, is_extra_state
from adl_dist.checkpoint.optimizer_state import FreshOptimizer
from adl_dist.checkpoint.tensor_files import EMA, HEADS, LOSS, MODEL, OPTIMIZER, Shard, Stored
from adl_dist.errors import CheckpointError, ConfigError, UnusableError
from adl_dist.memory import has_plain_memory, memory_of
from adl_dist.stage import Learner, LossFn, Stage
from adl_dist.stage.tied import TiedWeights

Signature = dict[str, list[int]]
OLD_BUFFERS = "buffers"  # files of version 0.3.8, which are not read


@dataclass(frozen=True)
class FreshStage:
    """The optimizers of a stage, and its loss, before a checkpoint is read."""

    optimizers: Sequence[FreshOptimizer | None]  # of each of its learners
    loss_fn: LossFn | None = None

    @classmethod
    def of(cls, stage: Stage, scheduled: Collection[str] = (), loss_fn: LossFn | None = None) -> "FreshStage":
        """Record ``stage`` and the ``scheduled`` keys of its ``param_groups``."""
        optimizers = [FreshOptimizer.of(one, scheduled) if one.optimizer else None for one in stage.learners]
        return cls(optimizers, loss_fn if stage.is_last else None)


def signature(model: nn.Module) -> Signature:
    """Return names and shapes of tensors; refuse those that cannot be saved."""
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise ConfigError(f"{lazy[0]} of the model has no shape yet; run the model on one batch before handing it over")
    state = model.state_dict(keep_vars=True)
    _shard_of_model(state)
    state = {name: value for name, value in state.items() if not is_extra_state(name)}
    _check_is_its_memory(model, state)
    return {name: list(tensor.shape) for name, tensor in state.items()}


def _check_is_its_memory(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if ``state`` does not share the memory of ``model``.

    Weights are restored by writing to the entries of ``state``. A hook may return something else, or
    leave out a trained parameter.
    """
    registered = dict(model.named_parameters()) | dict(model.named_buffers())
    places = {*map(_place_of, registered.values())}
    returned = {*map(_place_of, state.values())}
    copies = [name for name, tensor in state.items() if _place_of(tensor) not in places]
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and _place_of(p) not in returned]
    if copies or left_out:
        name = [*copies, *left_out][0]
        what = "returns another tensor than the module's own" if copies else "leaves out this trained parameter"
        raise ConfigError(
            f"{name} of the model cannot be put back: state_dict() {what}, so that a checkpoint or init_from would not "
            "reach it; let state_dict() return what is registered (no hook that copies, changes or drops it), and "
            "convert weights of another form before they are given as init_from"
        )


def _place_of(tensor: Tensor) -> Hashable:
    """Return a key shared by tensors of the same elements in the same memory."""
    if not has_plain_memory(tensor):
        return memory_of(tensor)
    if tensor.is_contiguous():  # in whatever shape
        return tensor.data_ptr(), tensor.dtype, tensor.numel()
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def check_storable(stage: Stage, fresh: FreshStage) -> None:
    """Raise ConfigError if the optimizer, module or loss cannot be saved."""
    _of_optimizers(stage, fresh)
    _shard_of_model(stage.module.state_dict())
    loss_state.shard_of(fresh.loss_fn)


def state_of(stages: Iterable[Stage], num_stages: int, fresh: Mapping[int, FreshStage]) -> dict[str, Shard]:
    """Return the state of the stages to save, by file name.

    Raises:
        ConfigError: a part of it cannot be saved.
    """
    shards = {}
    for stage in stages:
        first = fresh[stage.index]
        parts = {
            MODEL: _shard_of_model(stage.module.state_dict()),
            OPTIMIZER: _of_optimizers(stage, first),
            LOSS: loss_state.shard_of(first.loss_fn),
        }
        if own := stage.averages_to_save:
            parts[EMA] = Shard({name: tensor for one in own for name, tensor in one.tensors.items()})
        if stage.head is not None:
            parts[HEADS] = Shard(_head_tensors(stage), {stage.head_prefix: _end_of(stage)})
        for kind, shard in parts.items():
            if shard.tensors or shard.metadata or kind == MODEL:
                shards[tensor_files.file_name(kind, stage.index, num_stages)] = shard
    return shards


def load(path: PurePath, stages: Sequence[Stage], fresh: Mapping[int, FreshStage]) -> None:
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
            _fill_tensors(_head_tensors(stage), heads)
            first = fresh[stage.index]
            if first.loss_fn is not None:
                loss_state.restore(first.loss_fn, *of_loss)
            for learner, of_optimizer in zip(stage.learners, first.optimizers, strict=True):
                optimizer_state.restore(where, learner, of_optimizer, optimizer, values)


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
    held += optimizer_state.dropped_values(tensor_files.scan(path, OPTIMIZER, manifest["files"])[1])
    held += manifest["identity"].get("constants", ())
    if not (names := sorted({*held})):
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{path} is of an older version; it holds values that no state_dict() returns, and these are not restored: "
        f"{shown}; they begin as the script makes them"
    )


def averaged(path: PurePath, tensors: Mapping[str, Stored], module: nn.Module) -> dict[str, Stored]:
    """Replace ``tensors`` by the moving averages of those of ``module``.

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
    for name, tensor in module.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    found = dict(tensors)
    for names in names_of.values():
        average = next((averages[name] for name in names if name in averages), None)
        if average is not None:
            found |= dict.fromkeys(names, average)
    return found


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


def _of_optimizers(stage: Stage, fresh: FreshStage) -> Shard:
    """Return the optimizer state of a stage and its head."""
    pairs = zip(stage.learners, fresh.optimizers, strict=True)
    shards = [optimizer_state.shard_of(*pair) for pair in pairs if not _is_kept_elsewhere(pair[0])]
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    return Shard(tensors, {name: text for shard in shards for name, text in shard.metadata.items()})


def _is_kept_elsewhere(learner: Learner) -> bool:
    """Return whether ``learner`` has a tied copy that another stage saves."""
    return isinstance(learner, TiedWeights) and not learner.is_first


def _shard_of_model(state: Mapping[str, Any]) -> Shard:
    try:
        return nested.packed_state(state)
    except Unstorable as error:
        raise ConfigError(f"state_dict() of the model cannot be saved: {error}") from None


def _fill(module: nn.Module, stored: Mapping[str, Stored], texts: Mapping[str, str]) -> None:
    """Restore the ``state_dict()`` of ``module``, with its extra state."""
    state = module.state_dict()
    _fill_tensors({name: value for name, value in state.items() if not is_extra_state(name)}, stored)
    if names := [name for name in state if is_extra_state(name)]:
        of_module = {f"{nested.ENTRY}{name}": texts[f"{nested.ENTRY}{name}"] for name in names}
        packed = {name: stored[name] for name in stored if name.startswith(nested.ENTRY)}
        module.load_state_dict(nested.unpacked_state(packed, of_module), strict=False)


def _fill_tensors(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    for name, tensor in tensors.items():
        shape = stored[name].shape if name in stored else "missing"
        if shape != list(tensor.shape):
            raise ValueError(f"{name} should have shape {list(tensor.shape)}, found {shape}")
    for name, value in tensor_files.read({name: stored[name] for name in tensors}):
        tensors[name].copy_(value)


@contextmanager
def _explained(path: PurePath) -> Iterator[None]:
    """Turn any error while tensors are restored into one readable error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a file that was changed meanwhile, state that an optimizer refuses
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}; an older checkpoint next "
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

"""What a loss keeps from call to call, like a counter: saved with the last stage, restored in any cut.

These are the variables of its closure, and the attributes and buffers of an object, as far as they move. Parameters of
a loss are not trained, and so not saved.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from adl_dist.checkpoint import closures, nested, storage
from adl_dist.checkpoint.closures import Place
from adl_dist.checkpoint.nested import Packer, Unstorable
from adl_dist.checkpoint.storage import Shard, Stored
from adl_dist.errors import ConfigError
from adl_dist.partition.state_walk import OF_TORCH

LOSS = "loss:"  # begins the names of its tensors, and is the key of the rest; no name of a module has a colon


class FreshLoss:
    """What a loss kept when the run began."""

    def __init__(self, loss_fn: Any) -> None:
        """Look at ``loss_fn``, before the first update and before a checkpoint is read."""
        self._loss_fn = loss_fn
        self._marks = {name: closures.mark(home[key]) for name, (home, key) in _places(loss_fn)}
        self._restored = set[str]()  # from a checkpoint: no longer what a new loss has

    def moved(self) -> Shard:
        """Return what is another value now.

        Raises:
            ConfigError: a part of it cannot be saved.
        """
        values = {name: home[key] for name, (home, key) in _places(self._loss_fn)}
        moved = {
            name: value
            for name, value in values.items()
            if name in self._restored or closures.has_moved(self._marks.get(name), value)
        }
        if not moved:
            return Shard({})
        packer = Packer({}, torch.device("cpu"))
        try:
            packed = {name: packer.packed(f"{LOSS}{name}", value) for name, value in moved.items()}
        except Unstorable as error:
            raise ConfigError(
                f"what the loss keeps cannot be saved: {str(error).removeprefix(LOSS)}. Without it a resumed run would "
                "differ; let the loss keep numbers and tensors only, or train without run_dir"
            ) from None
        return Shard(packer.tensors, {LOSS: json.dumps(packed)})

    def restore(self, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
        """Give the loss what was saved for it."""
        values = json.loads(metadata.get(LOSS, "{}"))
        read = dict(storage.read({name: tensors[name] for name in nested.tensor_names([*values.values()])}))
        places = dict(_places(self._loss_fn))
        for name, packed in values.items():
            value = nested.unpacked(packed, read, device=torch.device("cpu"), steps_on_cpu=True)
            closures.put(places[name], value)
            self._restored.add(name)


def not_kept(loss_fn: Any, names: Iterable[str]) -> list[str]:
    """Return those of the ``names`` of what a loss moves that no checkpoint holds, like global variables."""
    held = [name for name, _ in _places(loss_fn)]
    return [name for name in names if not any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in held)]


def _places(loss_fn: Any) -> Iterator[tuple[str, Place]]:
    if not isinstance(loss_fn, nn.Module):
        yield from closures.places("loss_fn", loss_fn)
        return
    for path, module in loss_fn.named_modules(prefix="loss_fn"):
        yield from ((f"{path}.{key}", (module._buffers, key)) for key in module._buffers)
        yield from ((f"{path}.{key}", (module.__dict__, key)) for key in module.__dict__ if key not in OF_TORCH)

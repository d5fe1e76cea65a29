"""The position of an iterable dataset, in the checkpoint files ``data-*``."""

import json
from pathlib import PurePath

from adl_dist.checkpoint import layout, nested, tensor_files
from adl_dist.checkpoint.nested import Packer, Unstorable
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.data.stream import Place
from adl_dist.errors import CheckpointError, ConfigError

DATA = "data"
PLACE = "place"  # the key of everything but tensors
FILE = tensor_files.file_name(DATA, 0, 1)


def shard_of(place: Place) -> Shard:
    """Return the position of a dataset as a shard of a checkpoint.

    Raises:
        ConfigError: its ``state_dict`` holds what cannot be saved.
    """
    packer = Packer()
    try:
        packed = packer.packed("state_dict", place.state)
    except Unstorable as error:
        raise ConfigError(
            f"training dataset: what its state_dict() returns cannot be saved: {error}; let it return tensors, numbers "
            "and text, in lists, tuples and dictionaries"
        ) from None
    return Shard(packer.tensors, {PLACE: json.dumps([place.epoch, place.sample, packed])})


def read(path: PurePath) -> Place | None:
    """Return the dataset's position at a checkpoint, or None if it has none.

    Raises:
        CheckpointError: it cannot be read.
    """
    tensors, metadata = tensor_files.scan(path, DATA, layout.read_manifest(path)["files"])
    if PLACE not in metadata:
        return None
    try:
        epoch, sample, packed = json.loads(metadata[PLACE])
        values = dict(tensor_files.read({name: tensors[name] for name in nested.tensor_names([packed])}))
        state = nested.unpacked(packed, values)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: where the training dataset was cannot be read: {error}") from error
    return Place(epoch, sample, state)

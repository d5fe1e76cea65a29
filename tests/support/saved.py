"""Checkpoints of a few tensors, made without training, and what can happen to them."""

import json
import os

import torch

from adl_dist.checkpoint import layout, tensor_files
from adl_dist.checkpoint.async_save import PartWriter
from adl_dist.checkpoint.tensor_files import MODEL, OPTIMIZER, Shard

SIGNATURE = {"weight": [3, 4], "bias": [4], "num_batches_tracked": []}
# The files of two stages, of which the second remembers nothing.
FIRST, SECOND, MOMENTUM = (tensor_files.file_name(*which, 2) for which in ((MODEL, 0), (MODEL, 1), (OPTIMIZER, 0)))


def shards(seed=0):
    """Return a model by SIGNATURE and its momentum."""
    random = torch.Generator().manual_seed(seed)
    weight, bias, momentum = (torch.randn(shape, generator=random) for shape in ((3, 4), (4,), (3, 4)))
    return {
        FIRST: Shard({"weight": weight, "num_batches_tracked": torch.tensor(seed)}),
        SECOND: Shard({"bias": bias}),
        MOMENTUM: Shard({"weight.momentum_buffer": momentum}),
    }


def position(update, **metrics):
    """Return what a manifest holds besides the files."""
    return {"update": update, "epochs": 1, "sample": 0, "metrics": metrics, "identity": {}}


def saved(folder, update, content=None, **metrics):
    """Make a complete checkpoint in ``folder``."""
    path = layout.place(folder, update)
    if not layout.begin(path, "token"):
        return path
    files = tensor_files.write(path, content or shards())
    return layout.commit(path, position(update, **metrics), files | tensor_files.write_index(path, files))


def resealed(path, files):
    """Replace files of a checkpoint, by their names, and make all checksums right again."""
    manifest = json.loads((path / layout.MANIFEST).read_bytes())
    digests = {}
    for name in manifest["files"]:
        content = files.get(name, (path / name).read_bytes())
        (path / name).unlink()
        digests[name] = layout.create_hashed(path / name, [content])
    return layout.commit(path, position(manifest["update"]), digests)


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, file):
        self._file = str(file)

    def __reduce__(self):
        return os.mkdir, (self._file,)


def save(saver, write_parts, manifest):
    """Save the parts that ``write_parts`` has written, after the previous save has ended."""
    saver.begin(write_parts, manifest["update"])
    saver.complete(manifest)


OTHER = {"model-00009-of-00009.safetensors": Shard({"other": torch.ones(2)})}  # of another process


def writing(saver, content, other=None):
    """Return how a process that holds ``content`` writes its part, after ``other``, if any, has written OTHER."""

    def write_parts(path, token, background):
        if other is not None:
            other(path, OTHER, token=token, background=background)
        PartWriter(0, saver.take_part).write(path, content, token=token, background=background)
        return {0} if other is None else {0, 1}

    return write_parts

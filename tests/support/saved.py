"""Checkpoints of a few tensors, made without training, and what can happen to them."""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint.async_save import PartWriter, Saver

SIGNATURE = {"weight": [3, 4], "bias": [4], "num_batches_tracked": []}


def state(seed: int = 0) -> dict[str, Tensor]:
    """A model by SIGNATURE and its momentum."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(3, 4, generator=random),
        "model.bias": torch.randn(4, generator=random),
        "model.num_batches_tracked": torch.tensor(seed),
        "optimizer.weight.momentum_buffer": torch.randn(3, 4, generator=random),
    }


def position(update: int, **metrics: float) -> dict[str, Any]:
    """What a manifest tells besides the files."""
    return {"update": update, "epochs": 1, "sample": 0, "metrics": metrics, "of": {}}


def saved(folder: Path, update: int, tensors: Mapping[str, Tensor] | None = None, **metrics: float) -> Path:
    """A complete checkpoint of two ranks in ``folder``."""
    path = layout.begin(folder, update)
    parts = [{}, {}]
    for place, (name, tensor) in enumerate((tensors or state()).items()):
        parts[place % 2][name] = tensor
    files = {}
    for rank, part in enumerate(parts):
        files |= storage.write(path, part, rank=rank)
    files |= storage.join(path, [0, 1])
    return layout.commit(path, position(update, **metrics), files)


def resealed(path: Path, **files: bytes) -> Path:
    """Replace files of a checkpoint, by their names without dots, and make all checksums right again."""
    names = {file.name.replace(".", ""): file for file in path.iterdir()}
    for name, content in files.items():
        names[name].write_bytes(content)
    manifest = json.loads((path / layout.MANIFEST).read_bytes())
    told = {}
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        (path / name).unlink()
        with layout.HashedFile(path / name) as out:
            out.write(content)
        told[name] = out.told
    position = {key: manifest[key] for key in ("update", "epochs", "sample", "metrics", "of")}
    moved = path.rename(path.with_name(".saving-again"))
    (moved / layout.MANIFEST).unlink()
    return layout.commit(moved, position, told)


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._file,)


def index_of(path: Path) -> Any:
    """The index of a checkpoint, to be changed and pickled again."""
    return pickle.loads((path / storage.INDEX).read_bytes())


class OneProcess:
    """One process that holds ``tensors`` and reports to ``saver``."""

    def __init__(self, tensors: Mapping[str, Tensor], saver: Saver) -> None:
        self._tensors, self._saver = tensors, saver

    def write_parts(self, path: Path, *, token: str, background: bool) -> set[int]:
        """Write all that there is."""
        PartWriter(0, self._saver.take_part).write(path, self._tensors, token=token, background=background)
        return {0}

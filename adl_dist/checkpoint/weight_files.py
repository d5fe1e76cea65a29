"""Weights in safetensors files, or a state_dict saved by ``torch.save``.

Safetensors are in a file, a folder with an index of several (``model.safetensors.index.json``, as on the Hugging Face
hub), a folder with one ``model.safetensors``, or a checkpoint. They are read one tensor at a time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.checkpoint import layout, storage, tensor_files
from adl_dist.checkpoint.nested import ENTRY, is_extra_state, of_this_version
from adl_dist.checkpoint.run_dir import CHECKPOINTS, chosen_checkpoint
from adl_dist.checkpoint.tensor_files import INDEX, MODEL, SUFFIX, Stored
from adl_dist.errors import CheckpointError, ConfigError, in_one_line

SINGLE = f"{MODEL}{SUFFIX}"


class WeightFiles:
    """The places of a model's tensors on disk, or the tensors of a pickle.

    Attributes:
        tensors: by name, a :class:`.tensor_files.Stored`, or a tensor of a pickle.
    """

    def __init__(self, path: PurePath, tensors: Mapping[str, Any]) -> None:
        self.path = path
        self.tensors: dict[str, Any] = {name: stored for name, stored in tensors.items() if not name.startswith(ENTRY)}

    @classmethod
    def at(cls, path: PurePath) -> "WeightFiles":
        """Find the weights at ``path``, or raise CheckpointError.

        A checkpoint is verified by its checksums.
        """
        try:
            return cls(path, _tensors_at(path))
        except CheckpointError as error:
            raise CheckpointError(f"init_from: {error}") from error
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"init_from={path} cannot be read ({in_one_line(error)[:200]}); expected a state_dict saved by "
                f"torch.save, a {SUFFIX} file, like those of adl-dist export, a folder with {INDEX} and all files that "
                f"it names, or with {SINGLE}, or the folder of a checkpoint"
            ) from error

    def check(self, model: nn.Module, skip: Sequence[str] = ()) -> None:
        """Check that names and shapes equal those of ``model``, except ``skip``.

        A tied tensor may be stored under one of its names, or under several with equal values. Raise CheckpointError
        that names the first mismatch.
        """
        state = {
            n: value
            for n, value in model.state_dict(keep_vars=True).items()
            if not is_extra_state(n) and not matches(n, skip)
        }
        found = {id(tensor) for name, tensor in state.items() if name in self.tensors}
        here = {name: list(t.shape) for name, t in state.items() if name in self.tensors or id(t) not in found}
        held = {name: stored for name, stored in self.tensors.items() if not is_extra_state(name)}
        there = {n: list(at.shape) if isinstance(at, Stored | Tensor) else type(at).__name__ for n, at in held.items()}
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                pattern = f"{layer}.*" if (layer := name.rpartition(".")[0]) else name
                way_out = f"the pattern {pattern} in init_skip leaves it out, as for a new head"
                if name not in here or name not in there:
                    way_out += (
                        "; or use the model= and data= that it was made with, or save it under this model's names"
                    )
                raise CheckpointError(
                    f"init_from={self.path} is of another model: {name} is {here.get(name, 'missing')} in this model "
                    f"and {there.get(name, 'missing')} in the file, which begins with {next(iter(there), 'nothing')}; "
                    f"{way_out}"
                )
        names_of: dict[int, list[str]] = {}
        for name in sorted(state.keys() & self.tensors.keys()):
            names_of.setdefault(id(state[name]), []).append(name)
        for first, *others in names_of.values():
            values = dict(self.read([first, *others])) if others else {}  # of one tensor, which would lose all but one
            for other in others:
                if not torch.equal(values[first], values[other].to(values[first].dtype)):
                    raise CheckpointError(
                        f"init_from={self.path} is of another model: {first} and {other} are one tensor in this "
                        "model and have different values in the file; build the model without tied weights, or use "
                        "partition.tied=untie"
                    )

    def load_into(self, model: nn.Module, skip: Sequence[str] = ()) -> None:
        """Load tensors except ``skip``; CheckpointError if ``model`` has others.

        Raise ConfigError for a pattern that no tensor of ``model`` or of the files matches.
        """
        state = model.state_dict()
        for pattern in skip:
            if not any(matches(name, [pattern]) for name in (*state, *self.tensors)):
                raise ConfigError(
                    f"init_skip: no tensor of the model or of the file matches '{pattern}'; the last ones are "
                    f"{', '.join([*state][-3:])} in the model and {', '.join([*self.tensors][-3:])} in the file"
                )
        self.tensors = {name: stored for name, stored in self.tensors.items() if not matches(name, skip)}
        self.check(model, skip)
        try:  # not strictly, as of several names of one tensor one is enough
            model.load_state_dict(of_this_version(dict(self.read(state)), state), strict=False)
        except (RuntimeError, ValueError, TypeError) as error:  # of a load_state_dict or hook of the user's
            raise CheckpointError(f"init_from={self.path} cannot be loaded: {in_one_line(error)}") from error

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors of the files by ``names``, and drop all others."""
        self.tensors = {new: self.tensors[old] for old, new in names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for ``names`` that exist, or raise CheckpointError."""
        held = {name: self.tensors[name] for name in names if name in self.tensors}
        yield from ((name, one) for name, one in held.items() if not isinstance(one, Stored))
        try:
            yield from tensor_files.read({name: one for name, one in held.items() if isinstance(one, Stored)})
        except Exception as error:
            raise CheckpointError(
                f"init_from={self.path} cannot be read any more ({in_one_line(error)}); was it changed?"
            ) from error


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether ``name`` matches one of ``patterns``, as file names do."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tensors_at(path: PurePath) -> Mapping[str, Any]:
    """Return by name the place of each tensor, or the tensors of a pickle."""
    names = storage.names(path)
    if layout.MANIFEST in names:
        return tensor_files.scan(path, MODEL, layout.verify(path)["files"])[0]
    if INDEX in names:
        of_name = dict(json.loads(storage.read(path / INDEX))["weight_map"])
        held = {file: tensor_files.header(path / PurePath(file).name)[0] for file in {*of_name.values()}}
        return {name: held[file][name] for name, file in of_name.items()}
    if f"{CHECKPOINTS}/" in names and SINGLE not in names:
        # Not taken by itself, as each process could find another one while that run continues.
        raise CheckpointError(f"{path} is a run folder; give its checkpoint: {chosen_checkpoint(path, None)}")
    if names:
        path = path / SINGLE
    if path.suffix == SUFFIX:
        return tensor_files.header(path)[0]
    with storage.open_file(path) as file:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    is_flat = isinstance(state, Mapping) and not any(isinstance(value, Mapping) for value in state.values())
    if not is_flat or not all(isinstance(name, str) for name in state):
        held_there = f" with {', '.join(map(str, [*state][:3]))}" if isinstance(state, Mapping) else ""
        raise ValueError(f"it holds a {type(state).__name__}{held_there}; save the state_dict alone")
    return dict(state)

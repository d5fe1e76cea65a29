"""Weights of any origin: in safetensors files, or a state_dict saved by ``torch.save``.

The former are in a file, a folder with an index of several (``model.safetensors.index.json``, as the Hugging Face hub
has them), a folder with one ``model.safetensors``, or a checkpoint. They are read one tensor at a time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.checkpoint import layout, tensor_files
from adl_dist.checkpoint.nested import ENTRY, is_extra_state, of_this_version
from adl_dist.checkpoint.storage import read, storage_of
from adl_dist.checkpoint.tensor_files import INDEX, MODEL, SUFFIX, Stored
from adl_dist.errors import CheckpointError, in_one_line

SINGLE = f"{MODEL}{SUFFIX}"


class WeightFiles:
    """The places of the tensors of a model on disk.

    Attributes:
        tensors: by name, where each is.
    """

    def __init__(self, path: PurePath, tensors: Mapping[str, Any]) -> None:
        self.path = path
        self.tensors: dict[str, Any] = {name: stored for name, stored in tensors.items() if not name.startswith(ENTRY)}

    @classmethod
    def at(cls, path: PurePath) -> "WeightFiles":
        """Find the weights at ``path``, and verify them if it is a checkpoint.

        Raises:
            CheckpointError: it is nothing of what is known, or damaged.
        """
        names = storage_of(path).names(path)
        if layout.MANIFEST in names:
            try:
                return cls(path, tensor_files.scan(path, MODEL, layout.verify(path)["files"])[0])
            except CheckpointError as error:
                raise CheckpointError(f"init_from: {error}") from error
        if INDEX in names:
            return cls(path, _indexed(path))
        if SINGLE in names:
            return cls(path, _header(path / SINGLE))
        if names:
            raise CheckpointError(
                f"init_from={path} is a folder without {INDEX}, {SINGLE} and {layout.MANIFEST}; name the file itself, "
                "or the folder of a checkpoint, like runs/NAME/checkpoints/update-00000042"
            )
        return cls(path, _header(path)) if path.suffix == SUFFIX else PickledWeights(path)

    def check(self, model: nn.Module, skip: Sequence[str] = ()) -> None:
        """Compare names and shapes with those of ``model``.

        Tensors of ``model`` with names that match ``skip`` are left out.

        A tensor of several names may be there by one of them, or by more with the same values.

        Raises:
            CheckpointError: they differ; names the first that does.
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
                raise CheckpointError(
                    f"init_from={self.path} is of another model: {name} is {here.get(name, 'missing')} in this model "
                    f"and {there.get(name, 'missing')} in the file, which begins with {next(iter(there), 'nothing')}; "
                    "use the model= and data= that it was made with, or save it under the names of this model"
                )
        names_of: dict[int, list[str]] = {}
        for name in state.keys() & self.tensors.keys():
            names_of.setdefault(id(state[name]), []).append(name)
        for names in (sorted(names) for names in names_of.values() if len(names) > 1):
            values = dict(self.read(names))  # of one tensor, which would lose all but one
            one = values[names[0]]
            for other in names[1:]:
                if not torch.equal(one, values[other].to(one.dtype)):
                    raise CheckpointError(
                        f"init_from={self.path} is of another model: {names[0]} and {other} are one tensor in this "
                        "model and have different values in the file; build the model without tied weights, or use "
                        "partition.tied=untie"
                    )

    def load_into(self, model: nn.Module, skip: Sequence[str] = ()) -> None:
        """Load the tensors into ``model``, except those with names that match ``skip``.

        Raises:
            CheckpointError: they are those of a different model.
        """
        self.tensors = {name: stored for name, stored in self.tensors.items() if not matches(name, skip)}
        self.check(model, skip)
        # Not strictly, as of several names of one tensor one is enough.
        state = model.state_dict()
        try:
            model.load_state_dict(of_this_version(dict(self.read(state)), state), strict=False)
        except (RuntimeError, ValueError, TypeError) as error:  # of a load_state_dict or hook of the user's
            raise CheckpointError(f"init_from={self.path} cannot be loaded: {in_one_line(error)}") from error

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors of the files by ``names``, and drop all others."""
        self.tensors = {new: self.tensors[old] for old, new in names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``names`` that exist, each read into new memory.

        Raises:
            CheckpointError: the files cannot be read any more.
        """
        try:
            yield from tensor_files.read({name: self.tensors[name] for name in names if name in self.tensors})
        except Exception as error:
            raise CheckpointError(
                f"init_from={self.path} cannot be read any more ({in_one_line(error)}); was it changed?"
            ) from error


class PickledWeights(WeightFiles):
    """A state_dict saved by ``torch.save``, read as a whole."""

    def __init__(self, path: PurePath) -> None:
        """Read the file.

        Raises:
            CheckpointError: it cannot be read, or holds something else.
        """
        try:
            with storage_of(path).open(path) as file:
                state: Any = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise _not_there(path) from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"init_from={path} cannot be read ({in_one_line(error)[:120]}); expected a state_dict saved by "
                f"torch.save, or a {SUFFIX} file, like those of adl-dist export"
            ) from error
        is_flat = isinstance(state, Mapping) and not any(isinstance(value, Mapping) for value in state.values())
        if not is_flat or not all(isinstance(name, str) for name in state):
            held = f" with {', '.join(map(str, [*state][:3]))}" if isinstance(state, Mapping) else ""
            raise CheckpointError(f"init_from={path} holds a {type(state).__name__}{held}; save the state_dict alone")
        super().__init__(path, state)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See :class:`WeightFiles`."""
        yield from ((name, self.tensors[name]) for name in names if name in self.tensors)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether ``name`` matches one of ``patterns``, as file names do."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _not_there(path: PurePath) -> CheckpointError:
    return CheckpointError(
        f"init_from={path} is not there; expected a state_dict saved by torch.save, a {SUFFIX} file, a folder "
        f"with {INDEX} or {SINGLE}, or the folder of a checkpoint"
    )


def _header(file: PurePath) -> dict[str, Stored]:
    try:
        return tensor_files.header(file)[0]
    except FileNotFoundError:
        raise _not_there(file) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"init_from={file} cannot be read ({in_one_line(error)}); expected a {SUFFIX} file, like those "
            "of adl-dist export"
        ) from error


def _indexed(folder: PurePath) -> dict[str, Stored]:
    """Return where the tensors are that the index of ``folder`` names."""
    try:
        of_name = dict(json.loads(read(folder / INDEX))["weight_map"])
        held = {file: _header(folder / PurePath(file).name) for file in dict.fromkeys(of_name.values())}
        return {name: held[file][name] for name, file in of_name.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"init_from={folder}: {INDEX} does not fit the files next to it ({in_one_line(error)}); expected all files "
            "of one model, as they were saved"
        ) from error

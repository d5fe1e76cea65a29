"""A stand-in for CUDA graphs on a CPU: what is recorded is done again on the same memory, and nothing else is.

It is as strict as a graph. A replay reads and writes the memory that was there when it was recorded, whatever a Python
object holds by now. The Python code around the operations does not run again. Memory that has no reference any more is
spoilt after each replay, because another graph may use it. And a replay spoils what graphs that were recorded later in
the same pool have made: their memory may be what this one used only while it was recorded.
"""

import random

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.stage import graphs


class StandIn:
    """Records the operations of torch on one process's CPU; see :class:`adl_dist.stage.graphs.Recorder`.

    Attributes:
        num_recorded, num_replayed: graphs recorded, and replays done.
    """

    def __init__(self):
        self.num_recorded = self.num_replayed = 0
        self._memory = {}  # all storages that graphs compute with, by address of the object
        self._shared_pool = []  # of each recording in it what it has made
        self._unused = None
        self._draw = random.Random(0)

    def rehearse(self, work, *, branch=None):
        work()

    def record(self, works, *, is_kept):
        assert self._unused is None, "all is recorded before anything is replayed"
        pool = [] if is_kept else self._shared_pool
        made = set()
        branches = [self._steps_of(work, made) for work in works]
        pool.append(made)
        number = len(pool)
        self.num_recorded += 1

        def replay():
            if self._unused is None:
                self._unused = [memory for memory in self._memory.values() if _num_uses(memory) == 1]
            self.num_replayed += 1
            # Any order in which each branch keeps its own: the works need nothing of each other.
            turns = [place for place, steps in enumerate(branches) for _ in steps]
            self._draw.shuffle(turns)
            left = [iter(steps) for steps in branches]
            with torch.no_grad():
                for place in turns:
                    next(left[place]).do()
            later = [self._memory[key] for keys in pool[number:] for key in keys]
            for memory in (*self._unused, *later):
                memory.fill_(0xFF)  # NaN in any floating-point type

        return replay

    def _steps_of(self, work, made):
        recording = _Recording(self._memory, made)
        with recording:
            work()
        return recording.steps


def _num_uses(storage):
    return torch._C._storage_Use_Count(storage._cdata)


class _Recording(TorchDispatchMode):
    def __init__(self, memory, made):
        super().__init__()
        self.memory, self.made, self.steps = memory, made, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        done = func(*args, **kwargs or {})
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(done) if isinstance(leaf, Tensor)]
        is_new = [_key(leaf) not in given for leaf in made]
        if any(is_new) or func._schema.is_mutable:  # else it makes views
            self.made |= {_key(leaf) for leaf, new in zip(made, is_new, strict=True) if new}
            self.steps.append(_Step(func, self._placed(args), self._placed(kwargs or {}), self._placed(made), is_new))
        return done

    def _placed(self, values):
        return tree_map(lambda leaf: _Placed(leaf, self.memory) if isinstance(leaf, Tensor) else leaf, values)


def _key(tensor):
    return tensor.untyped_storage()._cdata


class _Placed:
    """A tensor by its place in memory."""

    def __init__(self, tensor, memory):
        self.storage = memory.setdefault(_key(tensor), tensor.untyped_storage())
        self.dtype = tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self):
        return torch.empty(0, dtype=self.dtype).set_(self.storage, *self.place)


class _Step:
    """One operation on tensors at their places."""

    def __init__(self, func, args, kwargs, made, is_new):
        self.func, self.args, self.kwargs, self.made, self.is_new = func, args, kwargs, made, is_new

    def do(self):
        args, kwargs, made = tree_map(
            lambda leaf: leaf.tensor() if isinstance(leaf, _Placed) else leaf, (self.args, self.kwargs, self.made)
        )
        done = [leaf for leaf in tree_leaves(self.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for place, again, is_new in zip(made, done, self.is_new, strict=True):
            if is_new:
                place.copy_(again)


def use_stand_in(monkeypatch):
    """Have trainers record on the CPU; return the stand-ins that they make, one each."""
    made = []

    def recorder_for(device):
        made.append(StandIn())
        return made[-1]

    monkeypatch.setattr(graphs, "recorder_for", recorder_for)
    return made

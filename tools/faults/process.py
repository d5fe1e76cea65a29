"""One start of a run, as if it were a process of its own, with whatever was planted into it."""

import io
import random
import shutil
from collections import deque
from contextlib import ExitStack, redirect_stderr
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch

from adl_dist import engine
from adl_dist.checkpoint import async_save
from adl_dist.control import run_socket, worker
from adl_dist.control.requests import RequestKind
from adl_dist.training import edges
from adl_dist.transport.wire import LocalChannel
from tools.faults.disk import Died, Disk, DiskFault
from tools.faults.plan import StageBroke, Step, StepFault


class Process:
    """One start of a run as a process of its own: what it does to the disk after its death has not been done."""

    def __init__(self, job, run_dir, attempt):
        self._job, self._run_dir, self._attempt = job, run_dir, attempt
        self._as_it_died = run_dir.with_name(f"{run_dir.name}-as-it-died")
        fault = attempt.fault
        self.disk = Disk(run_dir, fault if isinstance(fault, DiskFault) else None, self._die)
        self._fatal_step = None
        self._background = Background(attempt)
        self.num_steps = 0

    def run(self, *, steps_left):
        """Train to the end, ``steps_left`` actions from here, more or less; return trainer and summary."""
        if isinstance(self._attempt.fault, StepFault):
            self._fatal_step = int(self._attempt.fault.share * steps_left)
        turns = Turns(self._attempt)
        with ExitStack() as stack:
            for place, name, planted in (
                (engine, "step", self._stepping(engine.step)),
                (worker, "interleave", partial(worker.interleave, pick_next=turns)),
                (edges, "LocalChannel", WatchedChannel),
                (async_save, "threading", self._background.threading),
                # Nothing asks this run anything, and its listener takes a twentieth of a second to end.
                (run_socket.LiveControl, "start", lambda live: None),
            ):
                stack.enter_context(patch.object(place, name, planted))
            stack.enter_context(redirect_stderr(io.StringIO()))  # warnings
            stack.enter_context(self.disk.watched())
            self._trainer = self._job.trainer()
            return self._trainer, self._job.fit(self._trainer, self._run_dir)

    def bury(self):
        """Leave the folder as it was when the process died."""
        shutil.rmtree(self._run_dir)
        self._as_it_died.rename(self._run_dir)

    @property
    def struck(self):
        """Where the fault came; nothing if it did not."""
        if self._fatal_step is not None:
            return f"before action {self._fatal_step}" if self.num_steps > self._fatal_step else ""
        return self.disk.struck

    def _stepping(self, step):
        def stepped(action, context):
            if self.disk.is_dead:
                raise Died
            self._background.tick()
            self.num_steps += 1
            if self.num_steps - 1 == self._fatal_step:
                match self._attempt.fault.what:
                    case Step.KILLED:
                        raise self._die()
                    case Step.RAISES:
                        raise StageBroke(f"stage {context.stage.index} at {action}")
                    case Step.ASKED_TO_STOP:
                        self._trainer.requests.ask(RequestKind.STOP, "the simulation")
            step(action, context)

        return stepped

    def _die(self):
        self.disk.is_dead = self._background.is_over = True
        shutil.copytree(self._run_dir, self._as_it_died)
        return Died()


class Turns:
    """Picks the stage that acts next: of those that can, one that does not wait just now, if there is one."""

    def __init__(self, attempt):
        self._attempt, self._rng = attempt, random.Random(attempt.seed)
        self._now = 0
        self._waits_until = {}

    def __call__(self, runnable):
        self._now += 1
        if self._rng.random() < self._attempt.share_late:
            self._waits_until[self._rng.choice(runnable)] = self._now + self._rng.randint(1, self._attempt.most_late)
        return self._rng.choice([k for k in runnable if self._waits_until.get(k, 0) <= self._now] or runnable)


class WatchedChannel(LocalChannel):
    """A channel that checks that a message is the same when it arrives, however late: nothing wrote to it meanwhile."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._copies = deque()

    def send(self, micro_batch, tensors):
        super().send(micro_batch, tensors)
        self._copies.append([tensor.detach().clone() for tensor in tensors])

    def recv(self, micro_batch):
        tensors = super().recv(micro_batch)
        for sent, tensor in zip(self._copies.popleft(), tensors, strict=True):
            assert torch.equal(sent, tensor), f"micro-batch {micro_batch} was written to on its way"
        return tensors


class Background:
    """Threads that run in one go, in the order of their starts, some actions later or when they are waited for."""

    def __init__(self, attempt):
        self._rng, self._most_late = random.Random(attempt.seed), attempt.most_late
        self._waiting = deque()  # from which action on it may run
        self._num_actions = 0
        self.is_over = False
        self.threading = SimpleNamespace(Thread=partial(_Thread, self))  # in place of the module

    def tick(self):
        """Another action has been done."""
        self._num_actions += 1
        while self._waiting and self._waiting[0][0] <= self._num_actions:
            self._run_next()

    def add(self, thread):
        self._waiting.append((self._num_actions + self._rng.randint(0, self._most_late), thread))

    def run_until(self, thread):
        """Run what waits up to ``thread``, if it waits."""
        while any(waiting is thread for _, waiting in self._waiting):
            self._run_next()

    def _run_next(self):
        _, thread = self._waiting.popleft()
        if not self.is_over:
            thread.target(*thread.args)


class _Thread:
    def __init__(self, background, *, target, args, **_):
        self.target, self.args = target, args
        self.start = partial(background.add, self)
        self._background = background

    def join(self, timeout=None):
        self._background.run_until(self)

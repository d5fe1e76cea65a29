"""Runs a function, or a command, on real gloo ranks that a fork server starts in milliseconds."""

import contextlib
import gc
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback

import torch

from adl_dist.cli.main import main
from adl_dist.distributed import parent_process
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.distributed.world import disconnect
from adl_dist.errors import ChannelError, StageFailed
from tests.support.commands import OF_RANKS, Outcome


class RanksFailed(AssertionError):
    """One or more ranks raised, crashed or hung."""


# One server process imports torch once and forks clean ranks from then on: milliseconds instead of seconds.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as main() does, which here comes after torch is loaded
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "adl_dist.training.trainer", "adl_dist.cli.train", "tests.support.toys"]
)


def _rank_main(rank, world_size, folder, body, args):
    # A folder, not a port: two test runs cannot collide, so nothing has to be retried.
    own = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in own.items()}, **{RENDEZVOUS_FOLDER: folder})
    torch.set_num_threads(1)
    gc.freeze()  # what the server has loaded stays shared
    try:
        torch.save(body(*args), f"{folder}/result-rank{rank}.pt")
    except BaseException as error:
        kind = "victim" if isinstance(error, (ChannelError, StageFailed)) else "cause"
        pathlib.Path(folder, f"{kind}-rank{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def run_ranks(world_size, body, *args, timeout_seconds=60.0):
    """Run ``body(*args)`` on ``world_size`` processes, as torchrun would; return what each returned.

    Raises:
        RanksFailed: with every rank's traceback, causes first, and the ranks that hung.
    """
    with _started(world_size, body, args) as (folder, ranks):
        deadline = time.monotonic() + timeout_seconds
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in hung:
            ranks[rank].kill()
            ranks[rank].join()
        reports = [f"{f.stem}:\n{f.read_text()}" for f in sorted(folder.glob("*-rank*.txt"))]
        crashed = [f"rank {rank}: exit code {p.exitcode}" for rank, p in enumerate(ranks) if p.exitcode]
        if crashed:
            late = [f"ranks {hung} still ran after {timeout_seconds} s"] if hung else []
            raise RanksFailed("\n".join([*crashed, *reports, *late]))
        return [torch.load(folder / f"result-rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def command_on_ranks(world_size, *words, env=None, timeout_seconds=60.0):
    """Run ``adl-dist *words`` as ``world_size`` ranks; once one has failed, end the others, as a launcher does.

    With ``env`` the ranks have those variables of a launcher alone.
    """
    with tempfile.TemporaryDirectory() as output:
        with _started(world_size, _command, (output, words, env)) as (_, ranks):
            deadline = time.monotonic() + timeout_seconds
            while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
                assert time.monotonic() < deadline, f"{' '.join(words)} still ran after {timeout_seconds} s"
                time.sleep(0.02)
            codes = [process.exitcode for process in ranks if process.exitcode]
        out, err = ("".join(f.read_text() for f in sorted(pathlib.Path(output).glob(f"{n}*"))) for n in ("out", "err"))
        return Outcome(2 if 2 in codes else max(codes, default=0), out, err)


def _command(output, words, env):
    """Run one rank of the command, with its output in files; a rank that fails ends here."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{output}/{name}{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), descriptor)
    if env is None:
        os.environ["TORCHELASTIC_RUN_ID"] = pathlib.Path(output).name  # a rank waits for a launcher to end it
    else:
        for name in OF_RANKS:
            os.environ.pop(name, None)
        os.environ.update(env)
        parent_process.RANK_0_SECONDS = 0.0  # no launcher ends them
    with contextlib.suppress(SystemExit):
        main(words)
    disconnect()  # a process of its own does so when it ends, one of multiprocessing's does not


@contextlib.contextmanager
def _started(world_size, body, args):
    """Start the ranks in a folder of their own; leave none behind."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank_main, args=(k, world_size, folder, body, args)) for k in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            yield pathlib.Path(folder), ranks
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()

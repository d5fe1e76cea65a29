"""Several ranks end with an error, and one prints it: rank 0, or another if rank 0 does not know it."""

import importlib
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from adl_dist.distributed import print_turn, world
from adl_dist.distributed.world import single_process
from adl_dist.errors import StageFailed

main = importlib.import_module("adl_dist.cli.main")  # the function of that name hides it
ERROR = StageFailed("rank 2: boom", exit_code=1)
OF_RANK_1 = f"adl-dist: error: rank 1: {ERROR}\n"


@pytest.fixture
def rank(monkeypatch):
    """Makes this process one of three ranks, which have met, or have not."""

    def be(number, *, joined=True, store=None, **attributes):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", "3")
        joined_world = replace(single_process(torch.device("cpu")), rank=number, size=3, **attributes)
        if store is not None:
            joined_world.store = store
        monkeypatch.setattr(world, "_world", joined_world if joined else None)
        return joined_world.store

    return be


def printed(capsys):
    def fail(words):
        raise ERROR

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_command", lambda name: fail)
        assert main._run(["train"]) == 1
    return capsys.readouterr().err


def test_rank_0_prints_and_lets_the_others_know(rank, capsys):
    store = rank(0)
    assert printed(capsys) == f"adl-dist: error: {ERROR}\n"
    assert store.check([print_turn.KEY])


def test_another_rank_is_silent_once_rank_0_has_printed(rank, capsys):
    store = rank(1)
    began = time.monotonic()
    threading.Timer(0.5, store.set, [print_turn.KEY, "printed"]).start()
    assert printed(capsys) == ""
    assert 0.4 < time.monotonic() - began < 5


def test_another_rank_prints_what_rank_0_did_not_hear(rank, capsys):
    rank(1, is_rank_0_informed=False)
    began = time.monotonic()
    assert printed(capsys) == OF_RANK_1
    assert time.monotonic() - began < 1


class Ended(dist.HashStore):
    def wait(self, *_):
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(("store", "expected"), [(None, OF_RANK_1), (Ended, "")], ids=["too late", "ended, and knew"])
def test_another_rank_prints_unless_rank_0_knew_and_has_ended(store, expected, rank, capsys, monkeypatch):
    monkeypatch.setattr(print_turn, "LIMIT", 0.2 * print_turn.LIMIT / print_turn.LIMIT.total_seconds())
    rank(1, store=store and store())
    assert printed(capsys) == expected


@pytest.mark.parametrize(("found_by_rank_0", "expected"), [(True, ""), (False, OF_RANK_1)])
def test_what_a_rank_finds_early_is_printed_by_rank_0(rank, capsys, monkeypatch, tmp_path, found_by_rank_0, expected):
    monkeypatch.setenv("ADL_DIST_RENDEZVOUS", str(tmp_path))
    rank(0, joined=False)
    print_turn.announce(printed=found_by_rank_0)
    rank(1, joined=False)
    assert printed(capsys) == expected

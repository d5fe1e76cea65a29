"""Several ranks end with an error, and rank 0 prints it; another rank does only if nothing has ended it meanwhile."""

import importlib

import pytest

from adl_dist.distributed import error_printing
from adl_dist.errors import StageFailed

main = importlib.import_module("adl_dist.cli.main")  # the function of that name hides it
ERROR = StageFailed("rank 2: boom", exit_code=1)


@pytest.mark.parametrize(("rank", "waits", "prefix"), [("0", [], ""), ("1", [5.0], "rank 1: ")])
def test_rank_0_prints_at_once_and_another_rank_after_a_while(rank, waits, prefix, monkeypatch, capsys):
    def fail(words):
        raise ERROR

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(main, "_command", lambda name: fail)
    waited = []
    monkeypatch.setattr(error_printing.time, "sleep", waited.append)
    assert main._run(["train"]) == 1
    assert capsys.readouterr().err == f"adl-dist: error: {prefix}{ERROR}\n"
    assert waited == waits

"""Links that are measured at the start: a run keeps them, for the stages and processes that they join."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from adl_dist.errors import ChannelError, ConfigError, StageFailed
from adl_dist.training import links, startup_sync


def look(rank, K, P, store, folder=None):
    """What one of P processes with K stages finds; a rank that fails says so to the others."""
    world = SimpleNamespace(num_stages=K, size=P, rank=rank, is_distributed=True, edges={}, device=None)
    with startup_sync.propagate_errors(store, rank=rank):
        return links.links_between("auto", world, store, folder)


def between(K, P, folder, rate, monkeypatch):
    """The links that rank 0 of P processes with K stages goes by, where each is measured to carry ``rate``."""
    monkeypatch.setattr(
        links, "measure_links", lambda edges, rank, device: {k: (rate + k, 0.5) for k in range(rank, K - 1, P)}
    )
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        for rank in range(1, P):
            pool.submit(look, rank, K, P, store)
        return look(0, K, P, store, folder)


def test_a_run_keeps_its_links_for_another_cut_it_measures(tmp_path, monkeypatch):
    first = between(3, 3, tmp_path, 100.0, monkeypatch)
    assert first == ((100.0, 101.0), (0.5, 0.5))
    assert between(3, 3, tmp_path, 200.0, monkeypatch) == first
    assert between(2, 2, tmp_path, 200.0, monkeypatch).bandwidth == (200.0,)
    assert between(4, 4, tmp_path, 200.0, monkeypatch).bandwidth == (200.0, 201.0, 202.0)
    assert between(3, 3, tmp_path, 300.0, monkeypatch) == first
    assert between(4, 2, tmp_path, 300.0, monkeypatch).bandwidth == (300.0, 301.0, 302.0)


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"2 stages in 2 processes": [[1]]}'])
def test_links_that_cannot_be_read_are_refused_in_one_line(text, tmp_path, monkeypatch):
    (tmp_path / "links.json").write_text(text)
    with pytest.raises(ConfigError, match=r"links\.json cannot be read: .*; remove it to measure the links again"):
        between(2, 2, tmp_path, 100.0, monkeypatch)


def test_a_rank_that_fails_at_its_links_is_named(monkeypatch):
    def fail(edges, rank, device):
        if rank == 1:
            raise ChannelError("the peer is gone")
        return {rank: (1e9, 1e-4)}

    monkeypatch.setattr(links, "measure_links", fail)
    monkeypatch.setattr(startup_sync, "disconnect", lambda **_: None)
    store = dist.HashStore()
    with pytest.raises(ChannelError, match="the peer is gone"):
        look(1, 3, 3, store)
    with pytest.raises(StageFailed, match="the peer is gone"):
        look(0, 3, 3, store)

"""``adl-dist plan --check`` as a user calls it, with processes."""

import pytest

from adl_dist.cli.plan import check
from tests.support.commands import in_process

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_a_check_trains_what_was_predicted(monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0.01)
    words = ("model=resnet8", "data=synthetic", "data.image_size=8", "train.batch_size=16", "partition.num_stages=2")
    machine = ("--bandwidth", "1e9", "--latency", "1e-5", "--neighbours", "0")
    done = in_process("plan", *words, *machine, "--stages", "2", "--methods", "adl", "--check", "1")
    assert done.code == 0, done.err
    titles = ("adl, K = 2, best cut", "adl, K = 2, even cut", "bp, one device")
    rows = [line for line in done.out.splitlines() if line.startswith(titles)]
    assert [row.startswith(title) for row, title in zip(rows, titles, strict=True)] == [True] * 3
    assert all(float(row.split()[-1]) > 0 for row in rows)

"""``adl-dist bench`` as a user calls it, with processes."""

import json
import sys

import pytest

from tests.support.commands import TINY, as_command, left_behind, shows

pytestmark = pytest.mark.ranks

NAMES = ["torch-bp", "torch-1f1b", "adl"]  # each process takes seconds to start


@pytest.mark.slow
@pytest.mark.timeout(190)
def test_a_bench_has_a_row_per_contender_and_keeps_every_run(tmp_path):
    out = tmp_path / "out"
    words = [f"{key}={value}" for key, value in TINY.items()]
    done = as_command(
        *(sys.executable, "-m", "adl_dist", "bench", *words),
        *("--contenders", ",".join([*NAMES, "torch-ddp"]), "train.batch_size=15", "method.accumulation_steps=3"),
        *("--repetitions", "1", "--updates", "2", "--warmup", "1", "--out", str(out)),
        timeout_seconds=180,
    )
    assert done.code == 0, done.err
    facts = json.loads((out / "bench.json").read_text())
    assert [run["contender"] for run in facts["runs"]] == NAMES == facts["order"]
    assert [row["contender"] for row in facts["table"]] == NAMES
    assert all(row["median"] > 0 for row in facts["table"])
    assert [len(run["peak_memory_bytes"]) for run in facts["runs"]] == [1, 2, 2]
    assert [row.get("predicted_images_per_second", 0) > 0 for row in facts["table"]] == [False, True, True]
    shows(
        done.out, [*NAMES, "ratio: of medians, to torch-bp", "units per stage 2 3", "left out: torch-ddp: the 15 samp"]
    )
    assert (out / "bench.svg").stat().st_size > 1000
    assert left_behind(tmp_path) == []
